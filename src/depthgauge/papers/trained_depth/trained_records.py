"""What is recorded about a trained model: accuracy, proved and measured depth, and how it uses its weight bound."""

from dataclasses import dataclass

import torch

from depthgauge.papers.trained_depth.bounded_models import BoundedModel
from depthgauge.papers.trained_depth.bounded_training import TrainedModel, held_out
from depthgauge.papers.trained_depth.output_bound import (
    DECISIVE,
    OutputBound,
    attack_margin,
    box_output_bound,
    largest_input,
    least_bound,
    one_layer_network,
    output_bound,
    permitted_change,
    readout_changes,
)
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.depth.effective import (
    Choice,
    FoldBounds,
    TokenFolds,
    measured_depth,
    proved_depth,
    shallower,
)
from depthgauge.theory.surrogates.closed_forms import refusal

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
    _, per_unit = readout_changes(torch.ones(model.network.dim, dtype=torch.float64), model.readout)
    tolerance = DECISIVE * (1 - 1e-12) / max(per_unit, 1e-300)
    folds: TokenFolds | FoldBounds
    if model.network.skip:
        folds = TokenFolds(model.network, Tokens(model.token, model.position))
    else:
        folds = FoldBounds(model.network, largest_input(model), joint=False)
    return proved_depth(folds, tolerance).layers


def accuracy_depth(model: BoundedModel, tokens: torch.Tensor, labels: torch.Tensor) -> int:
    """Return the least number of layers of a shallower network that keeps the accuracy within 0.01."""
    before = _accuracy(model.logits(tokens), labels)

    def lost(choice: Choice) -> float:
        if not isinstance(choice, str) and len(choice) == len(model.network):
            return 0.0
        return max(0.0, before - _accuracy(model.logits(tokens, shallower(model.network, choice)), labels))

    return measured_depth(model.network, lost, WITHIN).layers
