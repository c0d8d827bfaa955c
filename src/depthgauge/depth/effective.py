"""Effective depth: the smallest number of layers that approximates a network within a tolerance."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge._format import number
from depthgauge._frames import html_table
from depthgauge.certificates.attack import AttackOptions, Candidate, Hints, attack, difference
from depthgauge.certificates.box import JOINT_LIMIT, BoxBounds, head_tensor
from depthgauge.certificates.certificate import Certificate, certify
from depthgauge.certificates.compared_networks import Comparison, InputSet
from depthgauge.certificates.difference import BoxDifference
from depthgauge.certificates.lead import lead_bound
from depthgauge.errors import InputError, require_positive
from depthgauge.linalg.rounding import add_up
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.progress import Step, silent
from depthgauge.surrogates.closed_forms import fold
from depthgauge.surrogates.expansion import Expansion
from depthgauge.surrogates.matching import match_heads

FEW_LAYERS = 6
"""The largest number of layers at which every choice of kept layers is tried."""
CANDIDATES = 4
"""The number of choices tried per depth in deeper networks, cheapest first."""
SEARCH_STEPS = 15
"""Optimisation steps for the scalings of a candidate; the chosen folding gets a full certificate."""


@dataclass(frozen=True, eq=False, repr=False)
class Depth:
    """The shallowest folding of a network that was found within a tolerance.

    A folding keeps some layers and replaces every run of consecutive other layers by one averaging layer
    X + 1·mean(X)·V. Depths compare by identity.

    Attributes:
        layers: the number of layers of the folding.
        kept: the layers that stay as they are.
        folded: the runs of layers that became one averaging layer each.
        error: the bound on ‖S(X) − S'(X)‖max over the set if `certified`, else the largest error on the given inputs.
        tolerance: the error that was allowed.
        certified: whether `error` is proved for every input of the set.
        network: the folding S'.
        certificate: the certificate of S', if `certified` and at least one layer was folded.
    """

    layers: int
    kept: tuple[int, ...]
    folded: tuple[tuple[int, ...], ...]
    error: float
    tolerance: float
    certified: bool
    network: SelfAttentionNetwork
    certificate: Certificate | None = None

    def __repr__(self) -> str:
        how = "proved" if self.certified else "measured"
        return (
            f"Depth({self.layers} of {self._layers_before} layers within {number(self.tolerance)}, "
            f"{how} error {number(self.error)})"
        )

    def _repr_html_(self) -> str:
        facts = {
            "layers": f"{self.layers} of {self._layers_before}",
            "kept": ", ".join(map(str, self.kept)) or "none",
            "folded": "; ".join(", ".join(map(str, run)) for run in self.folded) or "none",
            "error, proved" if self.certified else "error, measured": number(self.error),
            "tolerance": number(self.tolerance),
        }
        return html_table("Effective depth", [{"quantity": name, "value": value} for name, value in facts.items()])

    @property
    def _layers_before(self) -> int:
        return len(self.kept) + sum(len(run) for run in self.folded)

    def to_json(self) -> dict[str, Any]:
        """Return the depth as it appears in the result JSON."""
        return {
            "tolerance": self.tolerance,
            "certified": self.certified,
            "layers": self.layers,
            "kept": list(self.kept),
            "folded": [list(run) for run in self.folded],
            "error": self.error,
        }


def runs_between(depth: int, kept: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the runs of consecutive layers that are not kept."""
    runs: list[list[int]] = []
    for index in range(depth):
        if index in kept:
            continue
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return tuple(tuple(run) for run in runs)


def cheapest_choices(costs: list[float], layers: int, most: int) -> list[tuple[int, ...]]:
    """Return the `most` choices of kept layers with the smallest total cost of the replaced ones.

    Dynamic programming over the layers. The bound is neither additive nor monotone in the replaced layers, so these
    choices are candidates, whose errors are computed afterwards.

    Args:
        costs: for each layer, the bound on the error of replacing it alone.
        layers: the number of layers of the folding.
        most: the number of choices to return.
    """
    # best[number of layers so far, whether the last layer was replaced] = the `most` cheapest (cost, kept).
    best: dict[tuple[int, bool], list[tuple[float, tuple[int, ...]]]] = {(0, False): [(0.0, ())]}
    for index, cost in enumerate(costs):
        following: dict[tuple[int, bool], list[tuple[float, tuple[int, ...]]]] = {}
        for (used, open_run), entries in best.items():
            for spent, kept in entries:
                following.setdefault((used + 1, False), []).append((spent, (*kept, index)))
                following.setdefault((used + (not open_run), True), []).append((spent + cost, kept))
        best = {key: sorted(entries)[:most] for key, entries in following.items() if key[0] <= layers}
    ends = [entry for (used, _), entries in best.items() if used == layers for entry in entries]
    return [kept for _, kept in sorted(ends)[:most]]


