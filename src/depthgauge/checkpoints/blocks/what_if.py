"""What-ifs: remove or simplify layers, or parts of them, and measure what the model loses.

All edited models advance together, block by block, so that the weights are read once, however many models there are.
The states of the dense model are kept on the GPU, in memory or on disk, whichever has room. The names of the what-ifs
are the keys of `results.labels.WHAT_IFS`.

- *Single experts.* The weights of all experts of a block are tensors with one entry per expert. An expert whose weights
  are 0 adds nothing. The router and its weights stay as they are, so that the other experts add what they added before.
- *Skip connections or MLPs switched off*, as in Dong et al. (2021): only the residual connection around attention is
  removed. LayerNorm and the residual connection around the MLP remain.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge.base.errors import OutputError
from depthgauge.base.format import size_text
from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.blocks.attention_calls import attending
from depthgauge.checkpoints.blocks.block_runner import BlockRunner, Stack, changed, hidden_in
from depthgauge.checkpoints.blocks.model_output import require_output, window_losses
from depthgauge.checkpoints.blocks.probe import derived
from depthgauge.checkpoints.inputs.windows import ENCODED, Inputs, Samples
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.weights.families import Family
from depthgauge.checkpoints.weights.load import BY_TARGETS, Checkpoint
from depthgauge.checkpoints.weights.stored_weights import free_memory
from depthgauge.results.labels import EXPERT
from depthgauge.theory.measures.quantities import residual_size

# --- The states of the dense model on many windows, and the objective of models that differ from it ------------------

STATES_SHARE = 0.35
"""The share of free memory that states may take, of the dense model, or of all edited models in a pass."""


def states_in_memory(state: Tensor) -> int:
    """Return how many states like this one fit into memory, while a block is applied to all of them.

    They are kept three times: before the block, as one tensor that it reads, and after it.
    """
    return max(1, int(STATES_SHARE * free_memory(state.device)) // max(1, 3 * state.numel() * state.itemsize))


@torch.no_grad()
def encoded(checkpoint: Checkpoint, inputs: Inputs) -> Inputs:
    """Return the inputs of an encoder–decoder model with the states of its encoder, if that is not what is shrunk.

    A model that needs more than the states, such as those of its router, keeps its inputs.
    """
    if checkpoint.stack != "decoder" or not isinstance(inputs, Samples):
        return inputs
    sources = Samples(inputs.sources)
    given = {name: value for name, value in inputs.inputs.items() if name != checkpoint.reads}
    states = [
        checkpoint.model.get_encoder()(
            **sources[row : row + 1].keywords(checkpoint.device, checkpoint.model.dtype)
        ).last_hidden_state.cpu()
        for row in range(len(sources))
    ]
    samples = Samples({**given, ENCODED: torch.cat(states)}, inputs.targets)
    try:
        require_output(checkpoint, samples)
    except CheckpointError:
        return inputs
    return samples


class DenseStates:
    """Windows `inputs`, and the dense model's states X_0 … X_L on them; `at` returns one of them.

    With `all_layers=False`, only the first and the last are kept. `runner` has the blocks of the model.
    """

    def __init__(
        self, runner: BlockRunner, inputs: Inputs, *, all_layers: bool = True, progress: Step = silent
    ) -> None:
        self.runner, self.layers, self.inputs = runner, len(runner), inputs
        first = runner.embed(inputs)
        self._kept = list(range(self.layers + 1)) if all_layers else [0, self.layers]
        self._room = self._memory(first, len(self._kept), runner.device)
        self._room[0].copy_(first)
        current = self._room[0]
        for layer in range(self.layers):
            progress(layer, self.layers, f"dense model, layer {layer}")
            place = self._room[layer + 1 if all_layers else 1]
            place.copy_(runner.through([layer], current, inputs))
            current = place

    def at(self, layer: int) -> Float[Tensor, "windows n d"]:
        """Return X_ℓ."""
        return self._room[self._kept.index(layer)]

    @property
    def final(self) -> Float[Tensor, "windows n d"]:
        """X_L, the states after the last block."""
        return self._room[-1]

    def _memory(self, state: Tensor, count: int, device: torch.device) -> Tensor:
        """Return memory for `count` states: on the GPU, in main memory, or in a temporary file."""
        shape, needed = (count, *state.shape), count * state.numel() * state.itemsize
        for place in (*([device] if device.type == "cuda" else []), torch.device("cpu")):
            if needed < STATES_SHARE * free_memory(place):
                return torch.empty(shape, dtype=state.dtype, device=place)
        # The mapped file has no name any more when the folder is deleted; its space is freed with the tensor.
        with tempfile.TemporaryDirectory(prefix="depthgauge-", ignore_cleanup_errors=True) as folder:
            path = Path(folder) / "states"
            _reserve(path, needed)
            flat = torch.from_file(str(path), shared=True, size=count * state.numel(), dtype=state.dtype)
        return flat.reshape(shape)


def _reserve(path: Path, needed: int) -> None:
    """Create a file that has its space on the disk: a write to the mapping of one that has not ends the process."""
    try:
        with open(path, "wb") as handle:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(handle.fileno(), 0, needed)
    except OSError as error:
        raise OutputError(
            f"cannot keep the states of the model in {tempfile.gettempdir()}: they need {size_text(needed)}, "
            f"{error.strerror or error}; set TMPDIR to a folder with more space"
        ) from error


class Objective:
    """The objective on fixed windows, one number per window; smaller is better. See `window_losses`.

    `inputs` are the windows, and `dense` has X_L, the states of the dense model after its last block.
    """

    def __init__(self, runner: BlockRunner, inputs: Inputs, dense: Float[Tensor, "windows n d"]) -> None:
        self.runner, self.inputs, self.dense = runner, inputs, dense

    @torch.no_grad()
    def __call__(self, states: Float[Tensor, "windows n d"], windows: slice = slice(None)) -> Float[Tensor, " windows"]:
        """Return the objective of every window, given the states after the last block on these windows."""
        return self.each([states], windows)[0]

    @torch.no_grad()
    def each(
        self, several: Sequence[Float[Tensor, "windows n d"]], windows: slice = slice(None)
    ) -> Float[Tensor, "several windows"]:
        """Return the objective of every window for each of several states after the last block."""
        runner, all_inputs, all_dense = self.runner, self.inputs[windows], self.dense[windows]

        objective = runner.checkpoint.objective

        def measure(these: slice) -> Tensor:
            inputs, reference, made = all_inputs[these], None, list[Tensor]()
            if objective not in BY_TARGETS:  # outputs are compared with those of the dense model
                reference = runner.output(runner.on_device(all_dense[these]), inputs)
            for states in several:
                output = runner.output(runner.on_device(states[these]), inputs)
                made.append(window_losses(objective, output, inputs, output if reference is None else reference).cpu())
            return torch.stack(made, dim=1)

        losses = runner.batches.map(measure, len(all_dense))
        return (torch.cat(losses) if losses else torch.empty(0, len(several))).T


# --- Single experts ---------------------------------------------------------------------------------------------------


def expert_weights(mlp: nn.Module) -> list[nn.Parameter]:
    """Return the weights of an MLP whose first index is the expert; none if it is not a mixture of experts.

    They are tensors with three dimensions, and the biases beside them. Those of a convolution are not.
    """
    mixed: list[nn.Parameter] = []
    for module in mlp.modules():
        own = [] if isinstance(module, nn.modules.conv._ConvNd) else list(module.parameters(recurse=False))
        experts = {len(weight) for weight in own if weight.dim() == 3}
        mixed += [weight for weight in own if weight.dim() > 1 and len(weight) in experts]
    is_one_mixture = len({len(weight) for weight in mixed}) == 1 and not any(weight.is_meta for weight in mixed)
    return mixed if is_one_mixture else []


def expert_layers(blocks: Sequence[nn.Module], families: Sequence[Family | None]) -> list[int]:
    """Return every layer as often as its MLP has experts: [0, 0, 1, 1] for two layers with two experts each."""
    return [
        layer
        for layer, (block, family) in enumerate(zip(blocks, families, strict=True))
        if family is not None and family.mlp is not None
        for weight in expert_weights(block.get_submodule(family.mlp))[:1]
        for _ in range(len(weight))
    ]


@contextmanager
def without_expert(weights: Sequence[nn.Parameter], expert: int) -> Iterator[None]:
    """Set the weights of one expert to 0 within this context."""
    parts = [weight.data[expert] for weight in weights]
    kept = [part.clone() for part in parts]
    try:
        for part in parts:
            part.zero_()
        yield
    finally:
        for part, value in zip(parts, kept, strict=True):
            part.copy_(value)


class ExpertWhatIfs:
    """Windows without single experts; `shares` has, for every layer and expert, the share of tokens in each window.

    A token is routed to an expert if the output of the MLP at the token changes without it. Where two passes of the
    intact block differ, because the device adds in another order, only larger changes count.
    """

    def __init__(self, runner: BlockRunner) -> None:
        self.runner, self.shares = runner, dict[tuple[int, int], list[float]]()
        self._intact: tuple[int, Tensor, Tensor] | None = None  # the last layer, its output, and what is rounding

    def without(
        self, layer: int, expert: int, states: Float[Tensor, "windows n d"], inputs: Inputs
    ) -> Float[Tensor, "windows n d"]:
        """Return the states after a layer without an expert; `states` are X_ℓ of the dense model on the windows."""
        family = self.runner.checkpoint.families[layer]
        assert family is not None
        mlp = self.runner.blocks[layer].get_submodule(str(family.mlp))
        if self._intact is None or self._intact[0] != layer:
            (_, again), (_, intact) = (self._applied(layer, mlp, states, inputs) for _ in range(2))
            self._intact = layer, intact, 4 * (intact - again).abs().max()
        with without_expert(expert_weights(mlp), expert):
            made, output = self._applied(layer, mlp, states, inputs)
        _, intact, rounding = self._intact
        change = (output - intact).abs().amax(dim=-1) > rounding
        self.shares[layer, expert] = change.reshape(len(states), -1).double().mean(dim=1).tolist()
        return made

    def _applied(
        self, layer: int, mlp: nn.Module, states: Float[Tensor, "windows n d"], inputs: Inputs
    ) -> tuple[Float[Tensor, "windows n d"], Float[Tensor, "tokens d"]]:
        """Return the states after a layer, and the output of its MLP, one row per token."""
        outputs: list[Tensor] = []

        def keep(output: Tensor) -> Tensor:
            outputs.append(output.reshape(-1, output.shape[-1]).clone())
            return output

        with changed(mlp, keep):
            made = self.runner.through([layer], states, inputs)
        return made, torch.cat(outputs)


# --- What-ifs: remove or simplify layers, or parts of them, and measure what the model loses -------------------------


class Edit(NamedTuple):
    """A change of one layer ℓ.

    - `layer`: ℓ
    - `kind`: the what-if:
        - `block`: X_{ℓ+1} = X_ℓ
        - `attention`, `mlp`: the sublayer adds nothing to the residual stream
        - `uniform`: every score of the layer's attention is 0
        - `expert`: an expert of the MLP adds nothing
        - `parallel`: X_{ℓ+2} = X_ℓ + (B_ℓ(X_ℓ) − X_ℓ) + (B_{ℓ+1}(X_ℓ) − X_ℓ), where B_ℓ is block ℓ; it is not combined
          with other edits
    - `expert`: the index of the expert
    """

    layer: int
    kind: str
    expert: int = 0


Edits = tuple[Edit, ...]
"""The edits of one model, at most one for a layer, in the order of the layers."""


def layers_of(kind: str, families: Sequence[Family | None], observable: bool = True) -> list[int]:
    """Return the layers on which a what-if can be measured, given the families of the blocks, declared or derived.

    `attention` and `mlp` need a block with both sublayers: a block with one of them is measured by `block`. `uniform`
    needs `observable` attention, and `parallel` excludes the last layer, which has no successor.
    """
    if kind in ("attention", "mlp"):
        return [layer for layer, family in enumerate(families) if family and family.attention and family.mlp]
    if kind == "uniform" and not observable:
        return []
    return list(range(len(families) - (kind == "parallel")))


def edited_losses(
    objective: Objective,
    dense: DenseStates,
    models: Sequence[Edits],
    windows: slice = slice(None),
    *,
    experts: ExpertWhatIfs | None = None,
    progress: Step = silent,
    label: str = "",
) -> Iterator[dict[Edits, Float[Tensor, " windows"]]]:
    """Yield the objective of edited models on some windows, for as many models at a time as fit into memory.

    `experts` is needed for the what-if `expert`. `progress` is called at every block, with `label` and the block.
    """
    ordered, count = sorted(models), states_in_memory(dense.final[windows])
    for start in range(0, len(ordered), count):
        some = ordered[start : start + count]
        states = edited_states(dense, some, windows, experts=experts, progress=progress, label=label)
        yield dict(zip(some, objective.each([states[edits] for edits in some], windows), strict=True))


@torch.no_grad()
def edited_states(
    dense: DenseStates,
    models: Sequence[Edits],
    windows: slice = slice(None),
    *,
    experts: ExpertWhatIfs | None = None,
    progress: Step = silent,
    label: str = "",
) -> dict[Edits, Float[Tensor, "windows n d"]]:
    """Return the states after the last block of edited models, on windows of this process; see `edited_losses`.

    Every block is applied once, to the states of all models that do not change it, and then with the changes of the
    others. Models that agree on the edits so far share their states; before the first edit these are the dense states.
    """
    runner, layers, inputs = dense.runner, dense.layers, dense.inputs[windows]
    states: dict[Edits, Tensor] = {}
    runner.session.begin()
    first = min((edits[0].layer for edits in models if edits), default=layers)
    for layer in range(first, layers):
        progress(layer - first, layers - first, f"{label}, block {layer}")
        states[()] = dense.at(layer)[windows]
        until = {edits: tuple(edit for edit in edits if edit.layer <= layer) for edits in models}
        reached = {now for now in until.values() if now}
        kept = sorted(now for now in reached if now[-1].layer < layer)
        with runner.checkpoint.resident(layer):
            after = dict(zip(kept, _advanced(runner, layer, [states[now] for now in kept], inputs), strict=True))
            for now in sorted(reached.difference(kept)):
                after[now] = _applied(runner, now[-1], states[now[:-1]], inputs, experts)
        for now in kept:
            if now[-1] == (layer - 1, "parallel", 0):
                after[now] += (states[()] - dense.at(layer - 1)[windows]).to(after[now].device)
        states = after
    states[()] = dense.final[windows]
    return {edits: states[edits] for edits in models}


def _advanced(
    runner: BlockRunner, layer: int, several: Sequence[Float[Tensor, "windows n d"]], inputs: Inputs
) -> Sequence[Float[Tensor, "windows n d"]]:
    """Apply a block to several states on the same windows."""
    if not several:
        return []
    together = torch.cat([*several])
    rows = inputs[torch.arange(len(inputs)).repeat(len(several))] if runner.needs_inputs else None
    return torch.chunk(runner.through([layer], together, rows), len(several))


def _applied(
    runner: BlockRunner,
    edit: Edit,
    states: Float[Tensor, "windows n d"],
    inputs: Inputs,
    experts: ExpertWhatIfs | None,
) -> Float[Tensor, "windows n d"]:
    """Return the states after the layer that an edit changes."""
    if edit.kind in ("block", "parallel"):
        return states
    if edit.kind == EXPERT:
        assert experts is not None
        return experts.without(edit.layer, edit.expert, states, inputs)
    if edit.kind == "uniform":
        runner.session.begin(uniform=edit.layer)
        found = runner.through([edit.layer], states, inputs)
        runner.session.begin()
        return found
    sublayer = runner.blocks[edit.layer].get_submodule(getattr(runner.checkpoint.families[edit.layer], edit.kind))
    with runner.silenced(sublayer):
        return runner.through([edit.layer], states, inputs)


# --- Skip connections or MLPs switched off ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """Which parts of every block are on, in addition to attention."""

    skip: bool
    mlp: bool


VARIANTS: Mapping[str, Variant] = {
    "attention only": Variant(skip=False, mlp=False),
    "+ MLP": Variant(skip=False, mlp=True),
    "+ skip": Variant(skip=True, mlp=False),
    "full": Variant(skip=True, mlp=True),
}


@torch.no_grad()
def residual_by_depth(
    checkpoint: Checkpoint, samples: Int[Tensor, "samples n"], variant: Variant
) -> Float[Tensor, "samples states"]:
    """Compute ‖X_ℓ − 1x̄ᵀ‖/‖X_ℓ‖ for ℓ = 0 … L and every sample, in the composite norm, with x̄ the mean token."""
    checkpoint = derived(checkpoint, samples)
    if not all(family and family.attention and not family.between for family in checkpoint.families):
        raise CheckpointError(
            f"parts of {checkpoint.name} cannot be switched off: "
            + (checkpoint.underived or "some of its blocks do not mix tokens, or have more than two sublayers")
        )
    with attending(checkpoint.model) as session:
        stack = Stack(checkpoint, session)
        with switched(stack, variant):
            curves = []
            for ids in samples:
                states = stack.full(ids[None]).states
                curves.append(torch.cat([residual_size(state, "composite", "mean").ratio for state in states]))
    return torch.stack(curves).cpu()


@contextmanager
def switched(stack: Stack, variant: Variant) -> Iterator[None]:
    """Run every block as `variant` within this context."""
    with ExitStack() as hooks:
        for block, family in zip(stack.blocks, stack.checkpoint.families, strict=True):
            assert family is not None
            if not variant.mlp and family.mlp is not None:
                hooks.enter_context(changed(block.get_submodule(family.mlp), torch.zeros_like))
            if not variant.skip:
                hooks.enter_context(_without_skip(block, family))
        yield


@contextmanager
def _without_skip(block: nn.Module, family: Family) -> Iterator[None]:
    """Make attention return a − x/m, so that the block computes x + m(a − x/m) = ma, with the residual multiplier m."""
    read: list[Tensor] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        read[:] = [hidden_in(args, kwargs)]

    def less_input(added: Tensor) -> Tensor:
        return added - read[0].to(added.device) / family.multiplier

    assert family.attention is not None
    added_only = changed(block.get_submodule(family.attention), less_input)
    with block.register_forward_pre_hook(before, with_kwargs=True), added_only:
        yield
