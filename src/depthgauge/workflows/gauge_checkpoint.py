"""A checkpoint gauged from end to end: what its weights say, what its heads do on text, what each layer is worth."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from depthgauge._format import number
from depthgauge.checkpoints import removal
from depthgauge.checkpoints.circuits import CircuitSizes, circuit_sizes, head_weights
from depthgauge.checkpoints.head_statistics import HeadWatch
from depthgauge.checkpoints.interface import AttentionCall, Session, attending
from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.load import (
    Checkpoint,
    Placement,
    Source,
    context_length,
    find,
    load_config,
    load_model,
    load_tokenizer,
)
from depthgauge.checkpoints.probe import probe
from depthgauge.checkpoints.registered_attention import LayerPlan, layer_plan
from depthgauge.checkpoints.removal import Removal, least_missed, remove_greedily
from depthgauge.checkpoints.scores import SublayerScores, angular_distance, block_influence
from depthgauge.checkpoints.what_if import available, chosen_kinds, cross_entropy, layers_of, objective, passes, what_if
from depthgauge.checkpoints.windows import Windows, read_windows
from depthgauge.errors import InputError, require_count, require_positive, require_seed
from depthgauge.measures.residuals import residual_sizes
from depthgauge.progress import Step, silent
from depthgauge.workflows.checkpoint_subject import ModelSubject
from depthgauge.workflows.partial import Partial, open_partial

TOKENS = 2048
"""The budget of tokens unless another is given."""


def quietly(sentence: str) -> None:
    """Say it to nobody."""


@dataclass(frozen=True)
class ModelOptions:
    """What only checkpoints can be asked.

    - `text`: a file; None: the built-in text. `window`: tokens of a window, 512 unless the model takes fewer
    - `what_if`: `default`, `all`, `none`, or kinds with commas between them
    - `depth`: remove layers while the loss grows by at most this; `max_removed` of them at most
    - `weights_only`: no text, only what the weights say
    - `out`, `resume`: where the result will go; what was found before an interruption lies beside it
    """

    text: str | Path | None = None
    window: int | None = None
    what_if: str = "default"
    depth: float | None = None
    max_removed: int | None = None
    weights_only: bool = False
    placement: Placement = field(default_factory=Placement)
    out: str | Path | None = None
    resume: bool = False
    say: Callable[[str], None] = quietly

    def check(self) -> None:
        """Raise for what makes no sense, before anything is read."""
        chosen_kinds(self.what_if)
        if self.depth is not None:
            require_positive("depth", self.depth, "by how much the loss may grow when layers are removed")
        if self.max_removed is not None:
            require_count("max-removed", self.max_removed, "how many layers may be removed at most")
            if self.depth is None:
                raise InputError("max-removed limits the removal of layers; say with --depth how much loss it may cost")


@dataclass(frozen=True)
class ModelSettings:
    """What the gauging of a checkpoint was asked to do; with the checkpoint and the text it reproduces the result.

    The names are those of the flags; None is a flag that was not given.
    """

    target: str
    text: str | None
    tokens: int | None
    window: int | None
    seed: int
    what_if: str
    depth: float | None
    max_removed: int | None
    dtype: str
    device: str | None
    device_map: str | None
    trust_remote_code: bool | None
    weights_only: bool | None

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        return dict(vars(self))


def gauge_checkpoint(
    target: str | Path, options: ModelOptions, *, tokens: int | None, seed: int | None, progress: Step = silent
) -> tuple[ModelSettings, ModelSubject]:
    """Gauge a directory or GGUF file; everything that can be refused is refused before the weights are read."""
    options.check()
    kinds = () if options.weights_only else chosen_kinds(options.what_if)
    tokens, seed = TOKENS if tokens is None else tokens, require_seed(0 if seed is None else seed)
    source = find(target)
    config = load_config(source, options.placement)
    windows = None
    if not options.weights_only:
        tokenizer = load_tokenizer(source, options.placement)
        windows = read_windows(
            tokenizer, options.text, tokens=tokens, window=options.window, context=context_length(config), seed=seed
        )
    settings = _settings(target, options, tokens, seed, kinds, windows)
    about = settings.to_json() | {"files": _files(source), "sha256": None if windows is None else windows.digest}
    partial = open_partial(options.out, options.resume, about)
    options.say(f"loading {source.path}")
    checkpoint = load_model(source, config, options.placement)
    work = _Work(checkpoint, settings, partial, progress, options.say)
    subject = work.weights_only() if windows is None else work.on_text(windows, kinds)
    return settings, subject


@dataclass
class _Work:
    """One gauging under way."""

    checkpoint: Checkpoint
    settings: ModelSettings
    partial: Partial
    progress: Step
    say: Callable[[str], None]
    cost_said: bool = False

    def weights_only(self) -> ModelSubject:
        """Without a word of text."""
        weights, notes = self._weights()
        return ModelSubject(self.checkpoint, self.settings.seed, weights, notes=notes)

    def on_text(self, windows: Windows, kinds: tuple[str, ...]) -> ModelSubject:
        """All of it."""
        checkpoint = self.checkpoint
        texts = [window[None] for window in windows.ids]
        cannot = probe(checkpoint, texts[0])
        possible = () if cannot else available(kinds, checkpoint.family)
        weights, notes = self._weights()
        if missing := [kind for kind in kinds if kind not in possible]:
            reason = cannot or f"the family {checkpoint.config.model_type!r} is not in the table of sublayers"
            notes.append(f"{' and '.join(missing)} what-ifs are missing: {reason}")
        if self.settings.depth is not None and cannot:
            raise InputError(f"layers of {checkpoint.name} cannot be removed: {cannot}; leave --depth out")
        with attending(checkpoint.model) as session:
            stack = Stack(checkpoint, session)
            for index, ids in enumerate(texts):
                self._window(stack, index, ids, possible, len(texts))
            measured = None
            if self.settings.depth is not None:
                measured = self._depth(stack, texts)
        found = [self.partial.windows[str(index)] for index in range(len(texts))]
        return ModelSubject(checkpoint, self.settings.seed, weights, windows, found, possible, measured, notes)

    def _weights(self) -> tuple[list[list[CircuitSizes]], list[str]]:
        """The circuits of every head, where the family says where they are."""
        if self.checkpoint.family is None:
            kind = self.checkpoint.config.model_type
            return [], [f"sizes of the weights are missing: the family {kind!r} is not in the table of projections"]
        stack = Stack(self.checkpoint, Session())
        sizes = []
        for layer, block in enumerate(stack.blocks):
            self.progress(layer, len(stack), f"weights of layer {layer}")
            sizes.append([circuit_sizes(head) for head in head_weights(self.checkpoint, block)])
        return sizes, []

    def _window(self, stack: Stack, index: int, ids: Int[Tensor, "1 n"], kinds: tuple[str, ...], windows: int) -> None:
        """One window: observe it, then every what-if, keeping each part as it is found."""
        L = self.checkpoint.layers
        wanted = [kind for kind in kinds if not self.partial.has(index, kind)]
        if self.partial.has(index, "observed") and not wanted:
            return
        started = time.perf_counter()
        base = stack.full(ids)
        if not self.cost_said:
            self._say_cost(time.perf_counter() - started, windows - index, ids.shape[1], kinds)
        lost, states = objective(self.checkpoint.objective, ids, base.output), base.states
        loss = cross_entropy(base.output, ids) if self.checkpoint.objective == "loss" else None
        del base  # the logits, the largest thing there is, are not needed any more
        if not self.partial.has(index, "observed"):
            self.progress(0, 1, f"heads, window {index}")
            self.partial.put(index, "observed", {"loss": loss, **self._observe(stack, ids, states, plans=index == 0)})
        total = sum(len(layers_of(kind, L)) for kind in wanted)
        done = 0
        for kind in wanted:
            losses = []
            for layer in layers_of(kind, L):
                self.progress(done, total, f"what if, window {index}, {kind} {layer}")
                losses.append(lost(what_if(stack, ids, states, kind, layer)))
                done += 1
            self.partial.put(index, kind, losses)

    def _observe(
        self, stack: Stack, ids: Int[Tensor, "1 n"], states: tuple[Tensor, ...], plans: bool
    ) -> dict[str, Any]:
        """Residuals, heads and cheap scores of one window, and if asked for the plans of fast attention, as JSON."""
        heads, family, fast = HeadWatch(), self.checkpoint.family, list[LayerPlan]()

        def watch(call: AttentionCall) -> Tensor:
            if plans:
                fast.append(layer_plan(call))
            return heads(call)

        sublayers = SublayerScores(stack.blocks, family) if family is not None and len(stack) else None
        if sublayers is None:
            stack.run(ids, watch=watch)
        else:
            with sublayers.listening():
                stack.run(ids, watch=watch)
        steps = list(pairwise(states))
        scores = {
            "block_influence": [block_influence(x, y) for x, y in steps],
            "angular_distance": [angular_distance(x, y) for x, y in steps],
        }
        if sublayers is not None:
            scores |= {"attention_cosine": sublayers.attention, "mlp_cosine": sublayers.mlp}
        return {
            "residuals": [
                {
                    center: {norm: [float(size.value), float(size.ratio)] for norm, size in sizes.items()}
                    for center, sizes in residual_sizes(state.float()).items()
                }
                for state in states
            ],
            "heads": [layer.to_json() for layer in heads.layers],
            "fast": [plan.to_json() for plan in fast],
            "scores": scores,
        }

    def _say_cost(self, seconds: float, windows: int, tokens: int, kinds: tuple[str, ...]) -> None:
        """How long the what-ifs and the removal will take, from what one pass took."""
        L, self.cost_said = self.checkpoint.layers, True
        count = 2 + sum(passes(kind, L) for kind in kinds)
        self.say(_cost("", count, seconds * windows, windows * tokens))
        if self.settings.depth is not None:
            most = self.settings.max_removed or L - 1
            further = removal.passes(L, min(most, L - 1), known=1 if "block" in kinds else 0)
            line = _cost("effective depth: at most ", further, seconds * windows, windows * tokens)
            self.say(f"{line}, fewer once the loss has grown by {number(self.settings.depth, 6)}")

    def _depth(self, stack: Stack, texts: list[Int[Tensor, "1 n"]]) -> removal.MeasuredDepth:
        """Greedy removal, every step kept as it is found."""
        increase = self.settings.depth
        assert increase is not None
        known = [Removal(step["layer"], tuple(step["losses"])) for step in self.partial.steps]
        if not known and all(self.partial.has(index, "block") for index in range(len(texts))):
            losses = [self.partial.get(index, "block") for index in range(len(texts))]
            known = [least_missed({layer: [window[layer] for window in losses] for layer in range(len(stack))})]
        tried = []
        for step in remove_greedily(stack, texts, increase, self.settings.max_removed, known, self.progress):
            tried.append(step)
            self.partial.steps = [{"layer": one.layer, "losses": list(one.losses)} for one in tried]
            self.partial.save()
        return removal.measured_depth(tried, len(stack), increase)


def _settings(
    target: str | Path, options: ModelOptions, tokens: int, seed: int, kinds: tuple[str, ...], windows: Windows | None
) -> ModelSettings:
    return ModelSettings(
        target=str(target),
        text=None if options.text is None else str(options.text),
        tokens=None if windows is None else tokens,
        window=None if windows is None else int(windows.ids.shape[1]),
        seed=seed,
        what_if=",".join(kinds) or "none",
        depth=options.depth,
        max_removed=options.max_removed,
        dtype=options.placement.dtype,
        device=options.placement.device,
        device_map=options.placement.device_map,
        trust_remote_code=options.placement.trust_remote_code or None,
        weights_only=options.weights_only or None,
    )


def _files(source: Source) -> list[list[Any]]:
    """Names and sizes of the weight files: enough to notice that another checkpoint lies there now."""
    paths = sorted(source.folder.glob("*.safetensors")) if source.gguf is None else [source.path]
    return [[path.name, path.stat().st_size] for path in paths]


def _cost(what: str, count: float, seconds_a_pass: float, tokens: int) -> str:
    """`about 5 minutes: 48 forward passes of 2,048 tokens`."""
    return f"{what}about {_duration(count * seconds_a_pass)}: {round(count)} forward passes of {tokens:,} tokens"


def _duration(seconds: float) -> str:
    for size, name in ((3600.0, "hour"), (60.0, "minute")):
        if seconds >= 1.5 * size:
            return f"{round(seconds / size)} {name}s"
    return f"{max(1, round(seconds))} seconds"
