"""Find out what a model is by running it on a few tokens.

`probe` tells, before a long computation, whether attention can be observed exactly and whether blocks can be run alone.
`derived` finds the structure of the blocks and verifies it numerically.

One block is called with the arguments that the model passes to it, on a few tokens, and every submodule is observed.

- A *writer* is a submodule whose output is added to the residual stream: if δ is added to its output, the block's
  output changes by m·δ, with a number m (the residual multiplier of Granite; 1 in most families).
- The sublayers are the fewest outermost writers without which the block is the identity: one (Mamba), two, or three in
  a decoder that reads the states of an encoder (T5). Where the block ends with a norm (BERT), the inputs of the norms
  after its sublayers take the place of the block's output.
- The attention is the first whose output at the last token depends on other tokens; it may be a convolution or a state
  space. Attention to the states of an encoder does not depend on them.
- The last map of a sublayer is the linear map inside it that is a writer, or whose output the norm of the sublayer
  reads.

What is found on one block of each kind is verified on all blocks of the kind. Submodules are only named in the result.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.format import counted, number
from depthgauge.checkpoints.blocks.attention_calls import Session, attending
from depthgauge.checkpoints.blocks.block_runner import (
    BlockRunner,
    Change,
    Stack,
    changed,
    hidden_in,
    hidden_out,
    unusual_states,
)
from depthgauge.checkpoints.blocks.model_output import require_output
from depthgauge.checkpoints.inputs.windows import Inputs, few_windows, shortened
from depthgauge.checkpoints.source.library import CheckpointError, quiet, short
from depthgauge.checkpoints.weights.families import Family, Sublayer
from depthgauge.checkpoints.weights.load import Checkpoint, blocks_of, with_stack
from depthgauge.results.gauge_record import BOTH

TOKENS = 12
"""Number of tokens on which a block is observed."""


LARGER = 8.0
"""Size of δ relative to the states of its token."""


MOST = 3
"""Largest number of sublayers of a block."""


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
        self._silent: dict[tuple[str, ...], Trace] = {}
        intact = self.silent()
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
        """Call the block with these submodules returning zeros. The search asks for the same ones again and again."""
        if paths not in self._silent:
            self._silent[paths] = self.trace(dict.fromkeys(paths, torch.zeros_like))
        return self._silent[paths]

    def multiplier(self, path: str, at: str | None = None, silent: Sequence[str] = ()) -> float | None:
        """Return m such that δ added to the output of a submodule adds m·δ to the block's output, or None.

        `at` names a submodule whose input takes the place of the block's output; `silent` modules return zeros.
        """
        zeros: dict[str, Change] = dict.fromkeys(silent, torch.zeros_like)
        before = self.silent(*silent)
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


def derived(checkpoint: Checkpoint, inputs: Inputs) -> Checkpoint:
    """Return a checkpoint with the families of its blocks: the declared ones, or those that are derived from the model.

    A block whose family cannot be derived and verified has none, and `Checkpoint.underived` says why.
    """
    if None not in checkpoint.families:
        return checkpoint
    families, reasons = derive_families(checkpoint, inputs)
    return replace(checkpoint, families=families, underived=next(iter(reasons), ""))


@torch.no_grad()
def derive_families(checkpoint: Checkpoint, inputs: Inputs) -> tuple[tuple[Family | None, ...], list[str]]:
    """Derive the family of every block and verify it, on a few of the given tokens.

    Returns:
        The families, None where a check failed or could not be made, and the reasons why.
    """
    if checkpoint.stack == BOTH:
        each = [derive_families(with_stack(checkpoint, name), inputs) for name in checkpoint.roots]
        return tuple(one for families, _ in each for one in families), [one for _, reasons in each for one in reasons]
    made: list[Family | None] = []
    found: dict[tuple[tuple[str, str], ...], Family] = {}
    reasons: list[str] = []
    try:
        with _named_failures():
            runner, states = traced_runner(checkpoint, few_windows(inputs, TOKENS))
    except NotDerivedError as reason:
        return (None,) * checkpoint.layers, [str(reason)]
    for layer, module in enumerate(runner.blocks):
        kind = kind_of(module)
        try:
            with _named_failures():
                block = TracedBlock(runner, layer, states[layer][:1])
                if kind not in found:
                    found[kind] = derive_block(block)
                verify_block(block, found[kind])
            made.append(found[kind])
        except NotDerivedError as reason:
            made.append(None)
            reasons.append(str(reason))
    return tuple(made), reasons


def kind_of(block: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the paths and types of the submodules of a block; blocks with equal ones are of one kind."""
    return tuple((path, type(module).__name__) for path, module in block.named_modules())


