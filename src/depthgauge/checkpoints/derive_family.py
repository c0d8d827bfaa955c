"""Derive the structure of a model's blocks from the model itself, and verify it numerically.

One block is called with the arguments that the model passes to it, on a few tokens, and every submodule is observed.

- A *writer* is a submodule whose output is added to the residual stream: if δ is added to its output, the block's
  output changes by m·δ, with a number m (the residual multiplier of Granite; 1 in most families).
- The two sublayers are the outermost writers without which the block is the identity. Where the block ends with a norm
  (BERT), the inputs of its two norms take the place of the block's output.
- The attention is the one whose output at the last token depends on other tokens.
- The last map of a sublayer is the linear map inside it that is a writer, or whose output the norm of the sublayer
  reads.

What is found on one block of each kind is verified on all blocks. Submodules are only named in the result.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge._format import number
from depthgauge._records import ArrayRecord
from depthgauge.checkpoints.families import Family
from depthgauge.checkpoints.layers import (
    BlockRunner,
    Change,
    changed,
    find_blocks,
    hidden_in,
    hidden_out,
    unusual_states,
)
from depthgauge.checkpoints.library import short
from depthgauge.checkpoints.load import Checkpoint

TOKENS = 12
"""Number of tokens on which a block is observed."""


LARGER = 8.0
"""Size of δ relative to the states of its token."""


class NotDerivedError(Exception):
    """The structure of a model could not be derived; the message names the check that failed."""


@dataclass(frozen=True, eq=False, repr=False)
class Trace(ArrayRecord):
    """One call of a block: its output, and inputs and outputs of the submodules that return states, in call order."""

    output: Float[Tensor, "batch n d"]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class TracedBlock:
    """One block as a function of its input x, with the outputs of some of its submodules changed."""

    def __init__(self, runner: BlockRunner, layer: int, x: Float[Tensor, "1 n d"]) -> None:
        self.runner, self.layer = runner, layer
        self.block = runner.blocks[layer]
        place = next(self.block.parameters()).device  # with a device map, blocks may be on different devices
        self.x = x = x if place.type == "meta" else x.to(place)
        self.modules = {path: module for path, module in self.block.named_modules() if path}
        intact = self.trace()
        # δ is larger than the stream and what is added to it, so that rounding of the sums is small beside it.
        sizes = [one.float().square().mean(-1, keepdim=True).sqrt() for one in (x, intact.output)]
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.device)
        self.delta = (LARGER * noise * torch.maximum(*sizes)).to(x.dtype)
        self.tolerance = max(1e-4, 4 * torch.finfo(x.dtype).eps)

    @torch.no_grad()
    def trace(self, changes: dict[str, Change] | None = None, x: Tensor | None = None) -> Trace:
        """Call the block. Recorded outputs are those before a change; only submodules that are called once count."""
        inputs, outputs, calls = dict[str, Tensor](), dict[str, Tensor](), dict[str, int]()

        def record(path: str) -> Callable[..., None]:
            def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
                made = hidden_out(out) if not isinstance(out, tuple | list) or out else None
                if not isinstance(made, Tensor) or made.shape[-1:] != self.x.shape[-1:]:
                    return
                calls[path] = calls.get(path, 0) + 1
                if made.numel() == self.x.numel():
                    outputs[path] = made.clone().reshape(self.x.shape)  # a block may add to it in place
                    read = hidden_in(args, kwargs) if args or "hidden_states" in kwargs else made
                    if read.numel() == self.x.numel():
                        inputs[path] = read.clone().reshape(self.x.shape)

            return after

        with ExitStack() as hooks:
            for path, module in self.modules.items():
                hooks.enter_context(module.register_forward_hook(record(path), with_kwargs=True))
            for path, change in (changes or {}).items():
                hooks.enter_context(changed(self.modules[path], change))
            output = self.runner.block(self.layer, (self.x if x is None else x).clone())
        once = {path: one for path, one in outputs.items() if calls[path] == 1}
        return Trace(output.clone(), {path: one for path, one in inputs.items() if path in once}, once)

    def silent(self, *paths: str) -> Trace:
        """Call the block with these submodules returning zeros."""
        return self.trace(dict.fromkeys(paths, torch.zeros_like))

    def multiplier(self, path: str, at: str | None = None, silent: Sequence[str] = ()) -> float | None:
        """Return m such that δ added to the output of a submodule adds m·δ to the block's output, or None.

        `at` names a submodule whose input takes the place of the block's output; `silent` modules return zeros.
        """
        zeros: dict[str, Change] = dict.fromkeys(silent, torch.zeros_like)
        before = self.trace(zeros)
        after = self.trace({**zeros, path: lambda out: out + self.delta.reshape(out.shape)})
        ends = [one.output if at is None else one.inputs.get(at) for one in (before, after)]
        if ends[0] is None or ends[1] is None:
            return None
        response, delta = (ends[1] - ends[0]).double(), self.delta.double()
        m = float((response * delta).sum() / delta.square().sum())
        if abs(m) < 1e-3 or not self.equal(response / m, delta):
            return None
        return 1.0 if abs(m - 1) < self.tolerance else m

    def equal(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two states agree up to rounding, token by token."""
        error = (a.double() - b.double()).norm(dim=-1)
        return bool((error <= self.tolerance * b.double().norm(dim=-1).clamp(min=1e-30)).all())

    def writers(self, at: str | None, silent: Sequence[str] = ()) -> Iterator[str]:
        """Yield the submodules with weights that write into the residual stream, the outermost first."""
        paths = self.silent(*silent).outputs
        for path in sorted(paths, key=lambda path: path.count(".")):
            has_weights = next(self.modules[path].parameters(), None) is not None
            if has_weights and path not in silent and self.multiplier(path, at, silent) is not None:
                yield path

    def is_norm(self, path: str) -> bool:
        """Return whether a submodule has vectors as its only weights."""
        weights = list(self.modules[path].parameters())
        return bool(weights) and all(weight.dim() == 1 for weight in weights)

    def is_linear(self, path: str) -> bool:
        """Return whether a submodule is one affine map: `nn.Linear`, or GPT-2's `Conv1D`."""
        module = self.modules[path]
        return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def derived(checkpoint: Checkpoint, ids: Int[Tensor, "windows n"]) -> Checkpoint:
    """Return a checkpoint with its family: the declared one, or the one that is derived from the model.

    Where no family can be derived and verified, the result has none, and `Checkpoint.underived` says why.
    """
    if checkpoint.family is not None:
        return checkpoint
    try:
        return replace(checkpoint, family=derive_family(checkpoint, ids))
    except NotDerivedError as reason:
        return replace(checkpoint, underived=str(reason))


