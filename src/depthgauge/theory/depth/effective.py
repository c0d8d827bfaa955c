"""Effective depth: the smallest number of layers that approximates a network within a tolerance."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import InputError, require_positive
from depthgauge.base.format import counted, number
from depthgauge.base.frames import html_facts
from depthgauge.base.progress import Step, silent
from depthgauge.results.gauge_record import DepthRow
from depthgauge.theory.certificates.attack import DEFAULT_OPTIONS, AttackOptions, Hints, attack, multiset_attention
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.certificates.expansion_proof import ExpansionProof, layers_of
from depthgauge.theory.certificates.lead import Rank1Sum
from depthgauge.theory.certificates.token_attack import attack_tokens
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.depth.certificate import Certificate, certificate_of, check_request, method_of
from depthgauge.theory.linalg.bound_arithmetic import Outward
from depthgauge.theory.linalg.small_matrices import threads_for
from depthgauge.theory.network.network import AttentionFunction, SelfAttentionNetwork, require_network
from depthgauge.theory.surrogates.closed_forms import CLOSED_FORMS, closed_form, fold, refusal

FEW_LAYERS = 6
"""The largest number of layers at which every choice of kept layers is tried."""
CANDIDATES = 4
"""The number of choices tried per depth in deeper networks, cheapest first."""
SEARCH_STEPS = 15
"""Optimisation steps for the scalings of a candidate; the chosen folding gets a full certificate."""


@dataclass(frozen=True, eq=False, repr=False)
class Depth:
    """The shallowest network that was found within a tolerance.

    It is a folding, which keeps some layers and replaces every run of consecutive other layers by one averaging layer
    X + 1·mean(X)·V, or one of the one-layer closed forms. Depths compare by identity.

    Attributes:
        layers: the number of layers of the shallower network S'.
        kept: the layers that stay as they are.
        folded: the runs of layers that became one averaging layer each.
        error: the bound on ‖S(X) − S'(X)‖max over the set if `certified`, else the largest error on the given inputs.
        tolerance: the error that was allowed.
        certified: whether `error` is proved for every input of the set.
        network: S'.
        method: `fold`, or the name of the closed form (`corrected`, `mean-field`, …); `none` if every layer is kept.
        status: `proved`: S' is shallower and proved to be within the tolerance. `refuted`: for every shallower network
            that was tried, an input was found on which its error exceeds the tolerance. `undecided`: at least one of
            them is neither proved nor refuted. `measured`: the error was measured on given inputs only.
        tried: the number of shallower networks that were tried.
        certificate: the certificate of S', if `certified` and S' is shallower.
    """

    layers: int
    kept: tuple[int, ...]
    folded: tuple[tuple[int, ...], ...]
    error: float
    tolerance: float
    certified: bool
    network: SelfAttentionNetwork
    method: str = "fold"
    status: str = "proved"
    tried: int = 0
    certificate: Certificate | None = None

    def __repr__(self) -> str:
        how = "proved" if self.certified else "measured"
        return (
            f"Depth({self.layers} of {counted(self._layers_before, 'layer')} within {number(self.tolerance)}, "
            f"{how} error {number(self.error)}, {self.method}, {self.status})"
        )

    def _repr_html_(self) -> str:
        facts = {
            "layers": f"{self.layers} of {self._layers_before}",
            "kept": ", ".join(map(str, self.kept)) or "none",
            "folded": "; ".join(", ".join(map(str, run)) for run in self.folded) or "none",
            "error, proved" if self.certified else "error, measured": number(self.error),
            "tolerance": number(self.tolerance),
        }
        return html_facts("Effective depth", facts)

    @property
    def _layers_before(self) -> int:
        return len(self.kept) + sum(len(run) for run in self.folded)

    def to_json(self) -> dict[str, Any]:
        """Return the depth as it appears in the result JSON."""
        return DepthRow(**{name: getattr(self, name) for name in DepthRow.__struct_fields__}).to_json()


Choice = tuple[int, ...] | str
"""A shallower network: the layers that a folding keeps, or the name of a closed form with one layer."""


def can_fold(network: SelfAttentionNetwork) -> bool:
    """Return whether runs of layers fold into one: not causal, and neither norms, MLPs nor biases."""
    return not (network.causal or network.norm != "none" or network.has_mlp or network.has_attention_bias)


def one_layer_forms(network: SelfAttentionNetwork, length: int | None) -> list[str]:
    """Return the closed forms that make one layer of a network, for up to `length` tokens; the sharpest first."""
    names = ["parallel"] if network.has_mlp else reversed(list(CLOSED_FORMS))
    return [name for name in names if refusal(network, name, length) is None]


def shallower(network: SelfAttentionNetwork, choice: Choice, length: int | None = None) -> SelfAttentionNetwork:
    """Return the network of a choice, for up to `length` tokens."""
    return closed_form(network, choice, length) if isinstance(choice, str) else fold(network, choice)


class DepthBounds:
    """Upper bounds on |S − S'| over a set of inputs, for many shallower networks S'.

    The layer bounds of S are computed once. With `joint`, heads are bounded jointly where the network permits it;
    otherwise one by one, which is faster and less sharp. `attack` has the options of the attack of certificates.
    """

    def __init__(
        self,
        network: SelfAttentionNetwork,
        inputs: InputSet | Tokens,
        *,
        joint: bool = True,
        attack: AttackOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.network, self.inputs, self.attack = network.copy().to(device="cpu", dtype=torch.float64), inputs, attack
        self.length = inputs.length if isinstance(inputs, Tokens) else None
        itself = Comparison(self.network, self.network, inputs)
        self.S = layers_of(itself, Outward(), joint=joint) if can_fold(network) else None
        self._known: dict[Choice, float] = {}
        self._certificates: dict[Choice, Certificate] = {}

    @cached_property
    def seen(self) -> Callable[[Choice], float]:
        """The function that returns max|S − S'| on one hard input, in floating point.

        Folding all layers of a network, or its coarsest closed form, has a large error on this input; most choices
        above the tolerance fail on it.
        """
        coarsest = one_layer_forms(self.network, self.length)[-1] if self.S is None else ()
        comparison, lead = self._compared(coarsest), None
        if isinstance(self.inputs, Tokens):
            return measured_errors(self.network, attack_tokens(comparison, AttackOptions(starts=8)).x)
        if self.S is not None and self.S.joint:
            coordinates = torch.arange(self.network.dim)[: max(1, 2**20 // self.network.dim**3)]
            terms = map(self.S.terms, range(len(self.network)))
            lead = Rank1Sum.join(self.S.A, self.network.dim, terms).slices(coordinates)
        hard = attack(comparison, AttackOptions(starts=8, steps=10), Hints(lead=lead))
        return measured_errors(self.network, hard.tokens, multiset_attention(hard.counts.to(hard.tokens.dtype)))

    @cached_property
    def layer_costs(self) -> list[float]:
        """For each layer, its contribution to the plain bound on the error of folding it; empty without foldings."""
        if self.S is None:
            return []
        return [float(part.sum(0).floats().amax()) for part in self.S.added()]

    def _compared(self, choice: Choice) -> Comparison:
        return Comparison(self.network, shallower(self.network, choice, self.length), self.inputs)

    def error(self, choice: Choice) -> float:
        """Return an upper bound on |S − S'| for one choice."""
        is_fold = not isinstance(choice, str)
        if is_fold and len(choice) == len(self.network):
            return 0.0
        if choice not in self._known:
            if choice in self._certificates:
                upper = self._certificates[choice].upper
            elif is_fold and self.S is not None:
                upper = ExpansionProof(self._compared(choice), self.S, steps=SEARCH_STEPS).upper
            else:
                upper = method_of(self._compared(choice), S=self.S).upper
            self._known[choice] = math.inf if upper is None else upper
        return self._known[choice]

    def certificate(self, choice: Choice) -> Certificate:
        """Return the full certificate of one choice."""
        if choice not in self._certificates:
            self._certificates[choice] = certificate_of(self._compared(choice), "default", self.attack, self.S)
        return self._certificates[choice]


