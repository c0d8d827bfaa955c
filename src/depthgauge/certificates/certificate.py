"""`certify`: a proved upper bound on how far two networks can be apart, beside an attacked lower one."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.certificates.attack import InputSet, affordable_starts, attack
from depthgauge.certificates.box import BoxBounds
from depthgauge.certificates.deletion import Deletion, deletion_bound
from depthgauge.certificates.evaluate import difference_below
from depthgauge.certificates.proof import Proof, ball_proof, box_proof
from depthgauge.errors import InputError, require_count, require_positive, unknown_name
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.progress import Step, silent

EFFORTS = ("default", "high")


@dataclass(frozen=True)
class Certificate:
    """A sandwich: `lower` ≤ sup |S(X) − S'(X)|max ≤ `upper` over every input of the set.

    - `upper` is proved, rounding included, for any number of tokens (or for `tokens`); None means that no finite
      certificate was found, and `lost_at` is the layer where the bounds overflowed.
    - `lower` is proved at `witness` [n, d], evaluated in ball arithmetic and rounded down.
    - `share[k][h]` is head h of layer k's part of the bound at its worst coordinate, all parts adding up to 1.
    - `methods` says how the parts were reached, `notes` what was left out; `seconds` is the time of the upper
      bound, `attack_seconds` that of the lower.
    - `network` and `surrogate` are S and S' in the numbers they were proved in; what the proof rests on is kept in
      `proof`, or in `deletion` where attention was deleted layer by layer.
    """

    upper: float | None
    lower: float
    witness: Float[Tensor, "n d"]
    set: InputSet
    tokens: int | None
    effort: str
    methods: tuple[str, ...]
    notes: tuple[str, ...]
    share: tuple[tuple[float, ...], ...]
    lost_at: int | None
    coordinate: int | None
    seconds: float
    attack_seconds: float
    network: SelfAttentionNetwork = field(repr=False)
    surrogate: SelfAttentionNetwork = field(repr=False)
    proof: Proof | None = field(repr=False, default=None)
    deletion: Deletion | None = field(repr=False, default=None)

    @property
    def ratio(self) -> float | None:
        """upper/lower: how much the truth can be overestimated; None where one of them is missing or zero."""
        return None if self.upper is None or self.lower <= 0 else self.upper / self.lower

    def verify(self, bits: int = 128) -> bool:
        """Prove `upper` again in ball arithmetic, from the scalings kept here; raise where it cannot be done."""
        from depthgauge.certificates.verify.check import verify

        return verify(self, bits)

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        return {
            "set": self.set.kind,
            "radius": self.set.radius,
            "tokens": self.tokens,
            "effort": self.effort,
            "upper": self.upper,
            "lower": self.lower,
            "ratio": self.ratio,
            "methods": list(self.methods),
            "notes": list(self.notes),
            "share": [list(heads) for heads in self.share],
            "lost_at": self.lost_at,
            "seconds": self.seconds,
            "attack_seconds": self.attack_seconds,
        }


def certify(
    network: SelfAttentionNetwork,
    surrogate: SelfAttentionNetwork,
    *,
    radius: float | None = None,
    ball: float | None = None,
    tokens: int | None = None,
    effort: str = "default",
    starts: int | None = None,
    steps: int = 40,
    seed: int = 0,
    device: torch.device | str | None = None,
    bounds: BoxBounds | None = None,
    progress: Step = silent,
) -> Certificate:
    """Bound sup ‖S(X) − S'(X)‖max from both sides, over ‖X‖max ≤ `radius` or over tokens of length ≤ `ball`.

    `tokens` fixes the number of tokens, which is free otherwise; `effort="high"` sharpens the leading term by sums of
    squares (seconds to minutes); `starts`, `steps`, `seed` and `device` belong to the attack
    (32 starts unless the network is so large that fewer must do).
    `bounds` are the network's own on this box, where an earlier proof has found them.

    >>> from depthgauge import collapse, random_network
    >>> network = random_network(layers=3, heads=1, dim=4, eta=0.01)
    >>> certificate = certify(network, collapse(network, "mean-field"), radius=1.0)
    >>> 0 < certificate.lower <= certificate.upper < 1e-4
    True
    """
    inputs = check_request(network, surrogate, radius, ball, tokens, effort)
    network, surrogate = _plain(network), _plain(surrogate)
    begun = time.perf_counter()
    progress(0, 2, "proving")
    found = _upper(network, surrogate, inputs, tokens, effort, bounds)
    proved = time.perf_counter()
    progress(1, 2, "attacking")
    candidate = attack(
        network,
        surrogate,
        inputs,
        tokens=tokens,
        starts=affordable_starts(network, steps) if starts is None else starts,
        steps=steps,
        seed=seed,
        device=device,
        lead=found.lead_tensors,
        drift=found.linear_matrix,
    )
    witness = candidate.expand()
    lower = difference_below(network, surrogate, witness)
    progress(2, 2, "")
    finite = math.isfinite(found.upper)
    return Certificate(
        upper=found.upper if finite else None,
        lower=lower,
        witness=witness,
        set=inputs,
        tokens=tokens,
        effort=effort,
        methods=found.methods,
        notes=found.notes,
        share=found.share,
        lost_at=None if finite else found.lost_at if found.lost_at is not None else len(network) - 1,
        coordinate=found.coordinate if finite else None,
        seconds=proved - begun,
        attack_seconds=time.perf_counter() - proved,
        network=network,
        surrogate=surrogate,
        proof=found.proof,
        deletion=found.deletion,
    )


def check_request(
    network: SelfAttentionNetwork,
    surrogate: SelfAttentionNetwork,
    radius: float | None,
    ball: float | None,
    tokens: int | None,
    effort: str,
) -> InputSet:
    """Everything that can be wrong with a request, before any long work."""
    if (radius is None) == (ball is None):
        raise InputError(f"give either radius or ball, got radius={radius!r} and ball={ball!r}")
    if radius is not None:
        inputs = InputSet("box", require_positive("radius", radius, "the largest |entry| an input may have"))
    else:
        assert ball is not None
        inputs = InputSet("ball", require_positive("ball", ball, "the largest Euclidean length of a token"))
    if tokens is not None:
        require_count("tokens", tokens, "the number of tokens of an input; leave it out for any number")
    if effort not in EFFORTS:
        raise unknown_name("effort", effort, EFFORTS)
    if network.dim != surrogate.dim:
        raise InputError(f"the surrogate has width {surrogate.dim}, the network {network.dim}; they must be equal")
    for name in ("skip", "causal"):
        if getattr(network, name) != getattr(surrogate, name):
            mine, theirs = getattr(network, name), getattr(surrogate, name)
            raise InputError(f"the network has {name}={mine}, the surrogate {name}={theirs}; certify needs them equal")
    if inputs.kind == "ball" and not network.skip:
        raise InputError("a ball needs skip connections, which this network lacks; give radius instead of ball")
    for which, net in (("network", network), ("surrogate", surrogate)):
        if net.norm != "none":
            raise InputError(f"the {which} has LayerNorm ({net.norm}); certificates cover networks without it")
    return inputs


@dataclass(frozen=True)
class Found:
    """What a method of proof hands to `certify`."""

    upper: float
    methods: tuple[str, ...]
    notes: tuple[str, ...] = ()
    share: tuple[tuple[float, ...], ...] = ()
    lost_at: int | None = None
    coordinate: int | None = None
    lead_tensors: Tensor | None = None
    linear_matrix: Tensor | None = None
    proof: Proof | None = None
    deletion: Deletion | None = None


def _upper(
    network: SelfAttentionNetwork,
    surrogate: SelfAttentionNetwork,
    inputs: InputSet,
    tokens: int | None,
    effort: str,
    bounds: BoxBounds | None,
) -> Found:
    expands = not network.causal and not any(layer.mlp is not None for net in (network, surrogate) for layer in net)
    if not expands:
        notes = ("tokens of bounded length were taken as a box of the same radius",) if inputs.kind == "ball" else ()
        deletion = deletion_bound(network, surrogate, inputs.radius)
        coordinate = int(deletion.value.nan_to_num(nan=math.inf).argmax())
        parts = [part[:, coordinate] for part in deletion.head_parts]
        upper = float(deletion.value[coordinate])
        share, lost = normalised(parts), lost_in(deletion.head_parts)
        return Found(upper, ("deletion",), notes, share, lost, coordinate, deletion=deletion)
    if inputs.kind == "box":
        proof = box_proof(network, surrogate, inputs.radius, tokens, effort, bounds)
    else:
        proof = ball_proof(network, surrogate, inputs.radius, tokens, effort)
    return Found(
        proof.upper,
        proof.methods,
        proof.notes,
        normalised([part[:, proof.coordinate] for part in proof.head_parts]),
        proof.lost_at,
        proof.coordinate,
        proof.lead_tensors(),
        proof.linear_matrix(),
        proof,
    )


def normalised(parts: list[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Parts of the bound as shares that add up to 1 (zeros where there is nothing to share or nothing finite)."""
    whole = float(sum(part.sum() for part in parts))
    usable = math.isfinite(whole) and whole > 0
    return tuple(tuple(float(value) / whole if usable else 0.0 for value in part) for part in parts)


def lost_in(head_parts: tuple[Tensor, ...]) -> int | None:
    """The first layer whose parts are not finite."""
    return next((k for k, part in enumerate(head_parts) if not bool(part.isfinite().all())), None)


def _plain(network: SelfAttentionNetwork) -> SelfAttentionNetwork:
    """The network on the CPU in float64, in which everything is proved."""
    if network.dtype == torch.float64 and network.device.type == "cpu":
        return network
    return network.copy().to(device="cpu", dtype=torch.float64)
