"""Effective depth: the smallest number of layers that approximates a network within a tolerance."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge._format import counted, number
from depthgauge._frames import html_table
from depthgauge.certificates.attack import AttackOptions, Hints, attack
from depthgauge.certificates.box import JOINT_LIMIT, BoxBounds, head_tensor
from depthgauge.certificates.certificate import Certificate, certify
from depthgauge.certificates.compared_networks import Comparison, InputSet
from depthgauge.certificates.difference import BoxDifference
from depthgauge.certificates.lead import lead_bound
from depthgauge.certificates.multiset import multiset_attention
from depthgauge.certificates.upper import prove_upper
from depthgauge.depth.foldings import cheapest_choices, runs_between
from depthgauge.errors import InputError, require_positive, require_radius
from depthgauge.linalg.rounding import add_up
from depthgauge.linalg.threads import threads_for
from depthgauge.network.network import AttentionFunction, SelfAttentionNetwork, require_network
from depthgauge.progress import Step, silent
from depthgauge.surrogates.closed_forms import CLOSED_FORMS, closed_form, fold, refusal
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
            "method": self.method,
            "status": self.status,
            "tried": self.tried,
        }


Choice = tuple[int, ...] | str
"""A shallower network: the layers that a folding keeps, or the name of a closed form with one layer."""


def shallower(network: SelfAttentionNetwork, choice: Choice) -> SelfAttentionNetwork:
    """Return the network of a choice."""
    return closed_form(network, choice) if isinstance(choice, str) else fold(network, choice)


def one_layer_methods(network: SelfAttentionNetwork) -> list[str]:
    """Return the closed forms that apply to the network, the sharpest first."""
    return [method for method in reversed(list(CLOSED_FORMS)) if refusal(network, method) is None]


class FoldBounds:
    """Upper bounds on |S − S'| for many shallower networks S'; the layer bounds of S are computed once."""

    def __init__(
        self,
        network: SelfAttentionNetwork,
        radius: float,
        *,
        starts: int | None = None,
        steps: int = 40,
        joint: bool = True,
    ) -> None:
        """Compute the layer bounds of the network.

        Args:
            network: S.
            radius: φ, the largest |entry| of an input.
            starts: starting points of the attack in a certificate; None chooses 4 to 32 by network size.
            steps: gradient steps of that attack.
            joint: whether heads are bounded jointly where the network permits it; otherwise one by one, which is
                faster and less sharp.
        """
        self.network, self.radius = network, radius
        self.starts, self.steps = starts, steps
        self.joint = joint and network.skip and network.dim <= JOINT_LIMIT
        self.S = BoxBounds(Expansion(network), radius, joint=self.joint)
        self._costs: list[float] | None = None
        self._known: dict[Choice, float] = {}
        self._certificates: dict[Choice, Certificate] = {}

    @cached_property
    def seen(self) -> Callable[[Choice], float]:
        """The function that returns max|S − S'| on one hard input, in floating point.

        Folding all layers has a large error on this input; most foldings above the tolerance fail on it.
        """
        comparison = Comparison(self.network, fold(self.network, ()), InputSet("box", self.radius))
        lead = None
        if self.joint:
            coordinates = torch.arange(self.network.dim)[: max(1, 2**20 // self.network.dim**3)]
            lead = head_tensor(self.S.expansion, range(len(self.network))).slices(coordinates)
        hard = attack(comparison, AttackOptions(starts=8, steps=10), Hints(lead=lead))
        return measured_errors(self.network, hard.tokens, multiset_attention(hard.counts.to(hard.tokens.dtype)))

    def layer_costs(self) -> list[float]:
        """Return, for each layer, its contribution to the plain bound on the error of folding all layers."""
        if self._costs is None:
            other = BoxBounds(Expansion(fold(self.network, ())), self.radius, joint=False)
            parts = BoxDifference(self.S, other, []).plain().head_parts
            self._costs = [float(part.sum(0).amax()) for part in parts]
        return self._costs

    def error(self, choice: Choice) -> float:
        """Return an upper bound on |S − S'| for one choice."""
        if choice not in self._known:
            if isinstance(choice, str):
                self._known[choice] = self._one_layer(choice)
            else:
                self._known[choice] = (
                    0.0 if len(choice) == len(self.network) else self._bound(fold(self.network, choice))
                )
        return self._known[choice]

    def _one_layer(self, method: str) -> float:
        """Return the upper bound of a closed form as its certificate has it."""
        if method in self._certificates:
            value = self._certificates[method].upper
        else:
            inputs = InputSet("box", self.radius)
            comparison = Comparison(self.network, closed_form(self.network, method), inputs)
            value = prove_upper(comparison, "default", self.S).upper
        return math.inf if value is None else value

    def certificate(self, choice: Choice) -> Certificate:
        """Return the full certificate of one choice."""
        if choice not in self._certificates:
            self._certificates[choice] = certify(
                self.network,
                shallower(self.network, choice),
                radius=self.radius,
                bounds=self.S,
                starts=self.starts,
                steps=self.steps,
            )
        return self._certificates[choice]

    def _bound(self, folded: SelfAttentionNetwork) -> float:
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
    """Find the smallest number of layers of a network S' with ‖S(X) − S'(X)‖max ≤ `tolerance`.

    With one layer, S' is a closed form (`corrected`, `mean-field`, `parallel`, `last-layer`, `identity`). With more, it
    is a folding: it keeps some layers, replaces the others by X + 1·mean(X)·V_ℓ with V_ℓ = Σ_h V_ℓh, and merges every
    run of replaced layers into one, which is exact. Up to 6 layers all foldings are tried, beyond that the most
    promising ones of each depth.

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
        with threads_for(network.dim):
            return certified_depth(FoldBounds(network, radius), tolerance, progress=progress)
    assert x is not None
    return measured_depth(network, measured_errors(network, x), tolerance, progress=progress)


def measured_depth(
    network: SelfAttentionNetwork, errors: Callable[[Choice], float], tolerance: float, *, progress: Step = silent
) -> Depth:
    """Return the measured depth at one tolerance; several tolerances can share `errors` (see `measured_errors`)."""
    L = len(network)
    alone = [errors(tuple(k for k in range(L) if k != replaced)) for replaced in range(L)]
    return _shallowest(network, lambda choice: (errors(choice), False), alone, tolerance, False, progress)


def certified_depth(bounds: FoldBounds, tolerance: float, *, progress: Step = silent) -> Depth:
    """Return the certified depth at one tolerance with its certificate; several tolerances can share `bounds`."""
    depth = proved_depth(bounds, tolerance, progress=progress)
    if depth.method == "none":
        return depth
    certificate = bounds.certificate(depth.kept if depth.method == "fold" else depth.method)
    # Both bounds are proved; the certificate, with more optimisation steps, is usually smaller.
    proved = min(depth.error, certificate.upper if certificate.upper is not None else depth.error)
    return replace(depth, error=proved, certificate=certificate)


def proved_depth(bounds: FoldBounds, tolerance: float, *, progress: Step = silent) -> Depth:
    """Return the certified depth at one tolerance, without the certificate of the shallower network."""

    def error(choice: Choice) -> tuple[float, bool]:
        # The difference e observed in floating point satisfies sup|S − S'| ≥ 0.9e, since its relative error is far
        # below 0.1. If 0.9e > tolerance, no upper bound is within the tolerance, and none is computed.
        least = 0.9 * bounds.seen(choice)
        return (least, True) if least > tolerance else (bounds.error(choice), False)

    return _shallowest(bounds.network, error, bounds.layer_costs(), tolerance, True, progress)


def check_depth_request(
    network: SelfAttentionNetwork, tolerance: float, radius: float | None, certified: bool, x: Tensor | None
) -> None:
    """Check all arguments of `effective_depth` before any long computation."""
    require_network(network)
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
        require_radius(radius)
    elif x is None:
        raise InputError("measured depth needs inputs; give x of shape [n, d] or [..., n, d]")
    else:
        network.check_input(x)


def measured_errors(
    network: SelfAttentionNetwork, x: Float[Tensor, "*batch n d"], attention: AttentionFunction | None = None
) -> Callable[[Choice], float]:
    """Return the function that maps a choice to max|S(x) − S'(x)|; it computes each choice once."""
    known: dict[Choice, float] = {}
    with torch.no_grad():
        truth = network(x, attention)

    def error(choice: Choice) -> float:
        if not isinstance(choice, str) and len(choice) == len(network):
            return 0.0
        if choice not in known:
            with torch.no_grad():
                gap = (truth - shallower(network, choice)(x, attention)).abs().amax()
            known[choice] = float(gap) if bool(gap.isfinite()) else float("inf")
        return known[choice]

    return error


def _shallowest(
    network: SelfAttentionNetwork,
    error: Callable[[Choice], tuple[float, bool]],
    costs: list[float],
    tolerance: float,
    certified: bool,
    progress: Step,
) -> Depth:
    """Try choices in order of their depth and return the first within the tolerance.

    Args:
        network: S.
        error: returns the error of a choice, and whether an input was found on which it exceeds the tolerance.
        costs: the cost of replacing each layer alone, which orders the foldings.
        tolerance: the largest error allowed.
        certified: whether errors are proved.
        progress: called as the work advances.
    """
    L = len(network)
    tried = refuted = 0
    for layers in range(1, L):
        progress(layers - 1, L, counted(layers, "layer"))
        folds: list[Choice] = [*cheapest_choices(costs, layers, 2**L if L <= FEW_LAYERS else CANDIDATES)]
        choices = [*one_layer_methods(network), *folds] if layers == 1 else folds
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
                    network=shallower(network, choice),
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
