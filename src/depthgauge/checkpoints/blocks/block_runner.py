"""Run a checkpoint from any layer on, with blocks skipped, or one block at a time.

`Stack` always uses the model's own forward pass. To start at layer k, the blocks before it are replaced by functions
that return their input, except block k − 1, which returns the given state. Embeddings and masks are recomputed, at
negligible cost, and the final norm and the output head are the model's own.

`BlockRunner` calls single blocks with the arguments that the model passes to them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.base.array_record import ArrayRecord
from depthgauge.checkpoints.blocks.attention_calls import Session, Watch
from depthgauge.checkpoints.blocks.model_output import WindowBatches, batch_size, model_output
from depthgauge.checkpoints.inputs.windows import Inputs, Samples, few_windows, repeated
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.weights.load import Checkpoint, blocks_of

Change = Callable[[Tensor], Tensor]
"""A function of a module's output that replaces it."""


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


# --- Run a checkpoint from any layer on, with blocks skipped ---------------------------------------------------------

NOT_BY_WINDOW = "its states are not arranged by window and token"
"""Why a model such as XLNet, whose states have the tokens first, is not supported."""
NOT_SEEN = "its blocks are not called as modules"
"""Why a model such as SqueezeBERT, which calls the `forward` of its blocks, is not supported."""


@dataclass(frozen=True, eq=False, repr=False)
class Pass(ArrayRecord):
    """One forward pass.

    - `states`: X_0 … X_L, the input of every block and the output of the last one, before the final norm
    - `output`: what is measured, such as the logits; see `model_output`
    """

    states: tuple[Float[Tensor, "batch n d"], ...]
    output: Tensor


