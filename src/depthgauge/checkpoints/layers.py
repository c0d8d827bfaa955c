"""Run a checkpoint from any layer on, with blocks skipped.

`Stack` always uses the model's own forward pass. To start at layer k, the blocks before it are replaced by functions
that return their input, except block k − 1, which returns the given state. Embeddings and masks are recomputed, at
negligible cost, and the final norm and the output head are the model's own.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.base.array_record import ArrayRecord
from depthgauge.checkpoints.block_lists import blocks_of
from depthgauge.checkpoints.hooks import hidden_in, hidden_out, replaced, with_hidden
from depthgauge.checkpoints.interface import Session, Watch
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.memory import free_memory
from depthgauge.checkpoints.model_output import model_output
from depthgauge.checkpoints.samples import Inputs

NOT_BY_WINDOW = "its states are not arranged by window and token"
"""Why a model such as XLNet, whose states have the tokens first, is not supported."""
NOT_SEEN = "its blocks are not called as modules"
"""Why a model such as SqueezeBERT, which calls the `forward` of its blocks, is not supported."""
_LOGIT_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Largest size of the logits of one batch, by type of device."""
_OF_FREE = 16
"""The logits of one batch take at most one part of so many of the free memory: several tensors of their size exist."""


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
        # In the states of both stacks, a stack has its input before its first block, and its output after its last one.
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
            return (out, *(one if isinstance(one, Tensor) and len(one) == 1 else None for one in others))

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


def batch_size(model: Any, window: int, loss: bool, free: int | None = None) -> int:
    """Return how many windows fit into one batch; the logits are the largest tensor, or else the MLP's activations.

    `free` is the number of free bytes on the model's device, by default as it is now.
    """
    config = model.config.get_text_config()
    wide = max(config.vocab_size if loss else 1, 8 * config.hidden_size)
    free = free_memory(model.device) if free is None else free
    most = min(_LOGIT_BYTES.get(model.device.type, 2**28), free // _OF_FREE)
    return max(1, most // (4 * window * int(wide)))


def unusual_states(states: Sequence[Tensor], inputs: Inputs) -> str | None:
    """Return why the states of a pass are not `[windows, tokens, d]`, all of one shape, or None if they are."""
    if not states:
        return NOT_SEEN
    first = states[0].shape
    is_usual = len(first) == 3 and len(inputs) == first[0] and all(one.shape == first for one in states)
    if isinstance(inputs, Tensor) and inputs.dim() == 2:  # token ids
        is_usual = is_usual and first[1] == inputs.shape[1]
    return None if is_usual else NOT_BY_WINDOW