def effective_depth(
    network: SelfAttentionNetwork,
    *,
    tolerance: float,
    radius: float | None = None,
    inputs: Tokens | None = None,
    certified: bool = True,
    x: Float[Tensor, "*batch n d"] | None = None,
    progress: Step = silent,
) -> Depth:
    """Find the smallest number of layers of a network S' with ‖S(X) − S'(X)‖max ≤ `tolerance`.

    With one layer, S' is a closed form (`corrected`, `mean-field`, `parallel`, `last-layer`, `identity`). With more, it
    is a folding: it keeps some layers, replaces the others by X + 1·mean(X)·V_ℓ with V_ℓ = Σ_h V_ℓh, and merges every
    run of replaced layers into one, which is exact. Up to 6 layers all foldings are tried, beyond that the most
    promising ones of each depth. Networks with a causal mask, MLPs, norms or biases have no foldings; one layer is
    tried, by the closed forms of `collapse`.

    Args:
        network: S. Over a box it has neither MLP, norms nor biases, and skip connections if it is causal.
        tolerance: the largest error allowed in any entry of the output.
        radius: φ; with `certified`, the error is proved for every X with |X_ic| ≤ φ.
        inputs: `Tokens`, instead of `radius`: the error is proved for every sequence of these tokens.
        certified: prove the error for the whole set (True), or measure it on `x` (False).
        x: inputs [n, d] or [..., n, d] to measure on; only without `certified`.
        progress: called as `progress(done, total, label)` while the work advances.

    Returns:
        A `Depth`; at worst it keeps every layer, with error 0.

    Raises:
        InputError: an option is invalid or missing, or no method makes this network shallower with a proof.

    Example:
        >>> from depthgauge import random_network
        >>> network = random_network(layers=3, heads=1, dim=4, eta=0.01)
        >>> effective_depth(network, tolerance=1e-2, radius=1.0).layers
        1
    """
    network = require_network(network).copy()  # which the result keeps
    require_positive("tolerance", tolerance, "the largest error you accept in an output entry")
    if certified:
        if (radius is None) == (inputs is None):
            raise InputError("certified depth needs a radius, the largest |entry| an input may have, or inputs")
        with threads_for(network.dim):
            chosen = check_request(network, network, radius, None, inputs, None, "default")
            is_covered = network.skip and not (network.has_mlp or network.has_attention_bias)
            if radius is not None and not (can_fold(network) or is_covered):
                raise InputError(
                    "over a box, no shallower network is proved for networks with MLPs or biases, or causal ones "
                    "without skip connections; give the tokens: inputs=Tokens(…)"
                )
            bounds = DepthBounds(network, chosen)
            _require_forms(network, bounds.length)
            return certified_depth(bounds, tolerance, progress=progress)
    if x is None:
        raise InputError("measured depth needs inputs; give x of shape [n, d] or [..., n, d]")
    network.check_input(x)
    _require_forms(network, x.shape[-2])
    return measured_depth(network, measured_errors(network, x), tolerance, length=x.shape[-2], progress=progress)


