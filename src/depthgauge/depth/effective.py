"""Effective depth: the fewest layers that do a network's work within a tolerance."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.certificates.attack import Candidate, InputSet, attack, difference
from depthgauge.certificates.box import JOINT_LIMIT, BoxBounds, head_tensor
from depthgauge.certificates.certificate import Certificate, certify
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
"""Up to this many layers every choice of kept layers is tried."""
CANDIDATES = 4
"""Choices tried per depth beyond that, cheapest first."""
SEARCH_STEPS = 15
"""Steps spent on the scalings of a candidate's leading term; the folding that is chosen gets a full certificate."""


@dataclass(frozen=True)
class Depth:
    """The shallowest folding of a network found within a tolerance.

    `layers` of the folded `network` do the work: the layers `kept` stand as they were, each run in `folded` became one
    averaging layer. `error` is what was proved for every input of the set (`certificate` holds the proof and the
    attacked lower bound), or what was seen on the inputs given.
    """

    layers: int
    kept: tuple[int, ...]
    folded: tuple[tuple[int, ...], ...]
    error: float
    tolerance: float
    certified: bool
    network: SelfAttentionNetwork = field(repr=False)
    certificate: Certificate | None = field(repr=False, default=None)

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        return {
            "tolerance": self.tolerance,
            "certified": self.certified,
            "layers": self.layers,
            "kept": list(self.kept),
            "folded": [list(run) for run in self.folded],
            "error": self.error,
        }


def runs_between(depth: int, kept: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The runs of consecutive layers that are not kept."""
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
    """The choices whose replaced layers cost least in sum, by dynamic programming over layers.

    The cost of a layer is what the bound charges for replacing it alone; the true bound is not additive (it is not
    even monotone), so the cheapest few are candidates, not the answer.
    """
    # best[(layers so far, whether a run is open)] = list of (cost, kept), the `most` cheapest.
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
    """Upper bounds on |S − S folded|, for many foldings of one network: the bounds of S itself are found once."""

    def __init__(
        self, network: SelfAttentionNetwork, radius: float, *, starts: int | None = None, steps: int = 40
    ) -> None:
        self.network, self.radius = network, radius
        self.starts, self.steps = starts, steps
        self.joint = network.skip and network.dim <= JOINT_LIMIT
        self.S = BoxBounds(Expansion(network), radius, joint=self.joint)
        self._costs: list[float] | None = None
        self._known: dict[tuple[int, ...], float] = {}
        self._certificates: dict[tuple[int, ...], Certificate] = {}

    @cached_property
    def hard_input(self) -> Candidate:
        """An input on which folding everything is far off; most foldings that fail, fail on it."""
        everything = fold(self.network, ())
        inputs = InputSet("box", self.radius)
        lead = None
        if self.joint:
            coordinates = torch.arange(self.network.dim)[: max(1, 2**20 // self.network.dim**3)]
            lead = head_tensor(self.S.expansion, range(len(self.network))).slices(coordinates)
        return attack(self.network, everything, inputs, starts=8, steps=10, lead=lead)

    def seen(self, kept: tuple[int, ...]) -> float:
        """max|S − S folded| on the hard input: what no bound can be below."""
        if len(kept) == len(self.network):
            return 0.0
        candidate = self.hard_input
        with torch.no_grad():
            gap = difference(self.network, fold(self.network, kept), candidate.tokens, candidate.counts).abs().amax()
        return float(gap) if bool(gap.isfinite()) else math.inf

    def layer_costs(self) -> list[float]:
        """What the plain bound charges for replacing each layer alone."""
        if self._costs is None:
            other = BoxBounds(Expansion(fold(self.network, ())), self.radius, joint=False)
            parts = BoxDifference(self.S, other, []).plain().head_parts
            self._costs = [float(part.sum(0).amax()) for part in parts]
        return self._costs

    def error(self, kept: tuple[int, ...]) -> float:
        """The bound for one choice of kept layers."""
        if kept not in self._known:
            self._known[kept] = 0.0 if len(kept) == len(self.network) else self._bound(kept)
        return self._known[kept]

    def certificate(self, kept: tuple[int, ...]) -> Certificate:
        """The full certificate of one choice, made once."""
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
    """The least number of layers of a folding of S that stays within `tolerance`, proved or measured.

    Keep some layers exactly, replace the others by X + 1·mean(X)·V_ℓ, fold runs of replaced neighbours into one. With
    `certified`, within means ‖S(X) − S'(X)‖max ≤ tolerance for every ‖X‖max ≤ `radius`; otherwise on the inputs `x`.
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
    """The certified depth at one tolerance, from bounds that may be shared between tolerances."""
    network = bounds.network

    def error(kept: tuple[int, ...]) -> float:
        # A folding that is off by more than the tolerance on some input has no bound within it: need not be computed.
        # (Floating point is off by far less than the tenth that is left here.)
        least = 0.9 * bounds.seen(kept)
        return least if least > tolerance else bounds.error(kept)

    depth = _shallowest(network, error, bounds.layer_costs(), tolerance, True, progress)
    if not depth.folded:
        return depth
    certificate = bounds.certificate(depth.kept)
    # The certificate is usually the sharper of the two; both are proved.
    proved = min(depth.error, certificate.upper if certificate.upper is not None else depth.error)
    return Depth(**{**vars(depth), "error": proved, "certificate": certificate})


def check_depth_request(
    network: SelfAttentionNetwork, tolerance: float, radius: float | None, certified: bool, x: Tensor | None
) -> None:
    """Everything that can be wrong with a request, before any long work."""
    require_positive("tolerance", tolerance, "the largest error you accept in an output entry")
    if network.causal or network.norm != "none" or any(layer.mlp is not None for layer in network):
        raise InputError(
            "effective depth folds layers into averages, which needs a network that is not causal and has neither MLP "
            "nor LayerNorm; for others, certify(network, collapse(network, 'last-layer'), radius=…) still works"
        )
    if certified and radius is None:
        raise InputError("certified depth needs a radius, the largest |entry| an input may have")
    if certified:
        assert radius is not None
        require_positive("radius", radius, "the largest |entry| an input may have")
    elif x is None:
        raise InputError("measured depth needs inputs x, [n, d] or [..., n, d]")
    else:
        network.check_input(x)


def measured_errors(
    network: SelfAttentionNetwork, x: Float[Tensor, "*batch n d"]
) -> Callable[[tuple[int, ...]], float]:
    """max|S(x) − S folded(x)| as a function of the kept layers."""
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
    raise AssertionError("keeping every layer has no error, so some depth is always within the tolerance")
