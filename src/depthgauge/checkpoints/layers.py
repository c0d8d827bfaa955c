"""Run a checkpoint from any layer on, with blocks skipped or changed, or one block at a time.

`Stack` always uses the model's own forward pass. To start at layer k, the blocks before it are replaced by functions
that return their input, except block k − 1, which returns the given state. Embeddings and masks are recomputed, at
negligible cost, and the final norm and the output head are the model's own. `BlockRunner` calls single blocks as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge._records import ArrayRecord
from depthgauge.checkpoints.interface import Session, Watch
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.model_output import model_output

Change = Callable[[Tensor], Tensor]
"""A function of a module's output that replaces it."""
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
    - `output`: the logits, or the final states of a model without a language modelling head
    """

    states: tuple[Float[Tensor, "batch n d"], ...]
    output: Tensor


class Stack:
    """The blocks of a checkpoint, observed through a session; `evaluations` counts the blocks computed so far."""

    def __init__(self, checkpoint: Checkpoint, session: Session) -> None:
        self.checkpoint, self.session = checkpoint, session
        self.blocks = find_blocks(checkpoint.model, checkpoint.layers)
        self.evaluations = 0
        self._others = -1  # how many values a block returns after the states, −1 if it returns no tuple
        self._silent_form: dict[tuple[Any, ...], str] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def run(
        self,
        ids: Int[Tensor, "batch n"],
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
            ids: token ids.
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
                patches.enter_context(self._passing(self.blocks[layer], state if layer == start - 1 else None))
            for module, change in (changes or {}).items():
                patches.enter_context(changed(module, change))
            if silent is not None:
                patches.enter_context(self._silenced(silent))
            return self._forward(ids)

    @torch.no_grad()
    def full(
        self, ids: Int[Tensor, "batch n"], *, skipped: frozenset[int] = frozenset(), watch: Watch | None = None
    ) -> Pass:
        """Run all layers except the `skipped` ones and keep the states X_0 … X_L; `watch` observes the attention."""
        states: dict[int, Tensor] = {}
        self.session.begin(watch=watch)
        self.evaluations += len(self) - len(skipped)
        with ExitStack() as patches:
            for layer in skipped:
                patches.enter_context(self._passing(self.blocks[layer], None))
            for layer, block in enumerate(self.blocks):
                patches.enter_context(self._recording(block, layer, states))
            output = self._forward(ids)
        return Pass(tuple(states[layer] for layer in range(len(self) + 1)) if states else (), output)

    def _forward(self, ids: Int[Tensor, "batch n"]) -> Tensor:
        checkpoint = self.checkpoint
        return model_output(checkpoint.model, ids.to(checkpoint.device), checkpoint.objective == "loss")

    @contextmanager
    def _recording(self, block: nn.Module, layer: int, states: dict[int, Tensor]) -> Iterator[None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[layer] = hidden_in(args, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            self._others = len(out) - 1 if isinstance(out, tuple | list) else -1
            states[layer + 1] = hidden_out(out)

        with block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after):
            yield

    @contextmanager
    def _passing(self, block: nn.Module, state: Tensor | None) -> Iterator[None]:
        """Make a block return `state`, or its input if `state` is None."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = hidden_in(args, kwargs) if state is None else state
            return out if self._others < 0 else (out, *(None for _ in range(self._others)))

        with replaced(block, forward):
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

    def __init__(self, checkpoint: Checkpoint, example: Int[Tensor, "1 n"]) -> None:
        super().__init__(checkpoint, Session())
        if not self.blocks:
            raise CheckpointError(
                f"{checkpoint.name} has no list of {checkpoint.layers} blocks; shrinking needs a model whose layers "
                "are separate modules in one list"
            )
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            self._calls.append((args[1:], others))

        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(block.register_forward_pre_hook(record, with_kwargs=True))
            self.full(example)
        self._by_window = self._rows_by_window(example)
        self.batch = batch_size(checkpoint.model, example.shape[1], checkpoint.objective == "loss")

    @property
    def device(self) -> torch.device:
        """The device that expects the token ids."""
        return self.checkpoint.device

    @torch.no_grad()
    def embed(self, ids: Int[Tensor, "windows n"]) -> Float[Tensor, "windows n d"]:
        """Return X_0, the input of the first block."""
        found: list[Tensor] = []

        def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(hidden_in(args, kwargs))
            raise _Reached

        with self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True):
            for part in torch.split(ids, self.batch):
                with suppress(_Reached):
                    self._forward(part)
        return torch.cat(found)

    def block(self, layer: int, states: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch n d"]:
        """Return B_ℓ(X) for one batch."""
        args, kwargs = self._calls[layer]
        if len(states) > 1:
            by_window = self._by_window[layer]
            args = tuple(_for_windows(one, by_window.get(i), len(states)) for i, one in enumerate(args))
            kwargs = {key: _for_windows(one, by_window.get(key), len(states)) for key, one in kwargs.items()}
        return hidden_out(self.blocks[layer](states, *args, **kwargs))

    @torch.no_grad()
    def _rows_by_window(self, example: Int[Tensor, "1 n"]) -> list[dict[int | str, Any]]:
        """Return which arguments of each block, by place or name, have rows for each window of a batch.

        Blocks of one model may differ in this: only some have a mask, or the values of an earlier block.
        """
        found: list[dict[int | str, Any]] = []

        def compare(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            placed, named = self._calls[len(found)]
            pairs: list[tuple[int | str, tuple[Any, Any]]] = [*enumerate(zip(placed, args[1:], strict=False))]
            pairs += [(name, (one, kwargs[name])) for name, one in named.items() if name in kwargs]
            found.append({name: _has_rows_by_window(*pair) for name, pair in pairs})

        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(block.register_forward_pre_hook(compare, with_kwargs=True))
            self._forward(example[:1].repeat(2, 1))
        return found

    @torch.no_grad()
    def through(self, layers: Sequence[int], states: Float[Tensor, "windows n d"]) -> Float[Tensor, "windows n d"]:
        """Return the states after the given layers, in batches; the result is stored where `states` is stored."""
        if not layers:
            return states
        made = torch.empty_like(states)
        for index, part in self.batches(states):
            for layer in layers:
                part = self.block(layer, part)
            made[index : index + len(part)] = part.to(made.device, made.dtype)
        return made

    def batches(self, states: Float[Tensor, "windows n d"]) -> Iterator[tuple[int, Float[Tensor, "batch n d"]]]:
        """Yield batches of states on the model's device, each with the index of its first window."""
        dtype = self.checkpoint.model.dtype
        for start in range(0, len(states), self.batch):
            yield start, states[start : start + self.batch].to(self.device, dtype)

    def output(self, states: Float[Tensor, "batch n d"]) -> Tensor:
        """Return the logits, or the final states of a model without a head, for the states after the last block.

        Gradients with respect to the states are computed where gradients are enabled.
        """
        self.session.begin(first=len(self))
        with ExitStack() as patches:
            for layer, block in enumerate(self.blocks):
                patches.enter_context(self._passing(block, states if layer == len(self) - 1 else None))
            return self._forward(torch.zeros(states.shape[:2], dtype=torch.long))


def batch_size(model: Any, window: int, loss: bool) -> int:
    """Return how many windows fit into one batch; the logits are the largest tensor, or else the MLP's activations."""
    embedding = model.get_input_embeddings().weight
    wide = max(model.config.get_text_config().vocab_size if loss else 1, 8 * embedding.shape[1])
    return max(1, _LOGIT_BYTES.get(embedding.device.type, 2**28) // (4 * window * int(wide)))


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


def unusual_states(states: Sequence[Tensor], ids: Int[Tensor, "batch n"]) -> str | None:
    """Return why the states of a pass are not one vector for each token of each window, or None if they are."""
    if not states:
        return NOT_SEEN
    return None if all(one.dim() == 3 and one.shape[:2] == ids.shape for one in states) else NOT_BY_WINDOW


def hidden_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a block."""
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def hidden_out(out: Any) -> Tensor:
    """Return the hidden states in the output of a module, which may be a tuple or a list that starts with them."""
    found: Tensor = out[0] if isinstance(out, tuple | list) else out
    return found


def with_hidden(out: Any, states: Tensor) -> Any:
    """Return the output of a module with other hidden states."""
    if isinstance(out, tuple | list):
        others = (states, *out[1:])
        return list(others) if isinstance(out, list) else others
    return states


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward method of a module."""
    own = module.__dict__.get("forward")  # set by accelerate, for example
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def changed(module: nn.Module, change: Change) -> Iterator[None]:
    """Apply `change` to the output of a module."""

    def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return with_hidden(out, change(hidden_out(out)))

    with module.register_forward_hook(after):
        yield