def _require_forms(network: SelfAttentionNetwork, length: int | None) -> None:
    """Raise unless there is a shallower network to try."""
    if not (can_fold(network) or one_layer_forms(network, length)):
        raise InputError(refusal(network, "parallel", length) or "")


def measured_depth(
    network: SelfAttentionNetwork,
    errors: Callable[[Choice], float],
    tolerance: float,
    *,
    length: int | None = None,
    progress: Step = silent,
) -> Depth:
    """Return the measured depth at one tolerance; several tolerances can share `errors` (see `measured_errors`)."""
    L = len(network)
    every = range(L) if can_fold(network) else ()
    alone = [errors(tuple(k for k in range(L) if k != replaced)) for replaced in every]
    return _shallowest(network, lambda choice: (errors(choice), False), alone, tolerance, length, False, progress)


def certified_depth(bounds: DepthBounds, tolerance: float, *, progress: Step = silent) -> Depth:
    """Return the certified depth at one tolerance with its certificate; several tolerances can share `bounds`."""
    depth = proved_depth(bounds, tolerance, progress=progress)
    if depth.method == "none":
        return depth
    certificate = bounds.certificate(depth.kept if depth.method == "fold" else depth.method)
    # Both bounds are proved; the certificate, with more optimisation steps, is usually smaller.
    proved = min(depth.error, certificate.upper if certificate.upper is not None else depth.error)
    return replace(depth, error=proved, certificate=certificate)


