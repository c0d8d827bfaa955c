"""Run a checkpoint from any layer on, with blocks skipped or changed, or one block at a time.

`Stack` always uses the model's own forward pass. To start at layer k, the blocks before it are replaced by functions
that return their input, except block k − 1, which returns the given state. Embeddings and masks are recomputed, at
negligible cost, and the final norm and the output head are the model's own. `BlockRunner` calls single blocks as well.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge._records import ArrayRecord
from depthgauge.checkpoints.hooks import Change, changed, hidden_in, hidden_out, replaced, with_hidden
from depthgauge.checkpoints.interface import Session, Watch
from depthgauge.checkpoints.library import CheckpointError, attempt
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.model_output import model_output
from depthgauge.checkpoints.samples import Inputs, Samples, repeated

NOT_BY_WINDOW = "its states are not arranged by window and token"
"""Why a model such as XLNet, whose states have the tokens first, is not supported."""
NOT_SEEN = "its blocks are not called as modules"
"""Why a model such as SqueezeBERT, which calls the `forward` of its blocks, is not supported."""
_LOGIT_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Largest size of the logits of one batch, by type of device."""


class _Reached(Exception):  # noqa: N818
    """Ends a forward pass at the first block, whose input is all that is needed."""


@dataclass(frozen=True, eq=False, repr=False)
class Pass(ArrayRecord):
    """One forward pass.

    - `states`: X_0 … X_L, the input of every block and the output of the last one, before the final norm
    - `output`: what is measured, such as the logits; see `model_output`
    """

    states: tuple[Float[Tensor, "batch n d"], ...]
    output: Tensor


