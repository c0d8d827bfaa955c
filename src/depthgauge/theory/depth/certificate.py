"""`certify`: a proved upper bound on the distance of two networks, and a lower bound attained at an input."""

import time
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import InputError, require_count, require_radius, require_seed, require_type, unknown_name
from depthgauge.base.format import counted, number
from depthgauge.base.frames import html_facts
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.attack import AttackOptions, attack
from depthgauge.theory.certificates.causal_proof import CausalProof
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.certificates.deletion import Deletion, deletion_applies
from depthgauge.theory.certificates.expansion_layers import ExpansionLayers
from depthgauge.theory.certificates.expansion_proof import ExpansionProof, OneToken, layers_of
from depthgauge.theory.certificates.forward_rounding import EvaluatedIn, require_evaluation
from depthgauge.theory.certificates.method import BITS, Method
from depthgauge.theory.certificates.parallel_blocks import WideBlock
from depthgauge.theory.certificates.token_attack import attack_tokens
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import Outward
from depthgauge.theory.linalg.small_matrices import threads_for
from depthgauge.theory.network.network import SelfAttentionNetwork, require_network
from depthgauge.theory.suprema.exact_supremum import (
    Enumeration,
    ExactLimits,
    Shares,
    exact_method,
    exact_obstacle,
)
from depthgauge.theory.suprema.network_on_shares import difference_below
from depthgauge.theory.surrogates.closed_forms import block_obstacle


def method_of(
    comparison: Comparison, effort: str = "default", S: ExpansionLayers | None = None, progress: Step = silent
) -> Method:
    """Return a proof by the method that applies to the two networks, or by the better one of two.

    `effort` is "default" or "high"; `S` are the layer bounds of the network from an earlier proof over the same inputs.
    """
    if comparison.evaluated_in is not None:
        return EvaluatedIn(method_of(replace(comparison, evaluated_in=None), effort, S, progress), comparison)
    if comparison.is_one_token:
        return OneToken(comparison)
    if comparison.is_wide_block:
        return WideBlock(comparison, progress)
    if comparison.network.causal and comparison.network.skip and not comparison.has_mlp:
        proof: Method = CausalProof(comparison, progress)
        if isinstance(comparison.inputs, Tokens) or not deletion_applies(comparison.network, comparison.surrogate):
            return proof
        return min(proof, Deletion(comparison), key=lambda one: float(one.value.max()))
    if not comparison.expands:
        return Deletion(comparison)
    return expansion_proof(comparison, effort, S or layers_of(comparison, Outward(), progress=progress))


def expansion_proof(comparison: Comparison, effort: str, S: ExpansionLayers) -> ExpansionProof:
    """Return a proof by the expansion.

    The bounds of the intermediate states are plain at first. If much of the joint bound on a box lies beyond its
    leading and linear terms, the proof is repeated with joint bounds of all states, and the smaller result is kept.
    """
    proof = ExpansionProof(comparison, S, effort=effort)
    if not (proof.is_refinable and S.region.squares and S.region.by_coordinate and not S.prefixes):
        return proof
    refined = ExpansionProof(comparison, layers_of(comparison, Outward(), prefixes=True), effort=effort)
    return refined if bool(refined.value.amax() < proof.value.amax()) else proof


EFFORTS = ("default", "high")
"""The efforts of a proof over all inputs; over tokens there is "exact" as well."""