def proved_depth(bounds: DepthBounds, tolerance: float, *, progress: Step = silent) -> Depth:
    """Return the certified depth at one tolerance, without the certificate of the shallower network."""

    def error(choice: Choice) -> tuple[float, bool]:
        # The difference e observed in floating point satisfies sup|S − S'| ≥ 0.9e, since its relative error is far
        # below 0.1. If 0.9e > tolerance, no upper bound is within the tolerance, and none is computed. An evaluation
        # that overflowed says nothing about exact outputs.
        least = 0.9 * bounds.seen(choice)
        return (least, True) if tolerance < least < math.inf else (bounds.error(choice), False)

    return _shallowest(bounds.network, error, bounds.layer_costs, tolerance, bounds.length, True, progress)


def measured_errors(
    network: SelfAttentionNetwork, x: Float[Tensor, "*batch n d"], attention: AttentionFunction | None = None
) -> Callable[[Choice], float]:
    """Return the function that maps a choice to max|S(x) − S'(x)|; it computes each choice once."""
    with torch.no_grad():
        truth = network(x, attention)

    @cache
    @torch.no_grad()
    def error(choice: Choice) -> float:
        if not isinstance(choice, str) and len(choice) == len(network):
            return 0.0
        gap = (truth - shallower(network, choice, x.shape[-2])(x, attention)).abs().amax()
        return float(gap) if bool(gap.isfinite()) else math.inf

    return error


def _shallowest(
    network: SelfAttentionNetwork,
    error: Callable[[Choice], tuple[float, bool]],
    costs: list[float],
    tolerance: float,
    length: int | None,
    certified: bool,
    progress: Step,
) -> Depth:
    """Try choices in order of their depth and return the first within the tolerance.

    `error` returns the error of a choice, and whether an input was found on which it exceeds the tolerance. `costs` has
    the cost of replacing each layer alone, which orders the foldings; there are none without costs.
    """
    L = len(network)
    one_layer = one_layer_forms(network, length)
    tried = refuted = 0
    for layers in range(1, L):
        progress(layers - 1, L, counted(layers, "layer"))
        folds = cheapest_choices(costs, layers, 2**L if L <= FEW_LAYERS else CANDIDATES)
        choices: list[Choice] = [*(one_layer if layers == 1 else ()), *folds]
        for choice in choices:
            reached, exceeds = error(choice)
            tried, refuted = tried + 1, refuted + exceeds
            if reached <= tolerance:
                progress(L, L, "")
                kept = () if isinstance(choice, str) else choice
                return Depth(
                    layers=layers,
                    kept=kept,
                    folded=runs_between(L, kept),
                    error=reached,
                    tolerance=tolerance,
                    certified=certified,
                    network=shallower(network, choice, length),
                    method=choice if isinstance(choice, str) else "fold",
                    status="proved" if certified else "measured",
                    tried=tried,
                )
    progress(L, L, "")
    status = "measured"
    if certified:
        status = "proved" if L == 1 else "refuted" if refuted == tried else "undecided"
    every = tuple(range(L))
    return Depth(L, every, (), 0.0, tolerance, certified, network, "none", status, tried)


def runs_between(depth: int, kept: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the runs of consecutive layers that are not kept."""
    runs = groupby(range(depth), key=lambda index: index in kept)
    return tuple(tuple(run) for is_kept, run in runs if not is_kept)


def cheapest_choices(costs: list[float], layers: int, most: int) -> list[tuple[int, ...]]:
    """Return the `most` choices of kept layers with the smallest total cost of the replaced ones.

    `costs` has the bound on the error of replacing each layer alone, and `layers` is the depth of the folding. Dynamic
    programming over the layers. The bound is neither additive nor monotone in the replaced layers, so these choices
    are candidates, whose errors are computed afterwards.
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
