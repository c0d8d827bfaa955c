"""Read and replace what modules take and return."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

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