@contextmanager
def _named_failures() -> Iterator[None]:
    """Raise `NotDerivedError` for the errors of blocks that are called in ways that their authors did not expect."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise NotDerivedError(f"its blocks cannot be called one by one: {short(error)}") from error


@torch.no_grad()
def traced_runner(checkpoint: Checkpoint, inputs: Inputs) -> tuple[BlockRunner, tuple[Tensor, ...]]:
    """Return the blocks and their inputs X_0 … X_L; raise unless the blocks one by one give the model's output."""
    if not blocks_of(checkpoint):
        raise NotDerivedError(f"it has no list of {checkpoint.layers} blocks")
    runner = BlockRunner(checkpoint, inputs[:1])
    base = runner.full(inputs)
    if (reason := unusual_states(base.states, inputs)) is not None:
        raise NotDerivedError(reason)
    state = base.states[0]
    for layer in range(len(runner)):
        state = runner.block(layer, state, inputs)
    output = runner.output(state, inputs)
    off = float((output - base.output).double().norm() / base.output.double().norm())
    if not off <= 100 * torch.finfo(output.dtype).eps ** 0.75:
        raise NotDerivedError(
            f"its blocks applied one by one do not give its output (relative difference {number(off, 2)})"
        )
    return runner, base.states


def derive_block(block: TracedBlock) -> Family:
    """Derive the family of one block; its sublayers are as few as possible."""
    intact = block.silent()
    last = next((p for p, out in intact.outputs.items() if block.is_norm(p) and torch.equal(out, intact.output)), None)
    for count in range(1 if last is None else 2, MOST + 1):
        if (found := _find(block, count, (), (last,))) is not None:
            return _family(block, *found)
    raise NotDerivedError(
        f"block {block.layer} ({type(block.block).__name__}) is not the identity, or a norm, without at most {MOST} "
        "submodules whose outputs it adds to its input"
    )


def _find(
    block: TracedBlock, count: int, later: tuple[str, ...], ends: tuple[str | None, ...]
) -> tuple[tuple[str, ...], tuple[str | None, ...]] | None:
    """Return `count` sublayers and those in `later`, which follow them, and the norms after all of them; None if none.

    `ends` starts with the norm that reads the stream after the sublayer to be found; None is the block's output.
    """
    for path in block.writers(ends[0], later):
        if any(_nested(path, other) for other in later):
            continue
        if count == 1:
            if _is_identity(block, (path, *later), ends[0]):
                return (path, *later), ends
            continue
        before = None
        if ends[0] is not None:
            quiet = block.silent(path, *later)
            made = ((p, out) for p, out in quiet.outputs.items() if block.is_norm(p) and p not in ends)
            before = next((p for p, out in made if torch.equal(out, quiet.inputs[ends[0]])), None)
            if before is None:
                continue
        if (found := _find(block, count - 1, (path, *later), (before, *ends))) is not None:
            return found
    return None


def verify_block(block: TracedBlock, family: Family) -> None:
    """Raise unless a block is the identity without its sublayers and affine in its last maps, as its family says."""
    is_post = family.order == "post"
    ends = [part.norm if is_post else None for part in family.parts]
    where, names = f"block {block.layer} ({type(block.block).__name__})", " and ".join(family.sublayers)
    if not _is_identity(block, family.sublayers, ends[0]):
        raise NotDerivedError(f"{where} without {names} is not the identity")
    silent = block.silent(*family.sublayers)
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        read = silent.output if following is None else silent.inputs[following]
        if end is not None and not torch.equal(silent.outputs[end], read):
            raise NotDerivedError(f"{where} without {names} is not {' of '.join(map(str, reversed(ends)))}")
    for place, (part, end) in enumerate(zip(family.parts, ends, strict=True)):
        paths = [part.path] if part.last is None or block.is_norm(part.path) else [part.path, part.last]
        for path in dict.fromkeys(paths):
            m = block.multiplier(path, end, family.sublayers[place + 1 :])
            if m is None or abs(m - family.multiplier) > 10 * block.tolerance * abs(family.multiplier):
                raise NotDerivedError(f"the output of {where} is not affine in the output of {path}")