@torch.no_grad()
def derive_family(checkpoint: Checkpoint, ids: Int[Tensor, "windows n"]) -> Family:
    """Derive the family of a model and verify it on every block, on a few of the given tokens.

    Raises:
        NotDerivedError: the model has no list of blocks, its blocks differ, or a check failed or could not be made.
    """
    try:
        return _derived_family(checkpoint, ids)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # Blocks are called in ways that their authors did not expect.
        raise NotDerivedError(f"its blocks cannot be called one by one: {short(error)}") from error


def _derived_family(checkpoint: Checkpoint, ids: Int[Tensor, "windows n"]) -> Family:
    few = ids[:1, :TOKENS]
    few = few.repeat(1, -(-TOKENS // few.shape[1]))[:, :TOKENS]
    runner, states = traced_runner(checkpoint, torch.cat([few, few.flip(1)]))
    found: dict[tuple[tuple[str, str], ...], Family] = {}
    blocks = [TracedBlock(runner, layer, states[layer][:1]) for layer in range(len(runner))]
    for block in blocks:
        kind = tuple((path, type(module).__name__) for path, module in block.modules.items())
        if kind not in found:
            found[kind] = derive_block(block)
    first, *others = found.values()
    for other in others:
        first = _common(first, other)
    for block in blocks:
        verify_block(block, first)
    return first


@torch.no_grad()
def traced_runner(checkpoint: Checkpoint, ids: Int[Tensor, "windows n"]) -> tuple[BlockRunner, tuple[Tensor, ...]]:
    """Return the blocks and their inputs X_0 … X_L; raise unless the blocks one by one give the model's output."""
    if not find_blocks(checkpoint.model, checkpoint.layers):
        raise NotDerivedError(f"it has no list of {checkpoint.layers} blocks")
    runner = BlockRunner(checkpoint, ids[:1])
    base = runner.full(ids)
    if (reason := unusual_states(base.states, ids)) is not None:
        raise NotDerivedError(reason)
    state = base.states[0]
    for layer in range(len(runner)):
        state = runner.block(layer, state)
    output = runner.output(state)
    off = float((output - base.output).double().norm() / base.output.double().norm())
    if not off <= 100 * torch.finfo(output.dtype).eps ** 0.75:
        raise NotDerivedError(
            f"its blocks applied one by one do not give its output (relative difference {number(off, 2)})"
        )
    return runner, base.states


def derive_block(block: TracedBlock) -> Family:
    """Derive the family of one block."""
    intact = block.trace()
    last = next((p for p, out in intact.outputs.items() if block.is_norm(p) and torch.equal(out, intact.output)), None)
    for mlp in block.writers(last):
        first = None
        if last is not None:
            quiet = block.silent(mlp)
            made = ((p, out) for p, out in quiet.outputs.items() if block.is_norm(p) and p != last)
            first = next((p for p, out in made if torch.equal(out, quiet.inputs[last])), None)
            if first is None:
                continue
        for attention in block.writers(first, (mlp,)):
            if _nested(attention, mlp) or not _is_identity(block, (attention, mlp), first):
                continue
            attention, mlp = _by_mixing(block, attention, mlp)
            return _family(block, attention, mlp, first, last)
    raise NotDerivedError(
        f"block {block.layer} ({type(block.block).__name__}) is not the identity, or a norm, without two submodules "
        "whose outputs it adds to its input"
    )


def verify_block(block: TracedBlock, family: Family) -> None:
    """Raise unless a block is the identity without its sublayers and affine in its last maps, as its family says."""
    ends = (family.attention_norm, family.mlp_norm) if family.order == "post" else (None, None)
    where = f"block {block.layer} ({type(block.block).__name__})"
    if not _is_identity(block, (family.attention, family.mlp), ends[0]):
        raise NotDerivedError(f"{where} without {family.attention} and {family.mlp} is not the identity")
    if family.order == "post":
        silent = block.silent(family.attention, family.mlp)
        assert ends[0] is not None
        assert ends[1] is not None
        if not torch.equal(silent.outputs[ends[0]], silent.inputs[ends[1]]) or not torch.equal(
            silent.outputs[ends[1]], silent.output
        ):
            raise NotDerivedError(f"{where} without {family.attention} and {family.mlp} is not {ends[1]} of {ends[0]}")
    written = ((family.attention, family.out, ends[0], (family.mlp,)), (family.mlp, family.down, ends[1], ()))
    for sublayer, writer, end, silent_paths in written:
        paths = [sublayer] if writer is None or block.is_norm(sublayer) else [sublayer, writer]
        for path in dict.fromkeys(paths):
            m = block.multiplier(path, end, silent_paths)
            if m is None or abs(m - family.multiplier) > 10 * block.tolerance * abs(family.multiplier):
                raise NotDerivedError(f"the output of {where} is not affine in the output of {path}")


def _is_identity(block: TracedBlock, sublayers: tuple[str, str], first: str | None) -> bool:
    """Return whether a block without its sublayers is the identity, up to `first`, the norm after attention."""
    silent = block.silent(*sublayers)
    stream = silent.output if first is None else silent.inputs.get(first)
    return stream is not None and block.equal(stream, block.x)


def _by_mixing(block: TracedBlock, a: str, b: str) -> tuple[str, str]:
    """Return the sublayer whose output at the last token depends on other tokens, and the other, which does not."""
    other = block.x.clone()
    other[:, :-1] = -block.x[:, :-1].flip(1)
    quiet: dict[str, Change] = dict.fromkeys((a, b), torch.zeros_like)
    traces = block.trace(quiet), block.trace(quiet, other)
    change = {}
    for path in (a, b):
        before, after = (one.outputs[path][:, -1].double() for one in traces)
        change[path] = float((after - before).norm() / before.norm().clamp(min=1e-30))
    attention, mlp = sorted((a, b), key=change.__getitem__, reverse=True)
    if change[mlp] > block.tolerance or change[attention] <= block.tolerance:
        raise NotDerivedError(
            f"of {a} and {b} in block {block.layer}, exactly one should mix tokens: the outputs at the last token "
            f"change by {number(change[a], 2)} and {number(change[b], 2)} with the other tokens"
        )
    return attention, mlp


def _family(block: TracedBlock, attention: str, mlp: str, first: str | None, last: str | None) -> Family:
    """Return the family of a block with these sublayers; `first` and `last` are the norms of a `post` block."""
    intact = block.trace()
    reads = {
        path: not torch.equal(intact.outputs[path], block.silent(other).outputs[path])
        for path, other in ((attention, mlp), (mlp, attention))
    }
    if reads[attention]:
        raise NotDerivedError(f"in block {block.layer}, {mlp} comes before {attention}, which reads its output")
    multipliers = block.multiplier(attention, first, (mlp,)), block.multiplier(mlp, last)
    m = multipliers[1]
    if m is None or multipliers[0] is None or abs(multipliers[0] - m) > 10 * block.tolerance * abs(m):
        raise NotDerivedError(f"block {block.layer} multiplies {attention} and {mlp} by different numbers")
    normed = first is not None
    return Family(
        attention=attention,
        mlp=mlp,
        out=_last_map(block, attention, first, (mlp,)),
        down=_last_map(block, mlp, last, ()),
        order="post" if normed else "pre" if reads[mlp] else "parallel",
        multiplier=m,
        attention_norm=first if normed else attention if block.is_norm(attention) else None,
        mlp_norm=last if normed else mlp if block.is_norm(mlp) else None,
    )


def _last_map(block: TracedBlock, sublayer: str, end: str | None, silent: Sequence[str]) -> str | None:
    """Return the linear map whose output is the sublayer's output, or the input of its norm; None if there is none."""
    trace = block.silent(*silent)
    linear = [path for path in trace.outputs if block.is_linear(path)]
    if block.is_norm(sublayer):
        read = trace.inputs.get(sublayer)
        return next((p for p in linear if read is not None and torch.equal(trace.outputs[p], read)), None)
    inside = [path for path in linear if f"{path}.".startswith(f"{sublayer}.")]
    return next((path for path in reversed(inside) if block.multiplier(path, end, silent) is not None), None)


def _nested(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _common(a: Family, b: Family) -> Family:
    """Return the family of blocks of two kinds; the last maps are left out where they differ."""
    same = replace(
        a,
        out=a.out if a.out == b.out else None,
        down=a.down if a.down == b.down else None,
        multiplier=b.multiplier if abs(a.multiplier - b.multiplier) < 1e-3 * abs(a.multiplier) else a.multiplier,
    )
    if same != replace(b, out=same.out, down=same.down):
        name = next(name for name in vars(a) if vars(same)[name] != vars(b)[name] and name not in ("out", "down"))
        raise NotDerivedError(f"its blocks are of different kinds: {name} is {vars(a)[name]} and {vars(b)[name]}")
    return same