@dataclass(frozen=True, eq=False, repr=False)
class Certificate:
    """Both sides of sup ‖S(X) − S'(X)‖max over a set of inputs: `lower` ≤ sup ≤ `upper`.

    Certificates compare by identity.

    Attributes:
        upper: the proved bound on exact outputs, with the rounding of the proof, or with `evaluated_in` on computed
            ones; None if no finite bound was found.
        methods: how the upper bound was obtained: "plain", "joint", "squares", "pairs", "parallel", "deletion",
            "shares" or "enumeration".
        notes: remarks on the upper bound.
        share: `share[k][h]` is the part of head h of layer k in the upper bound at `coordinate`; the sum is 1.
            All are 0 for effort "exact".
        coordinate: the output coordinate with the largest upper bound.
        lost_at: the layer at which the upper bound became infinite, or None.
        seconds: the time of the upper bound.
        method: the proof of the upper bound, which `verify` computes again.
        comparison: copies of S and S' in the precision in which the bounds were proved, the set, and the tokens.
        lower: the bound attained at `witness`, evaluated in interval arithmetic and rounded down.
        witness: the input [n, d], a member of the set, at which the networks differ by at least `lower`.
        attack_seconds: the time of the lower bound.
        effort: "default", "high" or "exact", the effort of the proof.
        exhaustive: whether every sequence of tokens was tried, so that `lower` is the largest error itself, up to the
            rounding with which the sequences were compared.
    """

    upper: float | None
    coordinate: int | None
    methods: tuple[str, ...]
    notes: tuple[str, ...]
    share: tuple[tuple[float, ...], ...]
    lost_at: int | None
    seconds: float
    method: Method
    comparison: Comparison
    lower: float
    witness: Float[Tensor, "n d"]
    attack_seconds: float
    effort: str
    exhaustive: bool = False

    @property
    def network(self) -> SelfAttentionNetwork:
        """A copy of S, in float64 on the CPU."""
        return self.comparison.network

    @property
    def surrogate(self) -> SelfAttentionNetwork:
        """A copy of S', in float64 on the CPU."""
        return self.comparison.surrogate

    @property
    def inputs(self) -> InputSet | Tokens:
        """The set of inputs: a box, a ball, or all sequences of tokens."""
        return self.comparison.inputs

    @property
    def tokens(self) -> int | None:
        """The number of tokens of an input, for sequences the largest; None: the bounds hold for any number."""
        return self.comparison.tokens

    @property
    def ratio(self) -> float | None:
        """`upper`/`lower`, or None if there is no upper bound or the lower bound is zero."""
        return None if self.upper is None or self.lower <= 0 else self.upper / self.lower

    def verify(self, bits: int = BITS) -> bool:
        """Prove `upper` a second time: the same function in arb interval arithmetic (docs/math.md §3.10).

        A failure does not refute the bound.

        Args:
            bits: the precision of the intervals; a failure is tried once more with twice as many bits.

        Returns:
            True.

        Raises:
            VerificationError: the bound could not be proved.
        """
        return self.method.verify(self.comparison, self.upper, bits)

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as it appears in the result JSON."""
        return {
            "set": self.inputs.kind,
            "radius": self.inputs.radius,
            **{name: getattr(self, name) for name in ("tokens", "effort", "upper", "lower", "ratio")},
            "methods": list(self.methods),
            "notes": list(self.notes),
            "share": [list(heads) for heads in self.share],
            **{name: getattr(self, name) for name in ("lost_at", "seconds", "attack_seconds")},
            **({"exhaustive": self.exhaustive, "about": str(self.inputs)} if self.inputs.kind == "tokens" else {}),
        }

    def __repr__(self) -> str:
        lower, upper = number(self.lower), number(self.upper)
        rows = self.comparison.rows
        where = str(self.inputs) if rows is None else f"{self.inputs}, {counted(rows, 'token')}"
        if self.upper is None:
            return f"Certificate({lower} ≤ sup|S−S'|, no finite upper bound (lost at layer {self.lost_at}), {where})"
        return f"Certificate({lower} ≤ sup|S−S'| ≤ {upper}, {where}, {' + '.join(self.methods)})"

    def _repr_html_(self) -> str:
        facts = {
            "lower bound, attained": number(self.lower),
            "upper bound, proved": number(self.upper),
            "ratio": number(self.ratio),
            "inputs": str(self.inputs),
            "tokens": "see inputs" if self.inputs.kind == "tokens" else str(self.tokens or "any number"),
            "method": " + ".join(self.methods),
        }
        return html_facts("sup |S(X) − S'(X)|", facts)


def certify(
    network: SelfAttentionNetwork,
    surrogate: SelfAttentionNetwork,
    *,
    radius: float | None = None,
    ball: float | None = None,
    inputs: Tokens | None = None,
    tokens: int | None = None,
    effort: str = "default",
    tolerance: float = ExactLimits.tolerance,
    seconds: float = ExactLimits.seconds,
    evaluated_in: torch.dtype | None = None,
    starts: int | None = None,
    steps: int = 40,
    seed: int = 0,
    device: torch.device | str | None = None,
    progress: Step = silent,
) -> Certificate:
    """Bound sup ‖S(X) − S'(X)‖max over a set of inputs from above and from below.

    Give exactly one of `radius`, `ball` and `inputs`. The upper bound is proved for exact outputs, with the
    rounding of the proof, or for computed ones with `evaluated_in`. The lower bound is that of exact outputs at an
    input that a search finds.

    Args:
        network: S.
        surrogate: S', of the same width and with the same `skip` and `causal`; for example `collapse(network)`.
        radius: φ; the set is the box of all X with |X_ic| ≤ φ.
        ball: r; the set is the ball of all X with ‖x_i‖₂ ≤ r for every token x_i.
        inputs: `Tokens`; the set is that of all sequences of these tokens, so the bounds hold for every prompt.
        tokens: the number of tokens n of X; None covers any number. Not with `inputs`, which have their own length.
        effort: "default", or "high" to sharpen the upper bound by sums of squares (seconds to minutes), or "exact" for
            the supremum itself over `inputs`, at any size of the weights: the maximum over all sequences if there are
            at most 10⁶, otherwise over all shares of the tokens (no causal mask, no positions).
        tolerance: of "exact" over shares; the search ends when `upper` is at most (1 + tolerance) times a proved value.
        seconds: of "exact" over shares; after this time, or at Ctrl-C, the best proved enclosure so far is returned.
        evaluated_in: torch.float32 or torch.float64 adds a bound on the rounding of both networks in this type to
            `upper`, which then holds for computed outputs; it needs the number of tokens. None is for exact outputs.
        starts: starting points of the search; None chooses 4 to 32 by network size.
        steps: gradient steps of the search from each starting point.
        seed: seed of the search; the same seed gives the same certificate.
        device: device of the search, for example "cuda"; the upper bound is always computed on the CPU.
        progress: called as `progress(done, total, label)` while the work advances.

    Returns:
        A `Certificate`.

    Raises:
        InputError: the networks do not fit together, an option is invalid, or the architecture is not covered
            (LayerNorm only over `inputs` and before the sublayers; with LayerNorm, MLPs or biases only
            `collapse(network, "parallel")` over `inputs`, and deleted attention over a box).

    Example:
        >>> from depthgauge import collapse, random_network
        >>> network = random_network(layers=3, heads=1, dim=4, eta=0.01)
        >>> certificate = certify(network, collapse(network, "mean-field"), radius=1.0)
        >>> 0 < certificate.lower <= certificate.upper < 1e-4
        True
    """
    chosen = check_request(network, surrogate, radius, ball, inputs, tokens, effort)
    require_type("device", device, (torch.device, str, NoneType), "a device such as cuda, or None")
    limits = ExactLimits(tolerance, seconds)
    comparison = Comparison(_copied(network), _copied(surrogate), chosen, tokens)
    comparison = comparison if evaluated_in is None else require_evaluation(evaluated_in, comparison, effort)
    options = AttackOptions(starts, steps, require_seed(seed), device)
    return certificate_of(comparison, effort, options, limits=limits, progress=progress)


def certificate_of(
    comparison: Comparison,
    effort: str,
    options: AttackOptions,
    S: ExpansionLayers | None = None,
    limits: ExactLimits | None = None,
    progress: Step = silent,
) -> Certificate:
    """Return the certificate of a comparison; `S` are the layer bounds of the network from an earlier proof."""
    network, surrogate, inputs = comparison.network, comparison.surrogate, comparison.inputs
    method: Method
    with threads_for(network.dim):
        progress(0, 2, "proving")
        begun = time.perf_counter()
        if effort == "exact":
            method = exact_method(comparison, limits or ExactLimits(), progress)
        else:
            method = method_of(comparison, effort, S, progress)
        proved = time.perf_counter()
        progress(1, 2, "attacking")
        is_complete = isinstance(method, Enumeration)
        if isinstance(method, Enumeration | Shares):
            witness = method.witness(comparison)
        elif isinstance(inputs, Tokens):
            found = attack_tokens(comparison, options)
            witness, is_complete = found.x, found.exhaustive
        else:
            witness = attack(comparison, options, method.hints()).expand()
        lower = difference_below(network, surrogate, witness)
        progress(2, 2, "")
    upper = method.upper
    return Certificate(
        upper=upper,
        coordinate=None if upper is None else method.coordinate,
        methods=method.names,
        notes=method.notes,
        share=method.shares,
        lost_at=method.lost_at if upper is None else None,
        seconds=proved - begun,
        method=method,
        comparison=comparison,
        lower=lower,
        witness=witness,
        attack_seconds=time.perf_counter() - proved,
        effort=effort,
        exhaustive=is_complete,
    )


def check_request(
    network: SelfAttentionNetwork,
    surrogate: SelfAttentionNetwork,
    radius: float | None,
    ball: float | None,
    inputs: Tokens | None,
    tokens: int | None,
    effort: str,
) -> InputSet | Tokens:
    """Check all arguments of `certify` before any long computation, and return the set of inputs."""
    require_network(network)
    require_network(surrogate, "surrogate")
    given = [name for name, value in {"radius": radius, "ball": ball, "inputs": inputs}.items() if value is not None]
    if len(given) != 1:
        raise InputError(f"give exactly one of radius, ball and inputs, got {' and '.join(given) or 'none of them'}")
    chosen: InputSet | Tokens
    if inputs is not None:
        require_type("inputs", inputs, (Tokens,), "Tokens(embeddings, positions)")
        if tokens is not None:
            raise InputError("tokens cannot be combined with inputs; give the length there: Tokens(…, length=…)")
        if inputs.width != network.dim:
            raise InputError(f"the tokens have width {inputs.width}, and the network {network.dim}; they must be equal")
        chosen = inputs
    elif ball is None:
        assert radius is not None
        chosen = InputSet("box", require_radius(radius))
    else:
        chosen = InputSet("ball", require_radius(ball, "ball", "the largest Euclidean length of a token"))
    if tokens is not None:
        require_count("tokens", tokens, "the number of tokens of an input; leave it out to cover any number")
    if effort not in (*EFFORTS, "exact"):
        raise unknown_name("effort", effort, (*EFFORTS, "exact"))
    if network.dim != surrogate.dim:
        raise InputError(f"the network has width {network.dim}, the surrogate {surrogate.dim}; they must be equal")
    if effort == "exact":
        obstacle = exact_obstacle(Comparison(network, surrogate, chosen))
        if obstacle is not None:
            raise InputError(f"effort exact does not apply: {obstacle}")
    for name in ("skip", "causal"):
        mine, theirs = getattr(network, name), getattr(surrogate, name)
        if mine != theirs:
            raise InputError(f"the network has {name}={mine}, the surrogate {name}={theirs}; they must be equal")
    if chosen.kind != "box" and not network.skip and effort != "exact":
        raise InputError(f"{given[0]} applies to networks with skip connections, and this one has none; use radius")
    for name in ("norm", "activation", "mlp_skip"):
        mine, theirs = getattr(network, name), getattr(surrogate, name)
        if mine != theirs and (name == "norm" or network.has_mlp):
            raise InputError(f"the network has {name}={mine}, the surrogate {name}={theirs}; they must be equal")
    if network.norm != "none" and not isinstance(chosen, Tokens):
        raise InputError(
            f"the network has norms ({network.norm}), and a {chosen.kind} contains the token 0, where the slope of a "
            "norm is 1/√ε = 316; give the tokens: inputs=Tokens(…), --tokens FILE"
        )
    if Comparison(network, surrogate, chosen).is_wide_block and effort != "exact":
        obstacle = block_obstacle(network)
        if obstacle is not None:
            raise InputError(f"this network has no certificate over tokens: {obstacle}")
    _check_length(network, surrogate, chosen.length if isinstance(chosen, Tokens) else tokens)
    return chosen


def _check_length(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, length: int | None) -> None:
    """Check that inputs are not longer than the position biases of the networks allow."""
    allowed = min((net.length for net in (network, surrogate) if net.length is not None), default=None)
    if allowed is not None and (length is None or length > allowed):
        raise InputError(
            f"the position biases are for up to {allowed} tokens, and the inputs have "
            f"{'any number' if length is None else length}; limit them with tokens={allowed}, or Tokens(…, "
            f"length={allowed})"
        )


def _copied(network: SelfAttentionNetwork) -> SelfAttentionNetwork:
    """Return a copy in float64 on the CPU, where all bounds are proved; the caller may change the network later."""
    return network.copy().to(device="cpu", dtype=torch.float64)
