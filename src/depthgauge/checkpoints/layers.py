"""A checkpoint's blocks, run from any layer on: the model runs itself, and earlier layers hand on what they are told.

Nothing of a model's own forward pass is written again here. To start at layer k, the blocks before it are made to pass
through, the last of them handing on the state given; embeddings and masks are computed anew, which costs next to
nothing, and the final norm and the head are the model's own.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge.checkpoints.interface import Session, Watch
from depthgauge.checkpoints.load import Checkpoint

Change = Callable[[Tensor], Tensor]
"""What is made of a module's output."""


@dataclass(frozen=True)
class Pass:
    """One forward pass: the states X_0 … X_L before the final norm, and what the model made of them."""

    states: tuple[Float[Tensor, "1 n d"], ...]
    output: Tensor


class Stack:
    """The blocks of a checkpoint in a session; counts the block evaluations it makes."""

    def __init__(self, checkpoint: Checkpoint, session: Session) -> None:
        self.checkpoint, self.session = checkpoint, session
        self.blocks = find_blocks(checkpoint.model, checkpoint.layers)
        self.evaluations = 0
        self._tuples = False
        self._silent_form: dict[type[nn.Module], str] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def run(
        self,
        ids: Int[Tensor, "1 n"],
        *,
        start: int = 0,
        state: Float[Tensor, "1 n d"] | None = None,
        changes: Mapping[nn.Module, Change] | None = None,
        skipped: frozenset[int] = frozenset(),
        silent: nn.Module | None = None,
        uniform: int | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """The model's output when layer `start` is given `state`, and every layer before it is left out.

        `changes` act on the outputs of modules; the layers `skipped` pass their input on; a `silent` module adds
        nothing; attention is made `uniform` in one layer; `watch` sees the attention of those that run.
        """
        self.session.begin(first=start, uniform=uniform, watch=watch)
        self.evaluations += sum(layer not in skipped for layer in range(start, len(self)))
        with ExitStack() as patches:
            for layer in range(start):
                handed_on = state if layer == start - 1 else None
                patches.enter_context(self._passing(self.blocks[layer], handed_on))
            for layer in skipped:
                if layer >= start:
                    patches.enter_context(self._passing(self.blocks[layer], None))
            for module, change in (changes or {}).items():
                patches.enter_context(changed(module, change))
            if silent is not None:
                patches.enter_context(self._silenced(silent))
            return self._forward(ids)

    @torch.no_grad()
    def full(self, ids: Int[Tensor, "1 n"], *, skipped: frozenset[int] = frozenset()) -> Pass:
        """A whole pass that keeps the state before every layer, and the last one before the final norm."""
        states: dict[int, Tensor] = {}
        self.session.begin()
        self.evaluations += len(self) - len(skipped)
        with ExitStack() as patches:
            for layer in skipped:
                patches.enter_context(self._passing(self.blocks[layer], None))
            for layer, block in enumerate(self.blocks):
                patches.enter_context(self._recording(block, layer, states))
            output = self._forward(ids)
        return Pass(tuple(states[layer] for layer in range(len(self) + 1)) if states else (), output)

    def _forward(self, ids: Int[Tensor, "batch n"]) -> Tensor:
        out = self.checkpoint.model(input_ids=ids.to(self.checkpoint.device), **_no_cache(self.checkpoint))
        made: Tensor = out.logits if self.checkpoint.objective == "loss" else out.last_hidden_state
        return made

    @contextmanager
    def _recording(self, block: nn.Module, layer: int, states: dict[int, Tensor]) -> Iterator[None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[layer] = hidden_in(args, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            self._tuples = isinstance(out, tuple)
            states[layer + 1] = hidden_out(out)

        handles = [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _passing(self, block: nn.Module, state: Tensor | None) -> Iterator[None]:
        """Let a block return `state`, or its input."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = hidden_in(args, kwargs) if state is None else state
            return (out,) if self._tuples else out

        with replaced(block, forward):
            yield

    @contextmanager
    def _silenced(self, module: nn.Module) -> Iterator[None]:
        """Let a module return zeros, and from its second time on without computing what it would have returned.

        The first time shows what a module of its kind returns: one thing of its input's shape, several, or another.
        Linear maps come in all shapes and always run.
        """
        form = self._silent_form.get(type(module))

        def learn(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            zeros = torch.zeros_like(hidden_out(out))
            own = not isinstance(module, nn.Linear) and bool(args or "hidden_states" in kwargs)
            alike = own and hidden_in(args, kwargs).shape == zeros.shape
            plain = "several" if isinstance(out, tuple) else "one"
            self._silent_form[type(module)] = plain if alike else "other"
            return (zeros, *out[1:]) if isinstance(out, tuple) else zeros

        def forward(*args: Any, **kwargs: Any) -> Any:
            zeros = torch.zeros_like(hidden_in(args, kwargs))
            return (zeros, None) if form == "several" else zeros

        if form in ("one", "several"):
            with replaced(module, forward):
                yield
            return
        handle = module.register_forward_hook(learn, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def find_blocks(model: nn.Module, layers: int) -> list[nn.Module]:
    """A model's blocks: the outermost module list with one entry for each layer; empty where there is none."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers and len(set(map(id, module))) == layers:
            return list(module)
    return []


def hidden_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The states a block is given."""
    found: Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def hidden_out(out: Any) -> Tensor:
    """The states a module returns, which may be the first of several things."""
    found: Tensor = out[0] if isinstance(out, tuple) else out
    return found


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run another forward."""
    own = module.__dict__.get("forward")  # there is one where accelerate has put its own
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
    """Change what a module returns."""

    def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        made = change(hidden_out(out))
        return (made, *out[1:]) if isinstance(out, tuple) else made

    handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def _no_cache(checkpoint: Checkpoint) -> dict[str, Any]:
    takes = inspect.signature(checkpoint.model.forward).parameters
    return {"use_cache": False} if "use_cache" in takes else {}