class Stack:
    """The blocks of a checkpoint, observed through a session; `evaluations` counts the blocks computed so far."""

    def __init__(self, checkpoint: Checkpoint, session: Session) -> None:
        self.checkpoint, self.session = checkpoint, session
        self.blocks = find_blocks(checkpoint.root, checkpoint.layers)
        self.evaluations = 0
        self._others: dict[int, tuple[Any, ...] | None] = {}  # what a block returns after the states; None: no tuple
        self._silent_form: dict[tuple[Any, ...], str] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def run(
        self,
        inputs: Inputs,
        *,
        start: int = 0,
        state: Float[Tensor, "batch n d"] | None = None,
        changes: Mapping[nn.Module, Change] | None = None,
        skipped: frozenset[int] = frozenset(),
        silent: nn.Module | None = None,
        uniform: int | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """Return the model's output when the input of layer `start` is `state`; layers before it are not computed.

        Args:
            inputs: token ids, images, or samples.
            start: the first layer to run.
            state: X_start, the input of layer `start`; not used if `start` is 0.
            changes: functions applied to the outputs of modules.
            skipped: layers that return their input.
            silent: a module that returns zeros.
            uniform: the layer whose attention is made uniform.
            watch: observes the attention of the layers that run.
        """
        self.session.begin(first=start, uniform=uniform, watch=watch)
        self.evaluations += sum(layer not in skipped for layer in range(start, len(self)))
        with ExitStack() as patches:
            for layer in sorted({*range(start), *skipped}):
                patches.enter_context(self._passing(layer, state if layer == start - 1 else None))
            for module, change in (changes or {}).items():
                patches.enter_context(changed(module, change))
            if silent is not None:
                patches.enter_context(self._silenced(silent))
            return self._forward(inputs)

    @torch.no_grad()
    def full(self, inputs: Inputs, *, skipped: frozenset[int] = frozenset(), watch: Watch | None = None) -> Pass:
        """Run all layers except the `skipped` ones and keep the states X_0 … X_L; `watch` observes the attention."""
        states: dict[int, Tensor] = {}
        self.session.begin(watch=watch)
        self.evaluations += len(self) - len(skipped)
        with ExitStack() as patches:
            for layer in skipped:
                patches.enter_context(self._passing(layer, None))
            for layer, block in enumerate(self.blocks):
                patches.enter_context(self._recording(block, layer, states))
            output = self._forward(inputs)
        return Pass(tuple(states[layer] for layer in range(len(self) + 1)) if states else (), output)

    def _forward(self, inputs: Inputs) -> Tensor:
        """Return the output of one pass; the monitor's stack returns the loss of its own batch."""
        return model_output(self.checkpoint, inputs)

    @contextmanager
    def _recording(self, block: nn.Module, layer: int, states: dict[int, Tensor]) -> Iterator[None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[layer] = hidden_in(args, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            self._others[layer] = tuple(out[1:]) if isinstance(out, tuple | list) else None
            states[layer + 1] = hidden_out(out)

        with block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after):
            yield

    @contextmanager
    def _passing(self, layer: int, state: Tensor | None) -> Iterator[None]:
        """Make a block return `state`, or its input if `state` is None.

        What it returned after the states in the last full pass, it returns again, if this does not depend on the
        window: block 0 of T5 computes the position biases of all blocks.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            out, others = hidden_in(args, kwargs) if state is None else state, self._others.get(layer)
            if others is None:
                return out
            return (out, *(one if isinstance(one, Tensor) and len(one) == 1 else None for one in others))

        with replaced(self.blocks[layer], forward):
            yield

    @contextmanager
    def _silenced(self, module: nn.Module) -> Iterator[None]:
        """Make a module return zeros.

        The first module of a type, with weights of the same shapes, is computed, to learn the form of its output: a
        tensor shaped like its input (`one`), such a tensor and None (`several`), or neither (`other`). Later ones of
        form `one` or `several` are not computed.
        """
        kind = (type(module), *(weight.shape for weight in module.parameters(recurse=False)))
        form = self._silent_form.get(kind)

        def learn(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            zeros = torch.zeros_like(hidden_out(out))
            has_input = bool(args or "hidden_states" in kwargs)
            same_shape = has_input and hidden_in(args, kwargs).shape == zeros.shape
            is_pair = isinstance(out, tuple) and len(out) == 2 and out[1] is None
            known_form = "one" if isinstance(out, Tensor) else "several" if is_pair else "other"
            self._silent_form[kind] = known_form if same_shape else "other"
            return with_hidden(out, zeros)

        def forward(*args: Any, **kwargs: Any) -> Any:
            zeros = torch.zeros_like(hidden_in(args, kwargs))
            return (zeros, None) if form == "several" else zeros

        known = form in ("one", "several")
        with replaced(module, forward) if known else module.register_forward_hook(learn, with_kwargs=True):
            yield


class BlockRunner(Stack):
    """The blocks of a checkpoint as functions of the residual stream.

    A block is called with the arguments that the model itself passes to it: masks, rotary embeddings and positions are
    recorded once, on one window. Those that have rows for each window, one (masks) or several (the position biases of
    Bloom), are repeated for the other windows. All windows therefore have the same length.

    - `blocks`: the blocks, in order
    - `batch`: how many windows are computed together
    """

    def __init__(self, checkpoint: Checkpoint, example: Inputs) -> None:
        super().__init__(checkpoint, Session())
        if not self.blocks:
            raise CheckpointError(
                f"{checkpoint.name} has no list of {checkpoint.layers} blocks; shrinking needs a model whose layers "
                "are separate modules in one list"
            )
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._last: tuple[Inputs, list[tuple[tuple[Any, ...], dict[str, Any]]]] | None = None
        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(block.register_forward_pre_hook(_recorder(self._calls), with_kwargs=True))
            tokens = self.full(example).states[0].shape[1]
        self._example = example
        self._by_window = self._rows_by_window()
        size = batch_size(checkpoint.model, tokens, checkpoint.objective == "loss")
        self.batch = size if checkpoint.batched else 1

    @property
    def device(self) -> torch.device:
        """The device that expects the inputs."""
        return self.checkpoint.device

    @torch.no_grad()
    def embed(self, inputs: Inputs) -> Float[Tensor, "windows n d"]:
        """Return X_0, the input of the first block."""
        found: list[Tensor] = []

        def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(hidden_in(args, kwargs))
            raise _Reached

        with self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True):
            for start in range(0, len(inputs), self.batch):
                with suppress(_Reached):
                    self._forward(inputs[start : start + self.batch])
        return torch.cat(found)

    def block(
        self, layer: int, states: Float[Tensor, "batch n d"], inputs: Inputs | None = None
    ) -> Float[Tensor, "batch n d"]:
        """Return B_ℓ(X) for one batch; `inputs` are its windows, by default the example."""
        if isinstance(inputs, Samples) and len(inputs.inputs) > 1:
            args, kwargs = self._calls_of(inputs)[layer]
        else:
            args, kwargs = self._calls[layer]
            if len(states) > 1:
                by_window = self._by_window[layer]
                args = tuple(_for_windows(one, by_window.get(i), len(states)) for i, one in enumerate(args))
                kwargs = {key: _for_windows(one, by_window.get(key), len(states)) for key, one in kwargs.items()}
        return hidden_out(self.blocks[layer](states, *args, **kwargs))

    @torch.no_grad()
    def _calls_of(self, inputs: Inputs) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of every block on these windows: the states of the encoder, and masks of padding.

        The last windows are remembered, because all blocks are called with them one after the other.
        """
        if self._last is None or self._last[0] is not inputs:
            calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
            with ExitStack() as patches:
                for layer, block in enumerate(self.blocks):
                    patches.enter_context(self._passing(layer, None))
                    patches.enter_context(block.register_forward_pre_hook(_recorder(calls), with_kwargs=True))
                self._forward(inputs)
            self._last = inputs, calls
        return self._last[1]

    @torch.no_grad()
    def _rows_by_window(self) -> list[dict[int | str, Any]]:
        """Return which arguments of each block, by place or name, have rows for each window of a batch.

        Blocks of one model may differ in this: only some have a mask, or the values of an earlier block.
        """
        found: list[dict[int | str, Any]] = []

        def compare(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            placed, named = self._calls[len(found)]
            pairs: list[tuple[int | str, tuple[Any, Any]]] = [*enumerate(zip(placed, args[1:], strict=False))]
            pairs += [(name, (one, kwargs[name])) for name, one in named.items() if name in kwargs]
            found.append({name: _has_rows_by_window(*pair) for name, pair in pairs})

        if not self.checkpoint.batched:
            return [{} for _ in self.blocks]
        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(block.register_forward_pre_hook(compare, with_kwargs=True))
            self._forward(repeated(self._example, 2))
        return found

    @torch.no_grad()
    def through(
        self, layers: Sequence[int], states: Float[Tensor, "windows n d"], inputs: Inputs | None = None
    ) -> Float[Tensor, "windows n d"]:
        """Return the states after the given layers, in batches; the result is stored where `states` is stored.

        `inputs` are the windows of these states, and possibly more windows after them.
        """
        if not layers:
            return states
        made = torch.empty_like(states)
        for index, part in self.batches(states):
            these = None if inputs is None else inputs[index : index + len(part)]
            for layer in layers:
                part = self.block(layer, part, these)
            made[index : index + len(part)] = part.to(made.device, made.dtype)
        return made

    def batches(self, states: Float[Tensor, "windows n d"]) -> Iterator[tuple[int, Float[Tensor, "batch n d"]]]:
        """Yield batches of states on the model's device, each with the index of its first window."""
        dtype = self.checkpoint.model.dtype
        for start in range(0, len(states), self.batch):
            yield start, states[start : start + self.batch].to(self.device, dtype)

    def output(self, states: Float[Tensor, "batch n d"], inputs: Inputs | None = None) -> Tensor:
        """Return the output of the model, such as its logits, for the states after the last block.

        `inputs` are the windows of these states, by default the example. A head may read them: a classifier looks for
        the last token that is not padding. Gradients with respect to the states are computed where they are enabled.
        """
        self.session.begin(first=len(self))
        with ExitStack() as patches:
            for layer in range(len(self)):
                patches.enter_context(self._passing(layer, states if layer == len(self) - 1 else None))
            return self._forward(repeated(self._example, len(states)) if inputs is None else inputs)


def tokens_of(checkpoint: Checkpoint, inputs: Inputs) -> int:
    """Return how many tokens a window becomes; an image becomes one for each patch, and some more."""
    found: list[int] = []

    def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(hidden_in(args, kwargs).shape[1])
        raise _Reached

    blocks = find_blocks(checkpoint.root, checkpoint.layers)
    if not blocks:
        return 0
    with blocks[0].register_forward_pre_hook(stop, with_kwargs=True), suppress(_Reached), torch.no_grad():
        model_output(checkpoint, inputs[:1])
    return found[0]


def batch_size(model: Any, window: int, loss: bool) -> int:
    """Return how many windows fit into one batch; the logits are the largest tensor, or else the MLP's activations."""
    config = model.config.get_text_config()
    wide = max(config.vocab_size if loss else 1, 8 * config.hidden_size)
    return max(1, _LOGIT_BYTES.get(model.device.type, 2**28) // (4 * window * int(wide)))


def with_stack(checkpoint: Checkpoint, stack: str) -> Checkpoint:
    """Return an encoder–decoder model of which one stack is gauged or shrunk: `encoder` or `decoder`.

    The key of the configuration that has its number of layers is the one that changes this stack alone.

    Raises:
        CheckpointError: there is no such key.
    """
    kind: Any = type(checkpoint.model)
    other = "encoder" if stack == "decoder" else "decoder"
    lengths = {name: _stack_length(replace(checkpoint, stack=name)) for name in (stack, other)}
    values = checkpoint.config.to_dict().items()
    for key in [key for key, value in values if type(value) is int and value == lengths[stack] and "layer" in key]:
        config = copy.deepcopy(checkpoint.config)
        setattr(config, key, lengths[stack] + 1)
        try:
            with torch.device("meta"):
                built = attempt(checkpoint.name, "model", partial(kind, config), verb="build")
        except CheckpointError:  # transformers compares the numbers of layers with other settings
            continue
        trial = replace(checkpoint, model=built)
        found = {name: _stack_length(replace(trial, stack=name)) for name in (stack, other)}
        if found == lengths | {stack: lengths[stack] + 1}:
            families = (None,) * lengths[stack]
            return replace(checkpoint, stack=stack, layer_key=key, families=families)
    raise CheckpointError(
        f"no key of the configuration of {checkpoint.name} has the number of layers of its {stack} alone; this model "
        "is not supported"
    )


def _stack_length(checkpoint: Checkpoint) -> int:
    """Return the number of blocks of a stack, the outermost list of modules in it."""
    return next((len(one) for one in checkpoint.root.modules() if isinstance(one, nn.ModuleList)), 0)


def find_blocks(model: nn.Module, layers: int) -> list[nn.Module]:
    """Return a model's blocks: the outermost `ModuleList` with one distinct entry per layer, or an empty list.

    In a model with parts that have their own configurations, such as an encoder of images, the blocks are those of the
    text model.
    """
    config: Any = getattr(model, "config", None)
    text = type(config.get_text_config()) if hasattr(config, "get_text_config") else object
    own = next((part for part in model.modules() if isinstance(getattr(part, "config", None), text)), model)
    others = {
        inner
        for part in own.modules()
        if hasattr(getattr(part, "config", None), "get_text_config") and not isinstance(part.config, text)
        for inner in part.modules()
    }
    for module in own.modules():
        if module in others or not isinstance(module, nn.ModuleList):
            continue
        if len(module) == layers and len(set(map(id, module))) == layers:
            return list(module)
    return []


def _recorder(calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> Callable[..., None]:
    """Return a hook that records the arguments of a block, without the hidden states."""

    def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        calls.append((args[1:], others))

    return record


def _has_rows_by_window(one: Any, two: Any) -> Any:
    """Return whether a tensor has twice as many rows for two windows as for one; a tuple of answers for a tuple."""
    if isinstance(one, tuple):
        return tuple(_has_rows_by_window(a, b) for a, b in zip(one, two, strict=True))
    return isinstance(one, Tensor) and one.dim() > 0 and len(two) == 2 * len(one)


def _for_windows(one: Any, by_window: Any, windows: int) -> Any:
    """Return an argument of a block for several windows, given that for one."""
    if isinstance(one, tuple) and isinstance(by_window, tuple):
        return tuple(_for_windows(a, b, windows) for a, b in zip(one, by_window, strict=True))
    if not by_window or not isinstance(one, Tensor):  # only some layers may have a mask
        return one
    rest = one.shape[1:]
    return one.expand(windows, *rest) if len(one) == 1 else one.repeat(windows, *(1 for _ in rest))


def unusual_states(states: Sequence[Tensor], inputs: Inputs) -> str | None:
    """Return why the states of a pass are not `[windows, tokens, d]`, all of one shape, or None if they are."""
    if not states:
        return NOT_SEEN
    first = states[0].shape
    is_usual = len(first) == 3 and len(inputs) == first[0] and all(one.shape == first for one in states)
    if isinstance(inputs, Tensor) and inputs.dim() == 2:  # token ids
        is_usual = is_usual and first[1] == inputs.shape[1]
    return None if is_usual else NOT_BY_WINDOW
