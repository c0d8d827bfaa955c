"""A proved bound on the change of a model's output when its layers are replaced by one (docs/math.md §8).

The logits are z = (S(X) R)_last, and δ bounds every change |(z_c − z_e) − (z'_c − z'_e)|, over two sets of inputs:

- all sequences of the model's own tokens, one at each position. The differences of logits are bounded directly, as
  (S(X) − S'(X))(R_c − R_e) in the last row.
- the box of all inputs with entries up to φ, of any length. |S(X) − S'(X)| ≤ u per coordinate gives
  |z_c − z'_c| ≤ Σ_a u_a |R_ac| and δ = max_{c,e} Σ_a u_a |R_ac − R_ae|.

Every class probability changes by at most tanh(δ/4), and a prediction can change only where its margin is at most δ.

A `TrainedRecord` has the accuracy of a trained model, its proved and measured depth, and how it uses its weight bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge.base.errors import require_type
from depthgauge.base.progress import Step, silent
from depthgauge.papers.trained_depth.bounded_models import BoundedModel
from depthgauge.papers.trained_depth.bounded_training import TrainedModel, held_out
from depthgauge.papers.trained_depth.every_sequence import EverySequence
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.certificates.expansion_layers import ExpansionLayers
from depthgauge.theory.certificates.expansion_proof import ExpansionProof, layers_of
from depthgauge.theory.certificates.method import BITS, Method, check_bounds
from depthgauge.theory.certificates.parallel_blocks import WideBlock
from depthgauge.theory.certificates.token_attack import FEW
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.depth.certificate import method_of
from depthgauge.theory.depth.effective import Choice, DepthBounds, measured_depth, proved_depth, shallower
from depthgauge.theory.linalg.arb_arithmetic import ArbArithmetic, ArbArray
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Enclosed, Outward, precision
from depthgauge.theory.linalg.enclosures import OutwardUpper
from depthgauge.theory.linalg.rounding import no_bound, tanh_up, up
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.surrogates.closed_forms import closed_form, needs_tokens, refusal

ONE_LAYER = ("corrected", "mean-field", "parallel")
"""The one-layer networks that are tried, the sharpest first."""
ITSELF = "itself"
"""The one-layer form of a network with one layer."""
DECISIVE = 4 * math.atanh(0.01)
"""The δ at which a class probability can change by 0.01."""
HOPELESS = 30.0
"""The joint bound is rarely smaller than the plain one by more than this factor."""


@dataclass(frozen=True)
class OutputBound:
    """What is proved about a model in which one layer replaces all layers.

    Attributes:
        method: the name of the one-layer network S'.
        logit: the bound on the change of every logit.
        margin: δ, the bound on the change of every difference of two logits.
        probability: tanh(δ/4), the bound on the change of every class probability.
        proof: what `verify` computes again; None where one layer replaces itself.
    """

    method: str
    logit: float
    margin: float
    probability: float
    proof: "OutputProof | None" = field(default=None, compare=False, repr=False)

    def verify(self, bits: int = BITS) -> bool:
        """Prove `logit` and `margin` a second time, in arb interval arithmetic; raise VerificationError otherwise."""
        if self.proof is not None:
            with precision(bits):
                found = self.proof.changes(self.proof.method.again(self.proof.comparison))
                for value, claimed in zip(found, (self.logit, self.margin), strict=True):
                    check_bounds(value, claimed)
        return True


@dataclass(frozen=True, eq=False)
class OutputProof:
    """A proof about |S − S'|, or about |(S − S') R| for `readout_of` if it `is_read`, and the readout."""

    comparison: Comparison
    method: Method
    readout: Float[Tensor, "d classes"]
    is_read: bool = False

    def changes(self, value: Any) -> tuple[Any, Any]:
        """Bound the changes of logits and of differences of two logits, from the bound of the method."""
        classes = self.readout.shape[1]
        if self.is_read:
            return value[:classes], value[classes:]
        A: BoundArithmetic = ArbArithmetic([]) if isinstance(value, ArbArray) else Outward()
        both = (value[None] @ readout_of(A, self.readout).size())[0]
        return both[:classes], both[classes:]


def readout_of(A: BoundArithmetic, R: Float[Tensor, "d classes"]) -> Enclosed:
    """Return the columns R_c and the differences R_c − R_e for c < e."""
    first, second = torch.triu_indices(R.shape[1], R.shape[1], 1)
    both: Enclosed = A.cat([A.exact(R), A.exact(R[:, first]) - R[:, second]], 1)
    return both


def largest_input(model: BoundedModel) -> float:
    """Return φ = max |token + position| over all tokens and positions, rounded up."""
    exact = model.exact()
    return float(up((exact.token[:, None] + exact.position).abs().amax()))


def per_state_error(readout: Float[Tensor, "d classes"]) -> float:
    """Return max_{c,e} Σ_a |R_ac − R_ae|, rounded up."""
    return float(readout_of(Outward(), readout).size().sum(0)[readout.shape[1] :].floats().amax())


def one_layer_network(network: SelfAttentionNetwork) -> tuple[str, SelfAttentionNetwork] | None:
    """Return the sharpest one-layer closed form that applies, or None.

    A network with one layer is its own one-layer form.
    """
    if len(network) == 1:
        return ITSELF, network
    methods = _methods(network)
    return (methods[0], closed_form(network, methods[0])) if methods else None


def _methods(network: SelfAttentionNetwork) -> list[str]:
    """Return the closed forms that apply, the sharpest first."""
    return [method for method in ONE_LAYER if refusal(network, method) is None]


def output_bound(model: BoundedModel) -> OutputBound | None:
    """Prove how much the output can change, on any sequence of the model's tokens, when one layer replaces all layers.

    Every closed form that applies is tried, and the least δ is returned. With LayerNorm or an MLP it is that of a wide
    block, where the states are bounded per coordinate. Without skip connections the bound is that of
    `box_output_bound`, whose box contains the sequences.

    Args:
        model: The model; without skip connections, not causal and without MLP and LayerNorm.

    Returns:
        The bound, or None if no finite bound was found or no closed form applies.
    """
    exact = _checked(model)
    network, R = exact.network, exact.readout
    if len(network) == 1:  # one layer replaces itself
        return OutputBound(ITSELF, 0.0, 0.0, 0.0)
    if not network.skip:
        return box_output_bound(model)
    inputs = Tokens(exact.token, exact.position)
    if not _methods(network):
        return None
    if needs_tokens(network):
        comparison = Comparison(network, closed_form(network, "parallel"), inputs)
        read = WideBlock(comparison, readout=lambda A: readout_of(A, R))
        return least_bound([_bound("parallel", OutputProof(comparison, read, R, is_read=True))])
    if network.causal:
        return _state_bound(Comparison(network, closed_form(network, "parallel"), inputs), R)
    S = layers_of(Comparison(network, network, inputs), Outward())

    columns, found = readout_of(Outward(), R).shape[1], list[OutputBound]()
    for method in _methods(network):
        comparison = Comparison(network, closed_form(network, method), inputs)
        enough = torch.full((columns,), math.inf, dtype=torch.float64)
        enough[R.shape[1] :] = min((bound.margin for bound in found), default=math.inf)
        proof = ExpansionProof(comparison, S, readout=lambda A: readout_of(A, R), enough=enough)
        found.append(_bound(method, OutputProof(comparison, proof, R, is_read=True)))
    return least_bound(found)


def _state_bound(comparison: Comparison, readout: Float[Tensor, "d classes"]) -> OutputBound | None:
    """Return the bound with the wide block, from that on the states; None if it is not finite."""
    return least_bound([_bound("parallel", OutputProof(comparison, method_of(comparison), readout))])


def box_output_bound(model: BoundedModel) -> OutputBound | None:
    """Prove the same for all inputs with entries up to the largest one of the model's inputs, of any length.

    Every closed form that applies is tried with its heads bounded one by one. The joint bound is many times sharper and
    many times slower. It is computed for the sharpest closed form, where it can decide whether δ ≤ `DECISIVE`: not
    where δ is below that already, and not where δ is above `HOPELESS` times that. The least δ is returned.

    Args:
        model: The model; not causal, without MLP and LayerNorm.

    Returns:
        The bound, or None if no finite bound was found or no closed form applies.
    """
    exact = _checked(model)
    network, radius = exact.network, largest_input(model)
    if len(network) == 1:
        return OutputBound(ITSELF, 0.0, 0.0, 0.0)
    methods = _methods(network)
    if not methods or needs_tokens(network) or network.causal:
        return None

    box = InputSet("box", radius)

    def prove(method: str, S: ExpansionLayers | None) -> OutputBound:
        comparison = Comparison(network, closed_form(network, method), box)
        return _bound(method, OutputProof(comparison, method_of(comparison, S=S), exact.readout))

    plain = layers_of(Comparison(network, network, box), Outward(), joint=False)
    best = min((prove(method, plain) for method in methods), key=lambda bound: bound.margin)
    if network.skip and DECISIVE < best.margin <= HOPELESS * DECISIVE:
        best = min(best, prove(methods[0], None), key=lambda bound: bound.margin)
    return least_bound([best])


def every_sequence_bound(model: BoundedModel, *, most: int = FEW, progress: Step = silent) -> OutputBound | None:
    """Prove the same as `output_bound` by evaluating every sequence, with the sharpest one-layer network.

    The bound is the largest change itself, up to rounding. It takes some 0.1 ms for each sequence, and `verify` takes
    as long again.

    Args:
        model: The model; without MLP and LayerNorm, not causal.
        most: The most sequences that are evaluated.
        progress: Called as `progress(done, total, label)`.

    Returns:
        The bound, or None if no closed form applies, or if there are more sequences.
    """
    exact = _checked(model)
    if len(exact.network) == 1:
        return OutputBound(ITSELF, 0.0, 0.0, 0.0)
    methods, network = _methods(exact.network), exact.network
    if not methods or needs_tokens(network) or network.causal or len(exact.token) ** len(exact.position) > most:
        return None
    inputs = Tokens(exact.token, exact.position)
    comparison = Comparison(network, closed_form(network, methods[0]), inputs, evaluated_in=torch.float64)
    proof = EverySequence(comparison, exact.readout, progress)
    return least_bound([_bound(methods[0], OutputProof(comparison, proof, exact.readout, is_read=True))])


def attack_margin(model: BoundedModel, method: str, *, starts: int = 32, sweeps: int = 3, seed: int = 0) -> float:
    """Return the largest change of a difference of two logits that was found over sequences of the model's tokens.

    `method` is the one-layer network. The search starts from random sequences and replaces one token at a time by the
    best of all tokens.
    """
    exact = _checked(model)
    other = exact.network if method == ITSELF else closed_form(exact.network, method)
    v, n = len(exact.token), len(exact.position)

    def spread(sequences: Int64[Tensor, "many n"]) -> Float[Tensor, " many"]:
        change = exact.logits(sequences) - exact.logits(sequences, other)
        return change.amax(dim=1) - change.amin(dim=1)

    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(0, v, (starts, n), generator=generator)
    best = spread(chosen)
    for _ in range(sweeps):
        for place in torch.randperm(n, generator=generator).tolist():
            tried = chosen[:, None].repeat(1, v, 1)
            tried[:, :, place] = torch.arange(v)
            best, which = spread(tried.flatten(0, 1)).reshape(starts, v).max(dim=1)
            chosen[:, place] = which
    return float(best.max())


def _checked(model: BoundedModel) -> BoundedModel:
    require_type("model", model, BoundedModel, "a BoundedModel", "a TrainedModel has it as its attribute model")
    return model.exact()


def _bound(method: str, proof: OutputProof) -> OutputBound:
    changes = proof.changes(OutwardUpper(proof.method.value))
    logit, margin = (float(no_bound(change.floats()).max()) if len(change.floats()) else 0.0 for change in changes)
    return OutputBound(method, logit, margin, float(tanh_up(margin / 4.0)) if math.isfinite(margin) else 1.0, proof)


def least_bound(bounds: Sequence[OutputBound | None]) -> OutputBound | None:
    """Return the bound with the least δ, or None if none is finite."""
    finite = [bound for bound in bounds if bound is not None and math.isfinite(bound.margin)]
    return min(finite, key=lambda bound: bound.margin) if finite else None


def margins(logits: Float[Tensor, "samples classes"], labels: Int64[Tensor, " samples"]) -> Float[Tensor, " samples"]:
    """Return z_label − max of the other logits: positive where the prediction is right."""
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -math.inf).amax(dim=1, keepdim=True)
    return (own - others)[:, 0]


def permitted_change(
    logits: Float[Tensor, "samples classes"], labels: Int64[Tensor, " samples"], bound: OutputBound | None
) -> float:
    """Return the share of sequences on which S' may be right where S is wrong, or wrong where S is right.

    These are the sequences with |z_label − max other| ≤ δ; without a bound, all.
    """
    if bound is None:
        return 1.0
    return float((margins(logits, labels).abs() <= bound.margin).double().mean())


WITHIN = 0.01
"""Depths are least numbers of layers that keep every class probability (proved), or the accuracy (measured), within
this."""
AT_BOUND = 1e-4
"""A weight is at the bound if it is within this share of η."""


@dataclass(frozen=True)
class TrainedRecord:
    """What is recorded about one trained model.

    Attributes:
        accuracy: the share of correct labels on test sequences.
        loss: the mean cross-entropy there.
        certified: the proved bound on the change of every logit, on any sequence of the model's tokens, when one layer
            replaces all layers; None without one.
        margin: the proved bound δ on the change of every difference of two logits, likewise.
        probability: the proved bound on the change of every class probability, likewise.
        method: the one-layer network of these bounds.
        attacked: the largest change of a difference of two logits that a search over sequences found with that network.
        box: the proved bound on the change of every class probability on all inputs with entries as large as the
            model's, of any length; None without one.
        one_layer: the accuracy with the one-layer network, without training it; None if no closed form applies.
        permitted: the share of test sequences on which the proof permits the two to differ; 1 without a bound.
        certified_depth: the least number of layers proved to keep every class probability within 0.01.
        measured_depth: the least number of layers that keeps the accuracy within 0.01 on the test sequences.
        largest: the largest |weight| of the network.
        at_bound: the share of its weights with |w| = η, or None without a bound.
    """

    accuracy: float
    loss: float
    certified: float | None
    margin: float | None
    probability: float | None
    method: str | None
    attacked: float | None
    box: float | None
    one_layer: float | None
    permitted: float
    certified_depth: int | None
    measured_depth: int | None
    largest: float
    at_bound: float | None


def examine(trained: TrainedModel, test: int, *, depths: bool = True) -> TrainedRecord:
    """Measure a trained model on `test` sequences, and prove what can be proved about it.

    `depths` is whether to compute the certified and the measured depth, which take longest.
    """
    model = trained.model.exact()
    tokens, labels = held_out(trained.task, test)
    over_box = box_output_bound(model)  # the box contains all sequences, so its bound holds for them too
    bound = least_bound([output_bound(model), over_box])
    outputs = model.logits(tokens)
    single = one_layer_network(model.network)
    foldable = depths and refusal(model.network, "mean-field") is None
    bounded = [weight for layer in model.network for weight in (layer.query, layer.key, layer.value)]
    bounded += [weight for layer in model.network if layer.mlp is not None for weight in layer.mlp.parameters()]
    weights = torch.cat([weight.detach().abs().flatten() for weight in bounded])
    return TrainedRecord(
        accuracy=_accuracy(outputs, labels),
        loss=float(torch.nn.functional.cross_entropy(outputs, labels)),
        certified=None if bound is None else bound.logit,
        margin=None if bound is None else bound.margin,
        probability=None if bound is None else bound.probability,
        method=None if bound is None else bound.method,
        attacked=None if bound is None else attack_margin(model, bound.method),
        box=None if over_box is None else over_box.probability,
        one_layer=None if single is None else _accuracy(model.logits(tokens, single[1]), labels),
        permitted=permitted_change(outputs, labels, bound),
        certified_depth=output_depth(model, bound) if foldable else None,
        measured_depth=accuracy_depth(model, tokens, labels) if foldable else None,
        largest=float(weights.max()),
        at_bound=None if trained.eta is None else _mean(weights >= trained.eta * (1 - AT_BOUND)),
    )


def _mean(met: torch.Tensor) -> float:
    return float(met.double().mean())


def _accuracy(outputs: torch.Tensor, labels: torch.Tensor) -> float:
    return _mean(outputs.argmax(dim=-1) == labels)


def output_depth(model: BoundedModel, bound: OutputBound | None) -> int:
    """Return the least number of layers that provably keeps every class probability within 0.01, for every input.

    One layer is enough if `bound` says so. A state error ε moves differences of logits by at most
    ε·max_{c,e} Σ_a |R_ac − R_ae|, and a probability by at most tanh of a quarter of that (docs/math.md §8).
    """
    if bound is not None and bound.probability <= WITHIN:
        return 1
    per_unit = per_state_error(model.exact().readout)
    tolerance = DECISIVE * (1 - 1e-12) / max(per_unit, 1e-300)
    inputs = Tokens(model.token, model.position) if model.network.skip else InputSet("box", largest_input(model))
    return proved_depth(DepthBounds(model.network, inputs, joint=model.network.skip), tolerance).layers


def accuracy_depth(model: BoundedModel, tokens: torch.Tensor, labels: torch.Tensor) -> int:
    """Return the least number of layers of a shallower network that keeps the accuracy within 0.01."""
    before = _accuracy(model.logits(tokens), labels)

    def lost(choice: Choice) -> float:
        if not isinstance(choice, str) and len(choice) == len(model.network):
            return 0.0
        return max(0.0, before - _accuracy(model.logits(tokens, shallower(model.network, choice)), labels))

    return measured_depth(model.network, lost, WITHIN).layers
