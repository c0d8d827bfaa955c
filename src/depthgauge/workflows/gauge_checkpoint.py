"""Gauge a checkpoint: what its weights show, what its heads do on text, and what the model loses without each layer."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge._format import duration, number
from depthgauge._journal import Journal
from depthgauge.checkpoints import removal
from depthgauge.checkpoints.circuits import CircuitSizes, circuit_sizes, head_weights
from depthgauge.checkpoints.families import family_of
from depthgauge.checkpoints.head_statistics import HeadWatch
from depthgauge.checkpoints.interface import AttentionCall, Session, attending
from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import (
    Checkpoint,
    Placement,
    context_length,
    load_config,
    load_model,
    load_tokenizer,
    refuse_infinite,
    wrap,
)
from depthgauge.checkpoints.probe import probe
from depthgauge.checkpoints.registered_attention import LayerPlan, layer_plan
from depthgauge.checkpoints.removal import Removal, least_missed, remove_greedily
from depthgauge.checkpoints.scores import SublayerScores, angular_distance, block_influence
from depthgauge.checkpoints.source import Source, find, weight_files
from depthgauge.checkpoints.start_token import Start, measure_start, plan_start
from depthgauge.checkpoints.text_files import find_text
from depthgauge.checkpoints.what_if import (
    available,
    chosen_kinds,
    cross_entropy,
    layers_of,
    objective,
    passes,
    what_if,
)
from depthgauge.checkpoints.windows import Windows, read_windows, require_rows
from depthgauge.errors import InputError, require_count, require_positive, require_seed
from depthgauge.measures.residuals import residual_sizes
from depthgauge.monitor.undisturbed import undisturbed
from depthgauge.progress import Step
from depthgauge.results.checkpoint_subject import CheckpointSubject
from depthgauge.results.gauge_options import GaugeOptions, GaugeSettings
from depthgauge.surgery.stored_weights import weights_digest
from depthgauge.workflows.checkpoint_records import Findings, subject_record
from depthgauge.workflows.shrink_subject import ABOUT_FILES
from depthgauge.workflows.target import Target

TOKENS = 2048
"""The default number of text tokens."""


def gauge_checkpoint(
    target: Target,
    options: GaugeOptions,
    tokenizer: Any,
    journal: Journal,
    progress: Step,
    message: Callable[[str], None],
) -> tuple[GaugeSettings, CheckpointSubject]:
    """Gauge a directory, a GGUF file or a model in memory. Every option and file is checked before weights are read.

    Args:
        target: a checkpoint.
        options: what to measure, and on which text.
        tokenizer: the tokenizer of a model in memory.
        journal: keeps every finished step; the steps of an interrupted run are not measured again.
        progress: called as the work advances.
        message: called with sentences such as the expected duration.

    Returns:
        The options with their defaults filled in, and the subject.
    """
    check_options(options)
    placement = _placement(options)
    kinds = () if options.weights_only else chosen_kinds(options.what_if or "default")
    tokens, seed = options.tokens or TOKENS, require_seed(options.seed or 0)
    source = None
    if target.model is None:
        assert target.path is not None
        source = find(target.path, bool(options.allow_pickle))
        config = load_config(source, placement)
    else:
        _refuse_options_about_files(options)
        config = target.model.config
    windows = None
    if options.weights_only:
        if family_of(config) is None:
            raise CheckpointError(
                f"--weights-only cannot be used for {target.name}: depthgauge does not know where a "
                f"{config.model_type} model keeps its weights; gauge it on text"
            )
    else:
        tokenizer = tokenizer if source is None else load_tokenizer(source, placement)
        if tokenizer is None:
            raise InputError("a model in memory needs its tokenizer; give tokenizer=…, or weights_only=True")
        start = plan_start(options.bos or "auto", source, tokenizer)
        windows = read_windows(
            tokenizer,
            find_text(options.text, bool(options.as_is)),
            tokens=tokens,
            window=options.window,
            context=context_length(config),
            seed=seed,
            special=(start.before, start.after),
        )
    settings = _settings(target, options, seed, kinds, windows)
    files = weights_digest(target.model) if source is None else _files(source)
    journal.begin(settings.to_json() | {"files": files, "sha256": None if windows is None else windows.digest})
    with nullcontext() if target.model is None else undisturbed(target.model):
        if source is None:
            checkpoint = wrap(target.model, str(target.name))
            refuse_infinite(target.model, checkpoint.name)
        else:
            message(f"loading {source.path}")
            checkpoint = load_model(source, config, placement)
        run = _Run(checkpoint, settings, journal, progress, message)
        if windows is None:
            return settings, subject_record(run.weights_only())
        require_rows(checkpoint, [windows.ids, torch.tensor([start.candidate or 0])])
        n = windows.ids.shape[1]
        decided = measure_start(start, checkpoint, list(windows.ids[:, len(start.before) : n - len(start.after)]))
        if decided.before != start.before:
            windows = windows.with_first(decided.before[0], len(start.after))
        return settings, subject_record(run.on_text(windows, kinds, decided))


def _refuse_options_about_files(options: GaugeOptions) -> None:
    """Raise for options that say how a model is loaded; the model is in memory."""
    for name in ABOUT_FILES:
        if name in options.given():
            raise InputError(f"{name} applies to models that are loaded from disk; the model is in memory already")


def check_options(options: GaugeOptions) -> None:
    """Raise for options that contradict each other or are out of range."""
    chosen_kinds(options.what_if or "default")
    if options.tokens is not None:
        require_count("tokens", options.tokens, "the number of text tokens to use in total", least=2)
    if options.depth is not None:
        require_positive("depth", options.depth, "the largest increase of the loss when layers are removed")
    if options.max_removed is not None:
        require_count("max-removed", options.max_removed, "the largest number of layers to remove")
        if options.depth is None:
            raise InputError("--max-removed limits the removal of layers; set the allowed increase with --depth")


def _placement(options: GaugeOptions) -> Placement:
    return Placement(
        dtype=options.dtype or "auto",
        device=options.device,
        device_map=options.device_map,
        trust_remote_code=bool(options.trust_remote_code),
        ignore_unused=bool(options.ignore_unused),
    )


@dataclass
class _Run:
    """One run: the checkpoint, what was found so far, and the functions that report progress."""

    checkpoint: Checkpoint
    settings: GaugeSettings
    journal: Journal
    progress: Step
    message: Callable[[str], None]
    estimated: bool = False
    planning: float = 0.0
    """Seconds spent on attention plans, which only the first window has."""

    def weights_only(self) -> Findings:
        """Read the weights and no text."""
        weights, notes = self._weights()
        return Findings(self.checkpoint, weights, notes=notes)

    def on_text(self, windows: Windows, kinds: tuple[str, ...], start: Start) -> Findings:
        """Observe every window, measure the what-ifs, and remove layers if requested."""
        checkpoint = self.checkpoint
        texts = [window[None] for window in windows.ids]
        cannot = probe(checkpoint, texts[0])
        possible = () if cannot else available(kinds, checkpoint.family)
        weights, notes = self._weights()
        if missing := [kind for kind in kinds if kind not in possible]:
            reason = cannot or _unknown(checkpoint)
            notes.append(f"the what-ifs {', '.join(missing)} were not measured: {reason}")
        if self.settings.depth is not None and cannot:
            raise InputError(f"layers of {checkpoint.name} cannot be removed: {cannot}. Leave --depth out")
        with attending(checkpoint.model) as session:
            stack = Stack(checkpoint, session)
            for index, ids in enumerate(texts):
                self._window(stack, index, ids, possible, len(texts))
            measured = None
            if self.settings.depth is not None:
                measured = self._depth(stack, texts)
        found = [self._known(index) for index in range(len(texts))]
        return Findings(
            checkpoint,
            weights,
            notes,
            windows=windows,
            start=start,
            found=found,
            kinds=possible,
            measured=measured,
        )

    def _weights(self) -> tuple[list[list[CircuitSizes]], list[str]]:
        """Return the circuit sizes of every head, and a note where the family's projections are not known."""
        if self.checkpoint.family is None:
            return [], [f"the sizes of the weights were not measured: {_unknown(self.checkpoint)}"]
        stack = Stack(self.checkpoint, Session())
        sizes = []
        for layer, block in enumerate(stack.blocks):
            self.progress(layer, len(stack), f"weights of layer {layer}")
            sizes.append([circuit_sizes(head) for head in head_weights(self.checkpoint, block)])
        return sizes, []

    def _window(self, stack: Stack, index: int, ids: Int[Tensor, "1 n"], kinds: tuple[str, ...], windows: int) -> None:
        """Observe one window, then measure every what-if on it. Each part is saved as soon as it is known."""
        L = self.checkpoint.layers
        known = self._known(index)
        wanted = [kind for kind in kinds if kind not in known]
        if "observed" in known and not wanted:
            return
        started = time.perf_counter()
        base = stack.full(ids)
        seconds = time.perf_counter() - started
        observing = 0.0
        lost, states = objective(self.checkpoint.objective, ids, base.output), base.states
        loss = cross_entropy(base.output, ids) if self.checkpoint.objective == "loss" else None
        del base  # frees the logits, the largest tensor
        if "observed" not in known:
            self.progress(0, 1, f"heads, window {index}")
            started = time.perf_counter()
            self._keep(index, "observed", {"loss": loss, **self._observe(stack, ids, states, plans=index == 0)})
            observing = time.perf_counter() - started - self.planning
        if not self.estimated:
            self._estimate(seconds, observing, windows - index, ids.shape[1], kinds)
        total = sum(len(layers_of(kind, L)) for kind in wanted)
        done = 0
        for kind in wanted:
            losses = []
            for layer in layers_of(kind, L):
                self.progress(done, total, f"what if, window {index}, {kind} {layer}")
                losses.append(lost(what_if(stack, ids, states, kind, layer)))
                done += 1
            self._keep(index, kind, losses)

    def _known(self, index: int) -> dict[str, Any]:
        """Return what was found on a window: what was observed, and the losses of every what-if."""
        found: dict[str, Any] = self.journal.get(f"window {index}", {})
        return found

    def _keep(self, index: int, part: str, found: Any) -> None:
        """Add a part of a window to the journal."""
        self.journal.put(f"window {index}", {**self._known(index), part: found})

    def _observe(
        self, stack: Stack, ids: Int[Tensor, "1 n"], states: tuple[Tensor, ...], plans: bool
    ) -> dict[str, Any]:
        """Return residuals, head statistics and layer scores of one window, and attention plans if `plans`, as JSON."""
        heads, family, fast = HeadWatch(), self.checkpoint.family, list[LayerPlan]()

        def watch(call: AttentionCall) -> Tensor:
            if plans:
                started = time.perf_counter()
                fast.append(layer_plan(call))
                self.planning += time.perf_counter() - started
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

    def _estimate(self, seconds: float, observing: float, windows: int, tokens: int, kinds: tuple[str, ...]) -> None:
        """Report how long the rest takes, given the seconds of one forward pass and of observing one window."""
        L, self.estimated = self.checkpoint.layers, True
        count = 1 + sum(passes(kind, L) for kind in kinds)
        self.message(_cost("", count, seconds * windows, windows * tokens, observing * (windows - 1)))
        if self.settings.depth is not None:
            most = self.settings.max_removed or L - 1
            further = removal.passes(L, min(most, L - 1), known=1 if "block" in kinds else 0)
            line = _cost("effective depth: at most ", further, seconds * windows, windows * tokens)
            self.message(f"{line}; it stops once the increase exceeds {number(self.settings.depth, 6)}")

    def _depth(self, stack: Stack, texts: list[Int[Tensor, "1 n"]]) -> removal.MeasuredDepth:
        """Remove layers greedily. Each step is saved as soon as it is known."""
        increase = self.settings.depth
        assert increase is not None
        known = [Removal(step["layer"], tuple(step["losses"])) for step in self.journal.get("removals", [])]
        windows = [self._known(index) for index in range(len(texts))]
        if not known and all("block" in found for found in windows):
            losses = [found["block"] for found in windows]
            known = [least_missed({layer: [window[layer] for window in losses] for layer in range(len(stack))})]
        tried = []
        for step in remove_greedily(stack, texts, increase, self.settings.max_removed, known, self.progress):
            tried.append(step)
            self.journal.put("removals", [{"layer": one.layer, "losses": list(one.losses)} for one in tried])
        return removal.measured_depth(tried, len(stack), increase)


