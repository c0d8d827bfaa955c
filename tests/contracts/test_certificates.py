"""The contract of every certificate: no input that can be tried exceeds the proved upper bound."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from drawn_networks import Recipe, recipes
from example_counts import few
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depthgauge.theory.certificates.compared_networks import InputSet
from depthgauge.theory.depth.certificate import Certificate, certify
from depthgauge.theory.network.random_networks import random_network
from depthgauge.theory.suprema.network_on_shares import difference_below
from depthgauge.theory.surrogates.closed_forms import closed_form

SMALL = st.integers(1, 4)
FAMILIES = {
    "one layer, box": recipes(SMALL, kinds=("radius",)),
    "one layer, ball": recipes(SMALL, kinds=("ball",)),
    "no skips": recipes(SMALL, skip=False, kinds=("radius",)),
    "no skips, folded": recipes(SMALL, skip=False, kinds=("radius",), surrogate="folded"),
    "no skips, arbitrary": recipes(SMALL, skip=False, kinds=("radius",), surrogate="arbitrary"),
    "folded": recipes(SMALL, surrogate="folded"),
    "arbitrary": recipes(SMALL, surrogate="arbitrary"),
    "causal": recipes(SMALL, causal=True, surrogate="deleted"),
    "MLP": recipes(SMALL, mlp=True, surrogate="deleted"),
    "MLP, no skips": recipes(SMALL, mlp=True, skip=False, surrogate="deleted", kinds=("radius",)),
    "causal, MLP": recipes(SMALL, mlp=True, causal=True, surrogate="deleted"),
    "high effort": recipes(st.integers(1, 3), effort="high", most_layers=3),
    "wider": recipes(st.integers(5, 9), most_layers=3, most_heads=2),
    "scalings": recipes(st.integers(11, 14), most_layers=2, most_heads=2),
}
WIDE = recipes(st.sampled_from([16, 24, 32]), most_layers=2, most_heads=2)
EXAMPLES = {"scalings": 4}
VERIFIED = 4
"""The largest width at which these tests also verify every certificate."""


def gap_below(c: Certificate, x: Tensor) -> float:
    return difference_below(c.network, c.surrogate, x)


def is_inside(inputs: InputSet, x: Tensor) -> bool:
    """Whether every token is in the set, decided in rational arithmetic."""
    radius = Fraction(inputs.radius)
    rows = [[Fraction(v) for v in row] for row in torch.unique(x, dim=0).tolist()]
    if inputs.kind == "box":
        return all(abs(v) <= radius for row in rows for v in row)
    return all(sum(v * v for v in row) <= radius * radius for row in rows)


def inputs_to_try(c: Certificate, seed: int) -> list[Tensor]:
    """Random inputs of the set, with several numbers of tokens: corners and inner points; all corners if few."""
    generator = torch.Generator().manual_seed(seed)
    d, r = c.network.dim, c.inputs.radius
    sizes = [c.tokens] if c.tokens is not None else [1, 2, 3, 6]
    tried = []
    for n in sizes:
        normal = torch.randn(8, n, d, generator=generator, dtype=torch.float64)
        tried += [c.inputs.extreme(normal), c.inputs.project(normal * r / 2)]
        # One token repeated, and a few others: there softmax is furthest from the average.
        mostly = normal[:, :1].expand(-1, n, -1).clone()
        mostly[:, : max(1, n // 5)] = -normal[:, : max(1, n // 5)]
        tried.append(c.inputs.extreme(mostly))
        if n <= 3 and n * d <= 9 and c.inputs.kind == "box":
            tried.append(
                torch.tensor(list(itertools.product((-r, r), repeat=n * d)), dtype=torch.float64).view(-1, n, d)
            )
    return tried


def worst_of(c: Certificate, batch: Tensor) -> tuple[float, Tensor]:
    """The largest gap of a batch in floating point, and the input that attains it."""
    with torch.no_grad():
        gaps = (c.network(batch) - c.surrogate(batch)).abs().flatten(1).amax(dim=1)
    return gaps.max().item(), batch[int(gaps.argmax())]


def check_contract(c: Certificate, seed: int) -> None:
    """Check the properties that every certificate has."""
    # The lower bound: a witness of the right shape, inside the set, with the claimed value.
    assert c.witness.shape[1] == c.network.dim
    assert c.tokens is None or len(c.witness) == c.tokens
    assert is_inside(c.inputs, c.witness)
    assert gap_below(c, c.witness) >= c.lower >= 0
    seen = (c.network(c.witness) - c.surrogate(c.witness)).detach().abs().max().item()
    assert seen == pytest.approx(c.lower, rel=1e-6, abs=1e-10 * (1 + c.witness.abs().max().item()))
    # Shares are nonnegative and add up to 1, or are all zero.
    shares = [share for layer in c.share for share in layer]
    assert all(share >= 0 for share in shares)
    assert sum(shares) == pytest.approx(1) or sum(shares) == 0
    # The upper bound: a finite number, or the layer at which it was lost.
    if c.upper is None:
        assert c.lost_at is not None
        assert 0 <= c.lost_at < len(c.network)
        return
    assert math.isfinite(c.upper)
    assert c.lost_at is None
    assert c.lower <= c.upper
    worst = max((worst_of(c, batch) for batch in inputs_to_try(c, seed)), key=lambda found: found[0])[1]
    assert is_inside(c.inputs, worst)
    assert gap_below(c, worst) <= c.upper
    if c.network.dim <= VERIFIED:
        assert c.verify()


def certificate_of(recipe: Recipe, starts: int = 2, steps: int = 6) -> Certificate:
    case = recipe.case()
    return certify(case.network, case.surrogate, **case.request, starts=starts, steps=steps, seed=recipe.seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_input_exceeds_an_upper_bound(family: str) -> None:
    @few(EXAMPLES.get(family, 6))
    @given(recipe=FAMILIES[family])
    def holds(recipe: Recipe) -> None:
        check_contract(certificate_of(recipe), recipe.seed)

    holds()


@few(2)
@given(recipe=WIDE)
def test_no_input_exceeds_the_upper_bound_of_a_wide_network(recipe: Recipe) -> None:
    check_contract(certificate_of(recipe), recipe.seed)


def test_the_contract_rejects_damaged_certificates() -> None:
    """A bound just below the value attained at an input fails at that input."""
    network = random_network(layers=2, heads=1, dim=2, eta=0.1)
    c = certify(network, closed_form(network, "identity"), radius=1.0, starts=2, steps=6)
    assert c.upper is not None
    check_contract(c, 0)
    for damaged in (
        replace(c, upper=c.lower * (1 - 1e-9)),
        replace(c, lower=math.nextafter(c.upper, math.inf)),
        replace(c, upper=None),
        replace(c, witness=c.witness * (1 + 1e-12)),
        replace(c, comparison=replace(c.comparison, rows=len(c.witness) + 1)),
    ):
        with pytest.raises(AssertionError):
            check_contract(damaged, 0)
