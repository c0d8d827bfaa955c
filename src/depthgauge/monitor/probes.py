"""Measure a transformers model or a `SelfAttentionNetwork` in one forward pass on a probe batch.

The batch is a few sequences that stay the same.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.base.errors import InputError
from depthgauge.base.format import number
from depthgauge.checkpoints.blocks.attention_calls import AttentionCall, Session, attending, attention_call, register
from depthgauge.checkpoints.blocks.block_runner import Pass, Stack
from depthgauge.checkpoints.blocks.circuits import block_sizes, layer_sizes
from depthgauge.checkpoints.blocks.model_output import no_cache, relative_distance
from depthgauge.checkpoints.blocks.probe import derived, relative_difference
from depthgauge.checkpoints.blocks.window_observer import SublayerScores
from depthgauge.checkpoints.inputs.windows import Inputs
from depthgauge.checkpoints.source.library import transformers
from depthgauge.checkpoints.weights.load import Checkpoint, require_layers, wrap
from depthgauge.monitor.measurement import (
    Measurement,
    RowWatch,
    layers_left,
    state_measures,
    token_sizes,
    update_shares,
)
from depthgauge.monitor.undisturbed import Processes, ranks, sharded, undisturbed
from depthgauge.results.monitor_record import MonitoredModel
from depthgauge.theory.network.network import LayerTrace, SelfAttentionNetwork, softmax_attention

AGREE = 0.1
"""Largest relative difference between the states of the observed model and its own: rounding in half precision."""
IGNORED = -100
"""The label that transformers leaves out of the loss."""


@dataclass(frozen=True)
class ProbeBatch:
    """The arguments of the model's forward pass.

    - `inputs`: name → tensor, at least `input_ids`
    - `real`: which tokens are no padding, `[batch, n]`
    """

    inputs: Mapping[str, Tensor]
    real: Tensor

    @property
    def ids(self) -> Tensor:
        """The token ids, `[batch, n]`."""
        return self.inputs["input_ids"]

    def to(self, device: torch.device) -> "ProbeBatch":
        """Return the batch on a device."""
        return ProbeBatch({name: value.to(device) for name, value in self.inputs.items()}, self.real.to(device))


def make_batch(probe: Any, sequences: int, tokens: int) -> ProbeBatch:
    """Cut a training batch to a few short sequences.

    `probe` has the keyword arguments of the model's forward pass, with `input_ids`, as a data loader yields them; or it
    is the token ids alone.
    """
    given = {"input_ids": probe} if isinstance(probe, Tensor) else probe
    if not isinstance(given, Mapping):
        raise InputError(
            f"probe must be a batch of the model, a mapping with input_ids or a tensor of token ids, got "
            f"{type(probe).__name__}; take one from the data loader"
        )
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64) or 0 in ids.shape:
        shown = "none" if not isinstance(ids, Tensor) else f"{ids.dtype} of shape {list(ids.shape)}"
        raise InputError(f"probe must contain input_ids, whole numbers of shape [batch, tokens], got {shown}")
    batch, n = ids.shape
    if n < 2:
        raise InputError(f"the sequences of the probe must have at least 2 tokens, got {n}; give longer ones")
    inputs = {
        name: _cut(value, batch, n, sequences, tokens).detach().clone()
        for name, value in given.items()
        if isinstance(value, Tensor)
    }
    mask = inputs.get("attention_mask")
    real = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    if mask is not None and mask.shape == real.shape:
        real = mask > 0
        if bool((real.sum(dim=1) < 2).any()):
            raise InputError(
                f"a sequence of the probe has fewer than 2 tokens that are no padding among its first {tokens}; give a "
                "probe with longer sequences that are padded on the right"
            )
    return ProbeBatch(inputs, real)


def _cut(value: Tensor, batch: int, n: int, sequences: int, tokens: int) -> Tensor:
    """Keep the first sequences and, in every dimension that has the length of a sequence, the first tokens."""
    if value.ndim == 0 or value.shape[0] != batch:
        return value
    kept = value[:sequences]
    for dim in range(1, kept.ndim):
        if kept.shape[dim] == n:
            kept = kept.narrow(dim, 0, min(n, tokens))
    return kept


def check_ids(batch: ProbeBatch, model: Any) -> None:
    """Raise `InputError` if the model has no embedding for a token id of the probe, or no output for a label.

    On a GPU, an index that is out of range cannot be caught: it ends the process.
    """
    tables = {"input_ids": model.get_input_embeddings(), "labels": model.get_output_embeddings()}
    for name, table in tables.items():
        given, weight = batch.inputs.get(name), getattr(table, "weight", None)
        if given is None or weight is None or given.shape != batch.ids.shape:
            continue
        rows = int(weight.shape[0])
        wrong = given[((given < 0) | (given >= rows)) & ((given != IGNORED) | (name == "input_ids"))]
        if len(wrong):
            part = "embedding" if name == "input_ids" else "output"
            raise InputError(
                f"{name} of the probe contain the token id {int(wrong[0])}, but the {part} of {type(model).__name__} "
                f"has {rows} rows, for ids from 0 to {rows - 1}; use the tokenizer of this model"
            )


class ProbeStack(Stack):
    """The blocks of a model on one batch; the output of a pass is the loss, or the final states of an encoder."""

    def __init__(
        self, checkpoint: Checkpoint, session: Session, batch: ProbeBatch, keywords: Mapping[str, Any]
    ) -> None:
        super().__init__(checkpoint, session)
        self.batch, self.keywords = batch, keywords

    def _forward(self, inputs: Inputs) -> Tensor:
        model = self.checkpoint.model
        out = model(**self.batch.inputs, **self.keywords)
        made: Tensor | None = out.loss if self.checkpoint.objective == "loss" else out.last_hidden_state
        if made is None:
            raise InputError(
                f"{type(model).__name__} returned no loss for the labels of the probe; give a probe without labels"
            )
        return made


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
    padded: bool = field(init=False)
    _checkpoint: Checkpoint = field(init=False, repr=False)
    _keywords: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        register()
        self._check_model()
        takes = inspect.signature(self.model.forward).parameters
        if "labels" in takes and "labels" not in self.batch.inputs and _is_causal(self.model):
            labels = self.batch.ids.masked_fill(~self.batch.real, IGNORED)  # of next-token prediction
            self.batch = replace(self.batch, inputs={**self.batch.inputs, "labels": labels})
        if "labels" in takes and "labels" in self.batch.inputs:
            self.objective = "loss"
        else:
            self.batch = replace(self.batch, inputs={k: v for k, v in self.batch.inputs.items() if k != "labels"})
        self.padded = not bool(self.batch.real.all())
        check_ids(self.batch, self.model)
        with undisturbed(self.model):
            model = self.model if self.objective == "loss" else self.model.base_model  # without its head
            checkpoint = self._checkpoint = wrap(model, type(self.model).__name__, objective=self.objective)
            self._keywords = {"return_dict": True} | no_cache(checkpoint.model)
            if not len(Stack(checkpoint, Session())):
                raise InputError(
                    f"{type(self.model).__name__} cannot be monitored: it does not keep its blocks in one list of "
                    f"{checkpoint.layers} modules"
                )
        if checkpoint.family is None:
            kind = checkpoint.config.model_type
            self.notes.append(
                f"the sizes of the weights are not measured: the projections of {kind!r} models are not known"
            )

    def _check_model(self) -> None:
        """Raise `InputError` for a model without layers, or without an embedding of token ids."""
        name = type(self.model).__name__
        require_layers(self.model.config, name)
        try:
            _ = self.model.get_input_embeddings().weight
        except (AttributeError, NotImplementedError) as error:
            raise InputError(
                f"{name} cannot be monitored: it has no embedding of token ids; give a model that reads tokens"
            ) from error

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
            heads=(self._checkpoint.heads,) * int(config.num_hidden_layers),
            parameters=sum(p.numel() for p in self.model.parameters()),
            dtype=str(weight.dtype).removeprefix("torch."),
            device=str(self.device),
            sequences=sequences,
            tokens=tokens,
            ranks=ranks(),
        )

    def measure(self, weights: bool, skip: bool, depth: float | None, processes: Processes) -> Measurement:
        """Measure the model on the batch, without an effect on its training.

        `weights` and `skip` say whether to measure the sizes of the weights and the cost of skipping each block, which
        the processes exchange. `depth` is the largest increase for the effective depth; None does not measure it.
        """
        with undisturbed(self.model):
            self.batch = self.batch.to(self.device)
            if not self.checked:
                self._check()
            with attending(self.model) as session:
                stack = self._stack(session)
                found, base = self._measure(stack, weights)
                if not skip:
                    return found
                processes.exchanged(None)  # a failure until here ends the probe before blocks are skipped
                return self._what_ifs(stack, found, self._lost(base.output, processes), base, depth)

    def _stack(self, session: Session) -> ProbeStack:
        return ProbeStack(self._checkpoint, session, self.batch, self._keywords)

    def _check(self) -> None:
        """Compare the model's own attention with the observed one, and derive the sublayers that are not declared.

        The outputs must agree up to rounding. The blocks of a sharded model are not called one by one, because all
        processes would have to call the same ones.
        """
        with _checked_indices(self.model):
            own = self._stack(Session()).full(self.batch.ids).states[-1]
        if None in self._checkpoint.families:
            if not sharded(list(self.model.modules())):
                self._checkpoint = derived(self._checkpoint, self.batch.ids)
            unknown = [layer for layer, family in enumerate(self._checkpoint.families) if family is None]
            if unknown:
                where = "" if len(unknown) == len(self._checkpoint.families) else f" of the layers {unknown}"
                reason = self._checkpoint.underived or "the model is sharded, and its architecture is not in the table"
                self.notes.append(f"the sublayers{where} are not measured: {reason}")
        with attending(self.model) as session:
            stack = self._stack(session)
            ours = stack.full(self.batch.ids).states[-1]
            calls = session.calls
        real = self.batch.real
        off, finite = relative_difference(ours[real], own[real]), bool(own[real].isfinite().all())
        self.observed, self.checked = calls == len(stack) and (off <= AGREE or not finite), True
        if not self.observed:
            self.notes.append(
                f"heads are not measured: {type(self.model).__name__} made {calls} observed attention calls in "
                f"{len(stack)} layers, and its final states differ by {number(off, 2)} from those of its own attention"
            )

    def _measure(self, stack: ProbeStack, weights: bool) -> tuple[Measurement, Pass]:
        """Return the measures of one forward pass, and the pass; nothing is read from the device."""
        families, real = stack.checkpoint.families, self.batch.real if self.padded else None
        heads = RowWatch(real) if self.observed else None
        has_sublayers = any(family and len(family.sublayers) == 2 for family in families)
        sublayers = SublayerScores(stack.blocks, families, _sizes) if has_sublayers else None
        with nullcontext() if sublayers is None else sublayers.listening():
            base = stack.full(self.batch.ids, watch=heads)
        layers = state_measures(base.states, real)
        if sublayers is not None:
            layers["attention_update"] = update_shares(_known(sublayers.attention), real)
            layers["mlp_update"] = update_shares(_known(sublayers.mlp), real)
        by_head: dict[str, Tensor] = {}
        if heads:
            by_head, layers["uniform_entropy"] = heads.measures()
        if weights and stack.checkpoint.family is not None and stack.checkpoint.family.projections is not None:
            layers |= vars(block_sizes(stack.checkpoint, stack.blocks))
        loss = base.output if self.objective == "loss" else torch.full((), float("nan"), device=self.device)
        return Measurement(layers, by_head, (stack.checkpoint.heads,) * len(stack), loss.float()), base

    def _what_ifs(
        self, stack: ProbeStack, found: Measurement, lost: Callable[[Tensor], float], base: Pass, depth: float | None
    ) -> Measurement:
        """Add the cost of skipping each block and, if requested, the measured effective depth."""
        ids, layers = self.batch.ids, range(len(stack))
        skip = tuple(lost(stack.run(ids, start=layer + 1, state=base.states[layer])) for layer in layers)

        def costs(gone: frozenset[int]) -> dict[int, float]:
            states = stack.full(ids, skipped=gone).states
            return {
                layer: lost(stack.run(ids, start=layer + 1, state=states[layer], skipped=gone))
                for layer in layers
                if layer not in gone
            }

        return replace(found, skip=skip, depth=None if depth is None else layers_left(skip, depth, costs))

    def _lost(self, intact: Tensor, processes: Processes) -> Callable[[Tensor], float]:
        """Return a function that measures how much worse an output is, equal in all processes."""
        real = self.batch.real
        if self.objective == "loss":
            return lambda output: processes.mean(float(output.double() - intact.double()))
        return lambda output: processes.mean(float(relative_distance(output[real][None], intact[real][None])))


@contextmanager
def _checked_indices(model: nn.Module) -> Iterator[None]:
    """Raise `IndexError` for an index that an embedding does not have, such as a position beyond the longest one.

    On a GPU the embedding itself would end the process.
    """

    def check(module: Any, args: tuple[Any, ...]) -> None:
        low, high, rows = int(args[0].min()), int(args[0].max()), module.num_embeddings
        if low < 0 or high >= rows:
            name = next(name for name, found in model.named_modules() if found is module)
            raise IndexError(f"{name} has {rows} rows, and the probe needs row {high if high >= rows else low}")

    with ExitStack() as hooks:
        for module in model.modules():
            if type(module) is nn.Embedding:
                hooks.enter_context(module.register_forward_pre_hook(check))
        yield


def _sizes(before: Float[Tensor, "batch n d"], added: Float[Tensor, "batch n d"]) -> tuple[Tensor, Tensor]:
    """Return ‖y‖ and ‖f(y)‖ of all tokens for a sublayer that reads y and adds f(y)."""
    return token_sizes(before), token_sizes(added)


def _known(sizes: list[Any]) -> list[tuple[Tensor, Tensor] | None]:
    """Return the sizes that a sublayer has recorded; None for a layer in which it was not called."""
    return [pair if isinstance(pair, tuple) else None for pair in sizes]


def _is_causal(model: nn.Module) -> bool:
    """Return whether a model is a causal language model; sharded models are subclasses of one."""
    causal = set(transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(base.__name__ in causal for base in type(model).__mro__)


@dataclass
class NetworkProbe:
    """A network and the inputs X_0 `[batch, n, d]` that it is measured on; `notes` lists what cannot be measured."""

    model: SelfAttentionNetwork
    inputs: Tensor
    notes: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.device

    def describe(self) -> MonitoredModel:
        """Return the description of the network in the log."""
        return MonitoredModel(
            name=self.model.name,
            architecture="SelfAttentionNetwork",
            objective="states",
            layers=len(self.model),
            heads=tuple(layer.heads for layer in self.model),
            parameters=sum(p.numel() for p in self.model.parameters()),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.device),
            sequences=self.inputs.shape[0],
            tokens=self.inputs.shape[1],
            ranks=ranks(),
        )

    def measure(self, weights: bool, skip: bool, depth: float | None, processes: Processes) -> Measurement:
        """Measure the network on the inputs; the arguments are those of `ModelProbe.measure`."""
        with undisturbed(self.model):
            x = self.inputs = self.inputs.to(self.device)
            traces, heads = list(self.model.trace(x)), RowWatch()
            states = [x, *(trace.after for trace in traces)]
            layers = state_measures(states, None) | self._sublayers(traces)
            for trace in traces:
                heads(_call(trace))
            by_head, layers["uniform_entropy"] = heads.measures()
            if weights:
                eye = torch.eye(self.model.dim, dtype=x.dtype, device=x.device)
                maps = [(layer.query, layer.key, layer.value, eye.expand_as(layer.value)) for layer in self.model]
                sizes = [layer_sizes([(q[None], k[None], v[None], o[None])]) for q, k, v, o in maps]
                layers |= {name: torch.cat([vars(size)[name] for size in sizes]) for name in vars(sizes[0])}
            lost: tuple[float, ...] = ()
            left = None
            if skip:

                def costs(gone: frozenset[int]) -> dict[int, float]:
                    others = [layer for layer in range(len(self.model)) if layer not in gone]
                    return {layer: processes.mean(self._change(gone | {layer}, states)) for layer in others}

                lost = tuple(costs(frozenset()).values())
                left = None if depth is None else layers_left(lost, depth, costs)
        counts = tuple(layer.heads for layer in self.model)
        nothing = torch.full((), float("nan"), device=self.device)
        return Measurement(layers, by_head, counts, nothing, skip=lost, depth=left)

    def _sublayers(self, traces: list[LayerTrace]) -> dict[str, Tensor]:
        """Return the size of what attention and the MLP add, relative to what they read; NaN without an MLP."""
        network, attention, mlp = self.model, list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor] | None]()
        for trace in traces:
            x, layer = trace.before, network[trace.index]
            added = layer.attend(
                trace.attention_input, softmax_attention, is_causal=network.causal, scale=network.scale
            )
            attention.append((token_sizes(x), token_sizes(added)))
            if layer.mlp is None:
                mlp.append(None)
                continue
            y = x + added if network.skip else added
            y = network.normalize(trace.index, 0, y) if network.norm_place == "after" else y
            read = network.normalize(trace.index, 1, y) if network.norm_place == "before" else y
            inner = layer.mlp(read, network.activation)
            mlp.append((token_sizes(y), token_sizes(inner)))
        return {"attention_update": update_shares(attention, None), "mlp_update": update_shares(mlp, None)}

    def _change(self, removed: frozenset[int], states: list[Tensor]) -> float:
        """Return the relative change of the output without some layers."""
        first = min(removed)
        x, intact = states[first], states[-1]
        for layer in range(first, len(self.model)):
            x = x if layer in removed else self.model.step(layer, x)
        return float(relative_distance(x[None], intact[None]))


def make_inputs(network: SelfAttentionNetwork, probe: object, sequences: int, tokens: int) -> Tensor:
    """Cut input states to a few short sequences, `[batch, n, d]`.

    Raises:
        InputError: The probe is no tensor, is empty or not finite, or does not fit the network.
    """
    if not isinstance(probe, Tensor):
        raise InputError(
            f"probe must be a tensor of input states [..., tokens, {network.dim}] for a SelfAttentionNetwork, got "
            f"{type(probe).__name__}"
        )
    network.check_input(probe)
    if 0 in probe.shape or probe.shape[-2] < 2 or not bool(probe.isfinite().all()):
        raise InputError(
            f"probe must have at least one sequence of at least 2 tokens with finite entries, got shape "
            f"{list(probe.shape)}{'' if bool(probe.isfinite().all()) else ' with entries that are not finite'}; take "
            "inputs that the network is trained on"
        )
    return probe.detach().reshape(-1, *probe.shape[-2:])[:sequences, :tokens].clone()


def _call(trace: LayerTrace) -> AttentionCall:
    """Return the attention of a layer as a call, with the tokens as the values of all heads."""
    n, heads = trace.key.shape[-2], trace.key.shape[-3]
    mask = torch.ones(1, 1, n, n, dtype=torch.bool, device=trace.key.device).tril() if trace.causal else None
    value = trace.attention_input.unsqueeze(1).expand(-1, heads, -1, -1)
    return attention_call(trace.query, trace.key, value, mask, trace.scale, None)