def _settings(
    target: Target, options: GaugeOptions, seed: int, kinds: tuple[str, ...], windows: Windows | None
) -> GaugeSettings:
    filled = {
        "tokens": None if windows is None else options.tokens or TOKENS,
        "window": None if windows is None else int(windows.ids.shape[1]),
        "seed": seed,
        "what_if": ",".join(kinds) or "none",
        "dtype": options.dtype or "auto",
    }
    return msgspec.convert(
        {**options.given(), **filled, "target": target.name, "in_memory": target.model is not None}, GaugeSettings
    )


def _files(source: Source) -> list[list[Any]]:
    """Return names and sizes of the weight files, to notice that a checkpoint was replaced between two runs."""
    return [[path.name, path.stat().st_size] for path in weight_files(source)]


def _unknown(checkpoint: Checkpoint) -> str:
    return f"the architecture {checkpoint.config.model_type!r} is not known to depthgauge"


def _cost(what: str, count: float, seconds_per_pass: float, tokens: int, more: float = 0.0) -> str:
    """Return a sentence such as `about 5 minutes: 48 forward passes of 2,048 tokens`; `more` seconds are added."""
    left, number_of = duration(count * seconds_per_pass + more), round(count)
    passes = "1 forward pass" if number_of == 1 else f"{number_of} forward passes"
    return f"{what}about {left}: {passes} of {tokens:,} tokens"