class FoldBounds:
    """Upper bounds on |S − S'| for many foldings S' of one network; the layer bounds of S are computed once."""

    def __init__(
        self, network: SelfAttentionNetwork, radius: float, *, starts: int | None = None, steps: int = 40
    ) -> None:
        """Compute the layer bounds of the network.

        Args:
            network: S.
            radius: φ, the largest |entry| of an input.
            starts: starting points of the attack in a certificate; None chooses 4 to 32 by network size.
            steps: gradient steps of that attack.
        """
        self.network, self.radius = network, radius
        self.starts, self.steps = starts, steps
        self.joint = network.skip and network.dim <= JOINT_LIMIT
        self.S = BoxBounds(Expansion(network), radius, joint=self.joint)
        self._costs: list[float] | None = None
        self._known: dict[tuple[int, ...], float] = {}
        self._certificates: dict[tuple[int, ...], Certificate] = {}

    @cached_property
    def hard_input(self) -> Candidate:
        """An input on which folding all layers has a large error; most foldings above the tolerance fail on it."""
        everything = fold(self.network, ())
        comparison = Comparison(self.network, everything, InputSet("box", self.radius))
        lead = None
        if self.joint:
            coordinates = torch.arange(self.network.dim)[: max(1, 2**20 // self.network.dim**3)]
            lead = head_tensor(self.S.expansion, range(len(self.network))).slices(coordinates)
        return attack(comparison, AttackOptions(starts=8, steps=10), Hints(lead=lead))

    def seen(self, kept: tuple[int, ...]) -> float:
        """Return max|S − S'| on the hard input, in floating point."""
        if len(kept) == len(self.network):
            return 0.0
        candidate = self.hard_input
        with torch.no_grad():
            gap = difference(self.network, fold(self.network, kept), candidate.tokens, candidate.counts).abs().amax()
        return float(gap) if bool(gap.isfinite()) else math.inf

    def layer_costs(self) -> list[float]:
        """Return, for each layer, its contribution to the plain bound on the error of folding all layers."""
        if self._costs is None:
            other = BoxBounds(Expansion(fold(self.network, ())), self.radius, joint=False)
            parts = BoxDifference(self.S, other, []).plain().head_parts
            self._costs = [float(part.sum(0).amax()) for part in parts]
        return self._costs

    def error(self, kept: tuple[int, ...]) -> float:
        """Return the upper bound on |S − S'| for one choice of kept layers."""
        if kept not in self._known:
            self._known[kept] = 0.0 if len(kept) == len(self.network) else self._bound(kept)
        return self._known[kept]

    def certificate(self, kept: tuple[int, ...]) -> Certificate:
        """Return the full certificate of one choice of kept layers."""
        if kept not in self._certificates:
            folded = fold(self.network, kept)
            self._certificates[kept] = certify(
                self.network, folded, radius=self.radius, bounds=self.S, starts=self.starts, steps=self.steps
            )
        return self._certificates[kept]

    def _bound(self, kept: tuple[int, ...]) -> float:
        folded = fold(self.network, kept)
        other = BoxBounds(Expansion(folded), self.radius, joint=False)
        matches = match_heads(self.network, folded) if self.network.skip else []
        difference = BoxDifference(self.S, other, matches)
        value = difference.plain().value
        if self.joint:
            parts = difference.joint()
            lead = lead_bound(parts.T, parts.Tm, self.radius, steps=SEARCH_STEPS)
            value = torch.fmin(value, add_up(lead.value, parts.beyond))
        return float(value.nan_to_num(nan=float("inf")).amax())


def effective_depth(
    network: SelfAttentionNetwork,
    *,
    tolerance: float,
    radius: float | None = None,
    certified: bool = True,
    x: Float[Tensor, "*batch n d"] | None = None,
    progress: Step = silent,
) -> Depth:
    """Find the smallest number of layers of a folding S' of S with ‖S(X) − S'(X)‖max ≤ `tolerance`.

    A folding keeps some layers, replaces the others by X + 1·mean(X)·V_ℓ with V_ℓ = Σ_h V_ℓh, and merges every run of
    replaced layers into one, which is exact. Up to 6 layers all foldings are tried, beyond that the most promising
    ones of each depth.

    Args:
        network: S; not causal, without MLP and LayerNorm.
        tolerance: the largest error allowed in any entry of the output.
        radius: φ; with `certified`, the error is proved for every X with |X_ic| ≤ φ.
        certified: prove the error for the whole box (True), or measure it on `x` (False).
        x: inputs [n, d] or [..., n, d] to measure on; only without `certified`.
        progress: called as `progress(done, total, label)` while the work advances.

    Returns:
        A `Depth`; at worst it keeps every layer, with error 0.

    Raises:
        InputError: an option is invalid or missing, or the network cannot be folded.

    Example:
        >>> from depthgauge import random_network
        >>> network = random_network(layers=3, heads=1, dim=4, eta=0.01)
        >>> effective_depth(network, tolerance=1e-2, radius=1.0).layers
        1
    """
    check_depth_request(network, tolerance, radius, certified, x)
    if certified:
        assert radius is not None
        return certified_depth(FoldBounds(network, radius), tolerance, progress=progress)
    assert x is not None
    errors, L = measured_errors(network, x), len(network)
    alone = [errors(tuple(k for k in range(L) if k != replaced)) for replaced in range(L)]
    return _shallowest(network, errors, alone, tolerance, False, progress)


def certified_depth(bounds: FoldBounds, tolerance: float, *, progress: Step = silent) -> Depth:
    """Return the certified depth at one tolerance; several tolerances can share `bounds`."""
    network = bounds.network

    def error(kept: tuple[int, ...]) -> float:
        # The difference e observed in floating point satisfies sup|S − S'| ≥ 0.9e, since its relative error is far
        # below 0.1. If 0.9e > tolerance, no upper bound is within the tolerance, and none is computed.
        least = 0.9 * bounds.seen(kept)
        return least if least > tolerance else bounds.error(kept)

    depth = _shallowest(network, error, bounds.layer_costs(), tolerance, True, progress)
    if not depth.folded:
        return depth
    certificate = bounds.certificate(depth.kept)
    # Both bounds are proved; the certificate, with more optimisation steps, is usually smaller.
    proved = min(depth.error, certificate.upper if certificate.upper is not None else depth.error)
    return replace(depth, error=proved, certificate=certificate)


def check_depth_request(
    network: SelfAttentionNetwork, tolerance: float, radius: float | None, certified: bool, x: Tensor | None
) -> None:
    """Check all arguments of `effective_depth` before any long computation."""
    require_positive("tolerance", tolerance, "the largest error you accept in an output entry")
    if network.causal or network.norm != "none" or any(layer.mlp is not None for layer in network):
        raise InputError(
            "effective depth applies to networks that are not causal and have neither MLP nor LayerNorm; without "
            "LayerNorm, use certify(network, collapse(network, 'last-layer'), radius=…) instead"
        )
    if certified and radius is None:
        raise InputError("certified depth needs a radius; it is the largest |entry| an input may have")
    if certified:
        assert radius is not None
        require_positive("radius", radius, "the largest |entry| an input may have")
    elif x is None:
        raise InputError("measured depth needs inputs; give x of shape [n, d] or [..., n, d]")
    else:
        network.check_input(x)


def measured_errors(
    network: SelfAttentionNetwork, x: Float[Tensor, "*batch n d"]
) -> Callable[[tuple[int, ...]], float]:
    """Return the function that maps kept layers to max|S(x) − S'(x)|."""
    known: dict[tuple[int, ...], float] = {}
    with torch.no_grad():
        truth = network(x)

    def error(kept: tuple[int, ...]) -> float:
        if len(kept) == len(network):
            return 0.0
        if kept not in known:
            with torch.no_grad():
                gap = (truth - fold(network, kept)(x)).abs().amax()
            known[kept] = float(gap) if bool(gap.isfinite()) else float("inf")
        return known[kept]

    return error


def _shallowest(
    network: SelfAttentionNetwork,
    error: Callable[[tuple[int, ...]], float],
    costs: list[float],
    tolerance: float,
    certified: bool,
    progress: Step,
) -> Depth:
    L = len(network)
    for layers in range(1, L + 1):
        progress(layers - 1, L, f"{layers} layers")
        for kept in cheapest_choices(costs, layers, 2**L if L <= FEW_LAYERS else CANDIDATES):
            reached = error(kept)
            if reached <= tolerance:
                progress(L, L, "")
                folded = runs_between(L, kept)
                result = fold(network, kept) if folded else network
                return Depth(layers, kept, folded, reached, tolerance, certified, result)
    raise AssertionError("keeping every layer has error 0, so some depth is within the tolerance")
