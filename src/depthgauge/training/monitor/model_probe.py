"""Measure a transformers model on a probe batch, in one forward pass."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge._format import number
from depthgauge.checkpoints.circuits import block_sizes
from depthgauge.checkpoints.head_statistics import RowMeasures, row_measures
from depthgauge.checkpoints.interface import AttentionCall, Session, attending, register
from depthgauge.checkpoints.layers import Pass, Stack
from depthgauge.checkpoints.library import transformers
from depthgauge.checkpoints.load import Checkpoint, wrap
from depthgauge.checkpoints.probe import relative_difference
from depthgauge.checkpoints.removal import Removal, least_missed, measured_depth, next_removal
from depthgauge.checkpoints.scores import SublayerScores, block_influence
from depthgauge.checkpoints.what_if import what_if
from depthgauge.errors import InputError
from depthgauge.results.monitor_record import MonitoredModel
from depthgauge.training.monitor.measurement import HEADS, Measurement, ranks, state_ratios, update_share
from depthgauge.training.monitor.probe_batch import ProbeBatch, causal_labels
from depthgauge.training.monitor.undisturbed import undisturbed

AGREE = 0.1
"""Largest relative difference between the states of the observed model and its own: rounding in half precision."""


class ProbeStack(Stack):
    """The blocks of a model on one batch; the output of a pass is the loss, or the final states of an encoder."""

    def __init__(self, checkpoint: Checkpoint, session: Session, batch: ProbeBatch) -> None:
        super().__init__(checkpoint, session)
        self.batch = batch

    def _forward(self, ids: Int[Tensor, "batch n"]) -> Tensor:
        model = self.checkpoint.model
        takes = inspect.signature(model.forward).parameters
        keywords: dict[str, Any] = {**self.batch.inputs, "return_dict": True}
        if "use_cache" in takes:
            keywords["use_cache"] = False
        out = model(**keywords)
        made = out.loss if self.checkpoint.objective == "loss" else out.last_hidden_state
        if made is None:
            raise InputError(
                f"{type(model).__name__} returned no loss for the labels of the probe; give a probe without labels"
            )
        found: Tensor = made
        return found


@dataclass
class ModelProbe:
    """A transformers model and the batch that it is measured on.

    - `model`: the model, without wrappers for compilation or data parallelism
    - `batch`: the probe batch, with labels if the model has a loss
    - `objective`: `loss` or `states`
    - `notes`: what cannot be measured, and why
    """

    model: Any
    batch: ProbeBatch
    objective: str = "states"
    notes: list[str] = field(default_factory=list)
    observed: bool = True
    checked: bool = False

    def __post_init__(self) -> None:
        register()
        takes = inspect.signature(self.model.forward).parameters
        if "labels" in takes and "labels" not in self.batch.inputs and _is_causal(self.model):
            self.batch = self.batch.with_inputs(labels=causal_labels(self.batch))
        if "labels" in takes and "labels" in self.batch.inputs:
            self.objective = "loss"
        else:
            kept = {name: value for name, value in self.batch.inputs.items() if name != "labels"}
            self.batch = ProbeBatch(kept, self.batch.real)
        with undisturbed(self.model):
            checkpoint = self._checkpoint()
            if not len(Stack(checkpoint, Session())):
                raise InputError(
                    f"{type(self.model).__name__} cannot be monitored: it does not keep its blocks in one list of "
                    f"{checkpoint.layers} modules"
                )
        if checkpoint.family is None:
            kind = checkpoint.config.model_type
            self.notes.append(
                f"sublayers and sizes of the weights are not measured: the family {kind!r} is not in "
                "checkpoints/families.py"
            )

    def _checkpoint(self) -> Checkpoint:
        """Return the model as the gauge sees it; a model without a loss is measured without its head."""
        model = self.model if self.objective == "loss" else self.model.base_model
        return wrap(model, type(self.model).__name__, objective=self.objective)

    @property
    def device(self) -> torch.device:
        """The device that expects the token ids."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def describe(self) -> MonitoredModel:
        """Return the description of the model in the log."""
        config, weight = self.model.config.get_text_config(), next(self.model.parameters())
        sequences, tokens = self.batch.ids.shape
        return MonitoredModel(
            name=str(config.model_type),
            architecture=next(c.__name__ for c in type(self.model).__mro__ if not c.__name__.startswith("FSDP")),
            objective=self.objective,
            layers=int(config.num_hidden_layers),
            heads=(int(config.num_attention_heads),) * int(config.num_hidden_layers),
            parameters=sum(p.numel() for p in self.model.parameters()),
            dtype=str(weight.dtype).removeprefix("torch."),
            device=str(self.device),
            sequences=sequences,
            tokens=tokens,
            ranks=ranks(),
        )

    def measure(self, weights: bool, skip: bool, depth: float | None) -> Measurement:
        """Measure the model on the batch, without an effect on its training.

        Args:
            weights: whether to measure the sizes of the weights.
            skip: whether to measure the cost of skipping each block.
            depth: the largest increase of the loss for the measured effective depth; None does not measure it.
        """
        with undisturbed(self.model):
            self.batch = self.batch.to(self.device)
            if not self.checked:
                self._check()
            with attending(self.model) as session:
                stack = ProbeStack(self._checkpoint(), session, self.batch)
                found = self._measure(stack, weights)
                return self._what_ifs(stack, found, depth) if skip else found[0]

    def _check(self) -> None:
        """Compare the model's own attention with the observed one; they must agree up to rounding."""
        self.checked = True
        own = ProbeStack(self._checkpoint(), Session(), self.batch).full(self.batch.ids).states[-1]
        with attending(self.model) as session:
            stack = ProbeStack(self._checkpoint(), session, self.batch)
            ours = stack.full(self.batch.ids).states[-1]
            calls = session.calls
        real = self.batch.real
        off, finite = relative_difference(ours[real], own[real]), bool(own[real].isfinite().all())
        self.observed = calls == len(stack) and (off <= AGREE or not finite)
        if not self.observed:
            self.notes.append(
                f"heads are not measured: {type(self.model).__name__} made {calls} observed attention calls in "
                f"{len(stack)} layers, and its final states differ by {number(off, 2)} from those of its own attention"
            )

    def _measure(self, stack: ProbeStack, weights: bool) -> tuple[Measurement, Pass]:
        """Return the measures of one forward pass, and the pass."""
        real, family, heads = self.batch.real, stack.checkpoint.family, list[RowMeasures]()
        padded = None if bool(real.all()) else real

        def watch(call: AttentionCall) -> Tensor:
            output, found = row_measures(call, real)
            heads.append(found)
            return output

        def share(before: Tensor, added: Tensor) -> Tensor:
            return update_share(_tokens(before, padded), _tokens(added, padded))

        observe = watch if self.observed else None
        if family is None:
            base, sublayers = stack.full(self.batch.ids, watch=observe), None
        else:
            sublayers = SublayerScores(stack.blocks, family, share)
            with sublayers.listening():
                base = stack.full(self.batch.ids, watch=observe)
        layers = self._layers(base, padded)
        if sublayers is not None:
            layers |= {"attention_update": _stacked(sublayers.attention), "mlp_update": _stacked(sublayers.mlp)}
        if heads:
            layers["uniform_entropy"] = _stacked([found.uniform_entropy for found in heads])
        if weights and family is not None:
            sizes = [block_sizes(stack.checkpoint, block) for block in stack.blocks]
            layers |= {name: _stacked([getattr(s, name) for s in sizes]) for name in ("eta", "qk_norm", "ov_norm")}
        loss = base.output if self.objective == "loss" else torch.tensor(float("nan"))
        by_head = {name: _stacked([getattr(found, name) for found in heads]) for name in HEADS} if heads else {}
        return Measurement(layers, by_head, (stack.checkpoint.heads,) * len(stack), loss.float()), base

    def _layers(self, base: Pass, padded: Tensor | None) -> dict[str, Tensor]:
        """Return residual ratios, updates and block influences."""
        ratios = [state_ratios(state, padded) for state in base.states[1:]]
        steps = [(_tokens(x, padded), _tokens(y, padded)) for x, y in pairwise(base.states)]
        return {
            "residual_ratio": _stacked([ratio for ratio, _ in ratios]),
            "direction_ratio": _stacked([direction for _, direction in ratios]),
            "update": _stacked([update_share(x, y - x.to(y.device)) for x, y in steps]),
            "block_influence": _stacked([block_influence(x, y) for x, y in steps]),
        }

    def _what_ifs(self, stack: ProbeStack, found: tuple[Measurement, Pass], depth: float | None) -> Measurement:
        """Add the cost of skipping each block and, if requested, the measured effective depth."""
        measured, base = found
        lost, ids = self._lost(base.output), self.batch.ids
        skip = tuple(lost(what_if(stack, ids, base.states, "block", layer)) for layer in range(len(stack)))
        left = None
        if depth is not None:
            tried = [least_missed({layer: [cost] for layer, cost in enumerate(skip)})]
            while sum(tried[-1].losses) <= depth and len(tried) < len(stack) - 1:
                tried.append(self._next(stack, lost, tried))
            left = measured_depth(tried, len(stack), depth).layers
        return Measurement(measured.layers, measured.heads, measured.counts, measured.loss, skip, left)

    def _next(self, stack: ProbeStack, lost: Callable[[Tensor], float], tried: list[Removal]) -> Removal:
        return next_removal(stack, [self.batch.ids], [lost], [step.layer for step in tried])

    def _lost(self, intact: Tensor) -> Callable[[Tensor], float]:
        """Return a function that measures how much worse an output is, equal in all processes."""
        real, device = self.batch.real, self.device
        if self.objective == "loss":
            return lambda output: _mean(output.float() - intact.float(), device)
        norm = intact[real].double().norm()
        return lambda output: _mean((output[real].double() - intact[real].double()).norm() / norm, device)


def _mean(value: Tensor, device: torch.device) -> float:
    """Return the mean of a number over all processes."""
    value = value.detach().to(device, torch.float64).clone()
    if (count := ranks()) > 1:
        torch.distributed.all_reduce(value)
        value = value / count
    return float(value)


def _tokens(state: Float[Tensor, "batch n d"], real: Tensor | None) -> Float[Tensor, "1 tokens d"]:
    """Return the tokens that are no padding, of all sequences."""
    return state.reshape(1, -1, state.shape[-1]) if real is None else state[real.to(state.device)][None]


def _stacked(values: list[Any]) -> Tensor:
    """Return one tensor of numbers or tensors, on the device of the first."""
    tensors = [torch.as_tensor(value) for value in values]
    return torch.stack([tensor.to(tensors[0].device, torch.float64) for tensor in tensors])


def _is_causal(model: nn.Module) -> bool:
    """Return whether a model is a causal language model; sharded models are subclasses of one."""
    causal = set(transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(base.__name__ in causal for base in type(model).__mro__)