class Stack:
    """The blocks of a checkpoint, observed through a session; `evaluations` counts the blocks computed so far.

    A block that is applied to several windows counts once for each.
    """

    def __init__(self, checkpoint: Checkpoint, session: Session) -> None:
        self.checkpoint, self.session = checkpoint, session
        self.blocks = blocks_of(checkpoint)
        self.evaluations = 0
        self._tokens: list[int] = []  # of each stack, in the last full pass
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
        skipped: frozenset[int] = frozenset(),
        watch: Watch | None = None,
    ) -> Tensor:
        """Return the model's output when the input of layer `start` is `state`; layers before it are not computed.

        Args:
            inputs: token ids, images, or samples.
            start: the first layer to run.
            state: X_start, the input of layer `start`; not used if `start` is 0.
            skipped: layers that return their input.
            watch: observes the attention of the layers that run.
        """
        self.session.begin(first=start, watch=watch)
        self.evaluations += len(inputs) * sum(layer not in skipped for layer in range(start, len(self)))
        with ExitStack() as patches:
            returned = {} if state is None else self._returned(start, state)
            for layer in sorted({*range(start), *skipped}):
                patches.enter_context(self._passing(layer, returned.get(layer)))
            return self._forward(inputs)

    @torch.no_grad()
    def full(self, inputs: Inputs, *, skipped: frozenset[int] = frozenset(), watch: Watch | None = None) -> Pass:
        """Run all layers except the `skipped` ones and keep the states X_0 … X_L; `watch` observes the attention."""
        read, made = dict[int, Tensor](), dict[int, Tensor]()
        self.session.begin(watch=watch)
        self.evaluations += len(inputs) * (len(self) - len(skipped))
        with ExitStack() as patches:
            for layer in skipped:
                patches.enter_context(self._passing(layer, None))
            for layer, block in enumerate(self.blocks):
                patches.enter_context(self._recording(block, layer, read, made))
            output = self._forward(inputs)
        if not read:
            return Pass((), output)
        spans = self.checkpoint.spans
        streams = [[*(read[layer] for layer in span), made[span[-1]]] for span in spans]
        self._tokens = [stream[0].shape[1] for stream in streams]
        # X_k has the tokens of both stacks: the input of a stack before its first block, its output after its last one.
        return Pass(
            tuple(
                joined([one[min(max(k - span.start, 0), len(span))] for one, span in zip(streams, spans, strict=True)])
                for k in range(len(self) + 1)
            ),
            output,
        )

    def _forward(self, inputs: Inputs) -> Tensor:
        """Return the output of one pass; the monitor's stack returns the loss of its own batch."""
        return model_output(self.checkpoint, inputs)

    @contextmanager
    def _recording(
        self, block: nn.Module, layer: int, read: dict[int, Tensor], made: dict[int, Tensor]
    ) -> Iterator[None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read[layer] = hidden_in(args, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            self._others[layer] = tuple(out[1:]) if isinstance(out, tuple | list) else None
            made[layer] = hidden_out(out)

        with block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after):
            yield

    def _parts(self, state: Float[Tensor, "batch n d"]) -> Sequence[Float[Tensor, "batch _ d"]]:
        """Return the tokens of each stack."""
        return [state] if len(self.checkpoint.spans) == 1 else torch.split(state, self._tokens, dim=1)

    def _returned(self, start: int, state: Float[Tensor, "batch n d"]) -> dict[int, Float[Tensor, "batch _ d"]]:
        """Return, for the last block of each stack before layer `start`, its part of X_start."""
        spans = zip(self.checkpoint.spans, self._parts(state), strict=True)
        return {min(span.stop, start) - 1: part for span, part in spans if span.start < start}

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
            return (out, *(value if isinstance(value, Tensor) and len(value) == 1 else None for value in others))

        with replaced(self.blocks[layer], forward):
            yield

    @contextmanager
    def silenced(self, module: nn.Module) -> Iterator[None]:
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


def joined(parts: Sequence[Float[Tensor, "windows _ d"]]) -> Float[Tensor, "windows n d"]:
    """Return the states of all stacks as one tensor: the tokens of one after those of the other."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim=1)


def unusual_states(states: Sequence[Tensor], inputs: Inputs) -> str | None:
    """Return why the states of a pass are not `[windows, tokens, d]`, all of one shape, or None if they are."""
    if not states:
        return NOT_SEEN
    first = states[0].shape
    is_usual = len(first) == 3 and len(inputs) == first[0] and all(state.shape == first for state in states)
    if isinstance(inputs, Tensor) and inputs.dim() == 2:  # token ids
        is_usual = is_usual and first[1] == inputs.shape[1]
    return None if is_usual else NOT_BY_WINDOW


# --- Run the blocks of a checkpoint one at a time, with the arguments that the model passes to them ------------------


class _Reached(Exception):  # noqa: N818
    """Ends a forward pass at the first block, whose input is all that is needed."""


class BlockRunner(Stack):
    """The blocks of a checkpoint as functions of the residual stream.

    A block is called with the arguments that the model itself passes to it: masks, rotary embeddings and positions are
    recorded once, on one window. Those that have rows for each window, one (masks) or several (the position biases of
    Bloom), are repeated for the other windows. All windows therefore have the same length. Where other arguments depend
    on the window, such as the states of an encoder, the model is asked for those of every batch.

    - `blocks`: the blocks, in order
    - `batches`: how many windows are computed together
    - `needs_inputs`: whether arguments of the blocks depend on the window
    - `shared`: weights of blocks that decide arguments of other blocks, such as the position biases of T5; the recorded
      arguments would not follow if these weights changed
    """

    def __init__(self, checkpoint: Checkpoint, example: Inputs, session: Session | None = None) -> None:
        """Run the model on one window, `example`; `session` receives its attention calls."""
        super().__init__(checkpoint, session or Session())
        if not self.blocks:
            raise CheckpointError(
                f"{checkpoint.name} has no list of {checkpoint.layers} blocks; shrinking needs a model whose layers "
                "are separate modules in one list"
            )
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._last: tuple[Inputs, Tensor | None, list[tuple[tuple[Any, ...], dict[str, Any]]]] | None = None
        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(block.register_forward_pre_hook(_recorder(self._calls), with_kwargs=True))
            states = self.full(example).states
        self._example, tokens = example, states[0].shape[1]
        self.shared = self._shared_weights(states)
        self._by_window = self._rows_by_window()
        reads_several = isinstance(example, Samples) and len(example.inputs) > 1  # masks of padding, or two stacks
        self.needs_inputs = reads_several or self._depend_on_window(tokens)
        size = batch_size(checkpoint.model, tokens, checkpoint.objective == "loss")
        self.batches = WindowBatches(size if checkpoint.batched else 1)

    @property
    def device(self) -> torch.device:
        """The device that expects the inputs."""
        return self.checkpoint.device

    def _shared_weights(self, states: Sequence[Tensor]) -> frozenset[nn.Parameter]:
        """Return the weights on which tensors depend that a block computes beside its states and other blocks read."""
        read = {
            id(value) for args, named in self._calls for value in (*args, *named.values()) if isinstance(value, Tensor)
        }
        shared: set[nn.Parameter] = set()
        for layer, block in enumerate(self.blocks):
            args, named = self._calls[layer]
            new = read - {id(value) for value in (*args, *named.values())}
            if made := [place for place, value in enumerate(self._others.get(layer) or (), 1) if id(value) in new]:
                weights = [weight for weight in block.parameters() if weight.requires_grad]
                with torch.enable_grad():
                    out = block(self.part(layer, states[layer]), *args, **named)
                    total = torch.stack([out[place].sum() for place in made]).sum()
                    slopes = torch.autograd.grad(total, weights, allow_unused=True) if total.requires_grad else ()
                shared |= {weight for weight, slope in zip(weights, slopes, strict=False) if slope is not None}
        return frozenset(shared)

    @torch.no_grad()
    def embed(self, inputs: Inputs) -> Float[Tensor, "windows n d"]:
        """Return X_0, the input of the first block."""
        return torch.cat(self.batches.map(lambda these: self._embed(inputs[these]), len(inputs)))

    def _embed(self, inputs: Inputs) -> Float[Tensor, "batch n d"]:
        *others, last = self.checkpoint.spans
        firsts, states = [self.blocks[span.start] for span in self.checkpoint.spans], list[Tensor]()

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states.append(hidden_in(args, kwargs))
            if module is self.blocks[last.start]:
                raise _Reached

        with ExitStack() as hooks:
            for layer in (layer for span in others for layer in span):
                hooks.enter_context(self._passing(layer, None))
            for block in firsts:
                hooks.enter_context(block.register_forward_pre_hook(stop, with_kwargs=True))
            hooks.enter_context(suppress(_Reached))
            self._forward(inputs)
        return joined(states)

    def part(self, layer: int, states: Float[Tensor, "windows n d"]) -> Float[Tensor, "windows _ d"]:
        """Return the tokens of the stack that a layer belongs to."""
        return self._parts(states)[self._stack_of(layer)]

    def _stack_of(self, layer: int) -> int:
        return next(index for index, span in enumerate(self.checkpoint.spans) if layer in span)

    def block(
        self, layer: int, states: Float[Tensor, "batch n d"], inputs: Inputs | None = None
    ) -> Float[Tensor, "batch n d"]:
        """Return B_ℓ(X), the states after block ℓ, for one batch; `inputs` are its windows, by default the example.

        If X has the tokens of an encoder and of a decoder, only those of the block's own stack change. A block of the
        decoder also reads those of the encoder, after the final norm of the encoder.
        """
        parts, place = [*self._parts(states)], self._stack_of(layer)
        self.evaluations += len(states)
        if self.needs_inputs and inputs is not None:
            args, kwargs = self._calls_of(inputs, parts[0] if place else None)[layer]
        else:
            args, kwargs = self._calls[layer]
            if len(states) > 1:
                by_window = self._by_window[layer]
                args = tuple(_for_windows(value, by_window.get(i), len(states)) for i, value in enumerate(args))
                kwargs = {key: _for_windows(value, by_window.get(key), len(states)) for key, value in kwargs.items()}
        self.session.calls = layer
        parts[place] = hidden_out(self.blocks[layer](parts[place], *args, **kwargs))
        return joined(parts)

    def _calls_of(self, inputs: Inputs, source: Tensor | None) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the arguments of every block on these windows: the states of the encoder, and masks of padding.

        `source` are the states after the last block of the encoder, if its blocks are among these. The last call is
        remembered, because all blocks are called with the same windows one after the other.
        """
        known = self._last
        if known is None or known[0] is not inputs or not _equal(source, known[1]):
            calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
            last = None if source is None else self.checkpoint.spans[0][-1]
            with ExitStack() as patches:
                for layer, block in enumerate(self.blocks):
                    patches.enter_context(self._passing(layer, source if layer == last else None))
                    patches.enter_context(block.register_forward_pre_hook(_recorder(calls), with_kwargs=True))
                patches.enter_context(self.blocks[-1].register_forward_pre_hook(_stop))
                patches.enter_context(suppress(_Reached))
                self._forward(inputs)
            known = self._last = inputs, source, calls
        return known[2]

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
    def _depend_on_window(self, tokens: int) -> bool:
        """Return whether blocks get other arguments for another window."""
        return _differ(self._calls, self._calls_of(few_windows(self._example, tokens)[1:], None))

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
        for layer in layers:
            with self.checkpoint.resident(layer):
                self.batches.map(partial(self._advance, layer, states, made, inputs), len(states))
            states = made
        return made

    def _advance(self, layer: int, states: Tensor, made: Tensor, inputs: Inputs | None, these: slice) -> None:
        """Put the states of a batch after a layer into `made`."""
        part = self.block(layer, self.on_device(states[these]), None if inputs is None else inputs[these])
        made[these] = part.to(made.device, made.dtype)

    def on_device(self, states: Float[Tensor, "windows n d"]) -> Float[Tensor, "windows n d"]:
        """Return states on the model's device and in its dtype."""
        return states.to(self.device, self.checkpoint.model.dtype)

    def output(self, states: Float[Tensor, "batch n d"], inputs: Inputs | None = None) -> Tensor:
        """Return the output of the model, such as its logits, for the states after the last block.

        `inputs` are the windows of these states, by default the example. A head may read them: a classifier looks for
        the last token that is not padding. Gradients with respect to the states are computed where they are enabled.
        """
        self.session.begin(first=len(self))
        with ExitStack() as patches:
            returned = self._returned(len(self), states)
            for layer in range(len(self)):
                patches.enter_context(self._passing(layer, returned.get(layer)))
            return self._forward(repeated(self._example, len(states)) if inputs is None else inputs)


def tokens_of(checkpoint: Checkpoint, inputs: Inputs) -> int:
    """Return how many tokens a window becomes; an image becomes one for each patch, and some more."""
    found: list[int] = []

    def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(hidden_in(args, kwargs).shape[1])
        raise _Reached

    blocks = blocks_of(checkpoint)
    if not blocks:
        return 0
    with blocks[0].register_forward_pre_hook(stop, with_kwargs=True), suppress(_Reached), torch.no_grad():
        model_output(checkpoint, inputs[:1])
    return found[0]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _differ(one: Any, two: Any) -> bool:
    """Return whether two arguments of a block, or collections of them, have different values."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return not torch.equal(one, two)
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return any(_differ(one[name], two[name]) for name in one.keys() & two.keys())
    is_pair = isinstance(one, tuple | list) and isinstance(two, tuple | list)
    return is_pair and any(_differ(a, b) for a, b in zip(one, two, strict=False))


def _stop(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise _Reached


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