def _is_identity(block: TracedBlock, sublayers: Sequence[str], first: str | None) -> bool:
    """Return whether a block without its sublayers is the identity, up to `first`, the norm after attention."""
    silent = block.silent(*sublayers)
    stream = silent.output if first is None else silent.inputs.get(first)
    return stream is not None and block.equal(stream, block.x)


def _mixing(block: TracedBlock, sublayers: Sequence[str]) -> dict[str, float]:
    """Return by how much the output of each sublayer at the last token changes with the other tokens."""
    other = block.x.clone()
    other[:, :-1] = -block.x[:, :-1].flip(1)
    traces = block.silent(*sublayers), block.trace(dict.fromkeys(sublayers, torch.zeros_like), other)
    changes = {}
    for path in sublayers:
        before, after = (one.outputs[path][:, -1].double() for one in traces)
        changes[path] = float((after - before).norm() / before.norm().clamp(min=1e-30))
    return changes


def _family(block: TracedBlock, found: tuple[str, ...], ends: tuple[str | None, ...]) -> Family:
    """Return the family of a block with these sublayers; `ends` are the norms after them in a `post` block."""
    mixing = [path for path, change in _mixing(block, found).items() if change > block.tolerance]
    if len(found) > 1 and not mixing:
        raise NotDerivedError(f"none of {', '.join(found)} of block {block.layer} mixes tokens")
    paths = sorted(found, key=lambda path: path not in mixing[:1])  # the attention first
    intact, parts, multipliers, reads = block.silent().outputs, list[Sublayer](), list[float | None](), len(found) == 1
    for place, (path, end) in enumerate(zip(paths, ends, strict=True)):
        later = paths[place + 1 :]
        if not torch.equal(intact[path], block.silent(*later).outputs[path]):
            raise NotDerivedError(f"in block {block.layer}, {' or '.join(later)} comes before {path}, which reads it")
        reads = reads or not torch.equal(intact[path], block.silent(*paths[:place]).outputs[path])
        multipliers.append(block.multiplier(path, end, later))
        norm = end if end is not None else path if block.is_norm(path) else None
        parts.append(Sublayer(path, _last_map(block, path, end, later), norm))
    m = multipliers[-1]
    if m is None or any(one is None or abs(one - m) > 10 * block.tolerance * abs(m) for one in multipliers):
        raise NotDerivedError(f"block {block.layer} multiplies {' and '.join(paths)} by different numbers")
    none = Sublayer("", None)
    first = parts[0] if mixing else none
    final = none if mixing and len(parts) == 1 else parts[-1]
    return Family(
        attention=first.path or None,
        mlp=final.path or None,
        out=first.last,
        down=final.last,
        between=tuple(parts[1:-1]),
        order="post" if ends[0] is not None else "pre" if reads else "parallel",
        multiplier=m,
        attention_norm=first.norm,
        mlp_norm=final.norm,
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


# --- A quick check before a long computation: can attention be observed exactly, and can blocks be rerun? ------------

PROBE_TOKENS = 32
"""Number of tokens used."""


@dataclass(frozen=True)
class Probed:
    """What cannot be measured of a checkpoint, and why; None means that it can.

    - `attention`: why the attention weights cannot be observed
    - `blocks`: why blocks cannot be rerun
    """

    attention: str | None
    blocks: str | None


def probe(checkpoint: Checkpoint, inputs: Inputs) -> Probed:
    """Check whether the attention of a checkpoint can be observed and its blocks rerun, on a few tokens.

    The output with observed attention is compared with the output of stock eager attention. An architecture that
    bypasses transformers' attention interface, or passes an unknown argument to it, is thereby detected. Its blocks are
    then rerun with its own attention.

    Raises:
        CheckpointError: neither is possible.
    """
    inputs, model, name = shortened(inputs, PROBE_TOKENS), checkpoint.model, type(checkpoint.model).__name__
    if not checkpoint.heads:
        attention: str | None = f"{name} has no attention heads"
    else:
        own = model.config._attn_implementation
        try:
            with quiet():
                model.set_attn_implementation("eager")
                require_output(checkpoint, inputs)  # eager attention may fail where the model's own does not
                stock = Stack(checkpoint, Session()).run(inputs)
                model.set_attn_implementation(own)
        except ValueError as error:  # a part of the model does not have the implementation that the whole has
            raise CheckpointError(f"the attention of a {name} cannot be exchanged: {short(error)}") from error
        with attending(model) as session:
            stack = Stack(checkpoint, session)
            attention = _unobserved(stack, inputs, stock)
            if attention is None:
                return Probed(None, _not_rerun(stack, inputs))
    found = Probed(attention, _not_rerun(Stack(checkpoint, Session()), inputs))
    if found.blocks is not None:
        raise CheckpointError(
            f"{name} cannot be gauged: its attention weights are not observable ({attention}), and its blocks "
            f"cannot be rerun ({found.blocks})"
            + ("; use --data none" if checkpoint.family and checkpoint.family.projections else "")
        )
    return found


def _unobserved(stack: Stack, inputs: Inputs, stock: Tensor) -> str | None:
    """Return why observed attention differs from that of the model, whose output is `stock`, or None."""
    checkpoint, session = stack.checkpoint, stack.session
    name, layers = type(checkpoint.model).__name__, checkpoint.layers
    off = relative_difference(stack.run(inputs), stock)
    if checkpoint.stack is not None and session.calls != layers:
        return f"both stacks of a {name} call the attention interface, and their calls are not told apart"
    if session.calls < layers:
        return (
            f"{name} bypasses transformers' attention interface: {session.calls} of its {counted(layers, 'layer')} "
            "call it"
        )
    if session.calls > layers or off > rounding_tolerance(stock.dtype):
        return (
            f"{name} uses another form of attention: expected {layers} attention calls that reproduce the stock "
            f"output, got {session.calls} calls and a relative error of {number(off, 1)}"
        )
    return None


@torch.no_grad()
def _not_rerun(stack: Stack, inputs: Inputs) -> str | None:
    """Return why blocks cannot be rerun from a state in the middle, or None."""
    if not len(stack):
        return "its blocks are not kept in one list"
    outputs: dict[int, Tensor] = {}

    def keeping(layer: int) -> Change:
        return lambda out: outputs.setdefault(layer, out)

    try:
        with ExitStack() as hooks:
            for layer, block in enumerate(stack.blocks):
                hooks.enter_context(changed(block, keeping(layer)))
            intact, middle = stack.full(inputs), len(stack) // 2
        if (reason := unusual_states(intact.states, inputs)) is not None:
            return reason
        for layer, state in enumerate(intact.states[1:-1]):  # RWKV halves the states after some blocks
            if relative_difference(state, outputs[layer].to(state.device)) > rounding_tolerance(state.dtype):
                return f"the model changes the states between the blocks {layer} and {layer + 1}"
        runner = BlockRunner(stack.checkpoint, inputs, stack.session)
        others = few_windows(inputs, intact.states[0].shape[1])[0 if stack.checkpoint.batched else 1 :]
        intact = runner.full(others)
        again = runner.output(runner.through(range(middle, len(stack)), intact.states[middle], others), others)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # as with Reformer
        return f"its blocks do not return hidden states alone: {short(error)}"
    if relative_difference(again, intact.output) > rounding_tolerance(again.dtype):
        return "its blocks need other inputs than the hidden states before them"
    return None


def relative_difference(a: Tensor, b: Tensor) -> float:
    """Return max|a − b| / max|b|."""
    return float((a.float() - b.float()).abs().amax() / b.float().abs().amax().clamp(min=1e-30))


def rounding_tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding can cause over many layers."""
    return 1000 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** (1 if dtype.itemsize > 2 else 0.8)
