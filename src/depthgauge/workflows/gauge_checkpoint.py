"""Gauge a checkpoint: what its weights show, what its heads do on text, and what the model loses without each layer."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import mean
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import Tensor

from depthgauge._version import __version__
from depthgauge.base.journal import Journal
from depthgauge.base.progress import Step
from depthgauge.checkpoints.blocks.attention_calls import Session, attending
from depthgauge.checkpoints.blocks.block_runner import BlockRunner, Stack, tokens_of
from depthgauge.checkpoints.blocks.circuits import CircuitSizes, circuit_sizes, head_weights, regime
from depthgauge.checkpoints.blocks.model_output import require_output
from depthgauge.checkpoints.blocks.probe import Probed, derived, probe
from depthgauge.checkpoints.blocks.what_if import (
    DenseStates,
    Edit,
    Edits,
    ExpertWhatIfs,
    Objective,
    edited_losses,
    encoded,
    expert_layers,
    layers_of,
    states_in_memory,
)
from depthgauge.checkpoints.blocks.window_observer import STATIC, combine, observe_blocks, observe_window, spearman
from depthgauge.checkpoints.inputs.found_data import TEXT
from depthgauge.checkpoints.inputs.windows import Inputs, Samples, Windows, as_samples, read_data, read_windows
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.source.model_class import context_length, longest_window, pooling_notes
from depthgauge.checkpoints.source.model_files import weight_files
from depthgauge.checkpoints.tasks.confidence import mean_interval
from depthgauge.checkpoints.tasks.language import Start, plan_start, started_windows
from depthgauge.checkpoints.weights.described import Described, describe, opened
from depthgauge.checkpoints.weights.families import family_of
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.checkpoints.weights.stored_weights import weights_digest
from depthgauge.monitor.undisturbed import undisturbed
from depthgauge.results.gauge_record import (
    SAMPLES,
    CheckpointHead,
    CheckpointLayer,
    CheckpointState,
    CheckpointSubject,
    ExpertLoss,
    FastPlan,
    GaugeOptions,
    GaugeSettings,
    Interval,
    Residual,
    ScoreTrust,
    TextWindows,
    allows,
    checkpoint_verdict,
    unobserved_sentence,
)
from depthgauge.results.labels import EXPERT, SCORES
from depthgauge.results.record import finite
from depthgauge.theory.measures.quantities import SampleResiduals, residual_record
from depthgauge.workflows.needed_room import room_of
from depthgauge.workflows.target import GaugeRequest


@dataclass(frozen=True, eq=False)
class GaugeInputs:
    """A model before its weights are loaded, and what it will be measured on.

    - `model`: the model without its weights
    - `windows`: the windows of a text, without special tokens, or other inputs; None if the weights alone are gauged
    - `start`: the special tokens around the windows of a text
    """

    model: Described
    windows: Windows | None
    start: Start | None


def gauge_checkpoint(
    request: GaugeRequest, tokenizer: Any, journal: Journal, progress: Step, message: Callable[[str], None]
) -> tuple[GaugeSettings, CheckpointSubject]:
    """Gauge a directory, a GGUF file, a model on the hub or one in memory.

    Every option and file is checked before weights are read.

    The journal keeps every finished step; the steps of an interrupted run are not measured again. `message` is called
    with sentences such as the memory that is needed.

    Returns:
        The options with their defaults filled in, and the subject.
    """
    model = request.target.model
    with nullcontext() if model is None else undisturbed(model):
        inputs = read_inputs(request, tokenizer, message)
        settings = _settings(request, inputs.windows)
        _begin(request, inputs.windows, settings, journal)
        return settings, _measured(request, inputs, journal, progress, message)


def read_inputs(request: GaugeRequest, tokenizer: Any, message: Callable[[str], None]) -> GaugeInputs:
    """Describe the model, and cut a text into windows; no weights are needed."""
    asked, source, data = request.asked, request.source, request.data
    described = describe(
        request.target.model, source, request.given, data, tokenizer, message, has_reader=not asked.weights_only
    )
    config, reader, seed = described.config, described.reader, asked.seed or 0
    windows, start, tokens = None, None, 0
    if data.kind is not TEXT:
        windows = read_data(data, reader, config, wanted=asked.samples or SAMPLES, seed=seed, window=asked.window)
    elif asked.weights_only:
        if family_of(config) is None:  # the projections of other families are not derived
            raise CheckpointError(
                f"--data none cannot be used for {request.target.name}: depthgauge does not know where a "
                f"{config.model_type} model keeps its weights; gauge it on text"
            )
    else:
        assert asked.tokens is not None
        assert asked.bos is not None
        start = plan_start(asked.bos, source, reader)
        windows = read_windows(
            reader,
            data.texts[0] if data.texts else None,
            tokens=asked.tokens,
            window=asked.window,
            context=longest_window(None if source is None else source.folder, context_length(config)),
            seed=seed,
            special=(start.before, start.after),
        )
        tokens = int(windows.ids.shape[1])
    data.describe(message)
    if source is not None:
        placement = described.placement
        message(room_of(described.whole, placement.stream, 1, tokens).sentence(placement.torch_device()))
    return GaugeInputs(described, windows, start)


def _settings(request: GaugeRequest, windows: Windows | None) -> GaugeSettings:
    """Return the options with their defaults filled in."""
    target, asked, source = request.target, request.asked, request.source
    is_text = windows is not None and request.data.kind is TEXT
    filled = {
        "tokens": asked.tokens if is_text else None,
        "window": int(windows.ids.shape[1]) if windows is not None and is_text else asked.window,
        "samples": None if windows is None or is_text else len(windows.inputs),
        "seed": asked.seed or 0,
        "what_if": ",".join(request.kinds) or "none",
        "dtype": asked.dtype,
        "target": target.name if source is None or source.hub is None else source.target,
        "in_memory": target.model is not None,
    }
    return GaugeSettings(**{**request.given.given(), **filled})


def _begin(request: GaugeRequest, windows: Windows | None, settings: GaugeSettings, journal: Journal) -> None:
    """Describe the run in its journal. Names and sizes of the weight files show that a checkpoint was replaced."""
    source = request.source
    if source is None:
        files: Any = weights_digest(request.target.model)
    else:
        files = [[path.name, path.stat().st_size] for path in weight_files(source)]
    journal.begin(
        settings.to_json()
        | {"version": __version__, "files": files, "sha256": None if windows is None else windows.digest}
    )


def _measured(
    request: GaugeRequest, described: GaugeInputs, journal: Journal, progress: Step, message: Callable[[str], None]
) -> CheckpointSubject:
    """Load the weights, and measure them, and what-ifs on every window."""
    checkpoint, windows, kinds = opened(described.model, message), described.windows, request.kinds
    if windows is None:
        return subject_record(checkpoint, *measure_weights(checkpoint, progress))
    if described.start is None:
        require_output(checkpoint, windows.inputs)
        text = windows.record(tokens_of(checkpoint, windows.inputs))
    else:
        reader, unread = described.model.reader, allows(request.asked, "unread")
        windows, start = started_windows(checkpoint, windows, described.start, reader, unread, message)
        text = windows.record(int(windows.ids.shape[1]), start.bos, start.reason)
    inputs = windows.inputs
    checkpoint = derived(checkpoint, inputs)
    probed = probe(checkpoint, inputs[:1])
    if probed.attention is not None:
        message(unobserved_sentence(probed.attention))
    weights, notes = measure_weights(checkpoint, progress)
    observable = probed.attention is None
    measured = {kind: layers_of(kind, checkpoint.families, observable) for kind in kinds if not probed.blocks}
    if EXPERT in measured:
        measured[EXPERT] = expert_layers(Stack(checkpoint, Session()).blocks, checkpoint.families)
    notes += [*_fewer(text, request.asked), *_unmeasured(kinds, measured, checkpoint, probed.blocks)]
    measured = {kind: layers for kind, layers in measured.items() if layers}
    if checkpoint.objective == "embedding" and request.source is not None:
        notes += pooling_notes(request.source.folder)
    by_window = measure_windows(checkpoint, inputs, measured, probed, journal, progress)
    return subject_record(checkpoint, weights, notes, text, by_window, measured, unobserved=probed.attention)


def _fewer(text: TextWindows, asked: GaugeOptions) -> list[str]:
    """Say how much was measured if there was less than the options ask for, or than they do by default."""
    option, value = ("tokens", asked.tokens or 0) if text.kind == "text" else ("samples", asked.samples or SAMPLES)
    if text.windows >= max(1, value // text.window if option == "tokens" else value):
        return []
    used = f"measured on {text.phrase()}, {text.tokens:,} tokens in all"
    return [f"{used}: {text.source} has no more, and --{option} {value} asks for more"]


def _unmeasured(
    kinds: Sequence[str], measured: Mapping[str, Sequence[int]], checkpoint: Checkpoint, blocks: str | None
) -> list[str]:
    """Say which what-ifs are missing, and in which layers; `blocks` is why blocks cannot be rerun."""
    if blocks is not None:
        return [f"the what-ifs {', '.join(kinds)} were not measured: {blocks}"] if kinds else []
    notes, unknown = list[str](), [layer for layer, family in enumerate(checkpoint.families) if family is None]
    if unknown and (missing := [kind for kind in ("attention", "mlp") if kind in kinds]):
        where = "" if len(unknown) == checkpoint.layers else f" in the layers {', '.join(map(str, unknown))}"
        notes.append(f"the what-ifs {', '.join(missing)} were not measured{where}: {checkpoint.underived}")
    elif missing := [kind for kind, layers in measured.items() if kind in ("attention", "mlp") and not layers]:
        notes.append(
            f"the what-ifs {', '.join(missing)} were not measured: its blocks have one sublayer, and without it they "
            "are skipped"
        )
    if EXPERT in kinds and not measured[EXPERT]:
        notes.append("the what-if expert was not measured: no MLP has weights with one entry per expert")
    if "uniform" in kinds and not measured["uniform"]:
        notes.append("the what-if uniform was not measured: it needs observable attention")
    return notes


def measure_weights(checkpoint: Checkpoint, progress: Step) -> tuple[list[list[CircuitSizes]], list[str]]:
    """Return the circuit sizes of every head, and a note where the family's projections are not known."""
    if checkpoint.family is None or checkpoint.family.projections is None:
        kind = checkpoint.config.model_type
        return [], [f"the sizes of the weights were not measured: the projections of {kind!r} models are not known"]
    stack = Stack(checkpoint, Session())

    def of_layer(layer: int) -> list[CircuitSizes]:
        progress(layer, len(stack), f"weights of layer {layer}")
        with checkpoint.resident(layer):
            return [circuit_sizes(head) for head in head_weights(checkpoint, stack.blocks[layer])]

    return [of_layer(layer) for layer in range(len(stack.blocks))], []


def measure_windows(
    checkpoint: Checkpoint,
    inputs: Inputs,
    measured: Mapping[str, Sequence[int]],
    probed: Probed,
    journal: Journal,
    progress: Step,
) -> list[dict[str, Any]]:
    """Observe every window, then measure every what-if on it. Each part is kept as soon as it is known.

    Where blocks can be rerun, as many windows as memory allows are measured together: a block is applied to all of them
    before the next one. `measured` has the layers of each what-if. If the attention cannot be observed, the model
    computes its own.

    Returns:
        What was found on each window: `observed`, and for each what-if the loss of every measured layer; for every
        expert, the loss and the share of tokens.
    """
    by_window = [dict(journal.get(f"window {index}", {})) for index in range(len(inputs))]
    left = [index for index, known in enumerate(by_window) if {"observed", *measured} - known.keys()]
    with attending(checkpoint.model) if probed.attention is None else nullcontext(Session()) as session:
        runner, size, length = None, 1, as_samples(inputs).main.shape[1]
        if probed.blocks is None:
            inputs = encoded(checkpoint, inputs)
            runner = BlockRunner(checkpoint, inputs[:1], session)
            most = max(map(len, measured.values()), default=len(runner))
            size = max(1, states_in_memory(runner.embed(inputs[:1])) // most)
        for together in _groups(inputs, left, size):
            group, windows = {index: by_window[index] for index in together}, inputs[torch.tensor(together).long()]
            if isinstance(windows, Samples):
                windows = windows.unpadded()  # padding is nothing to observe
            if runner is not None and as_samples(windows).main.shape[1] != length:
                length = as_samples(windows).main.shape[1]
                runner = BlockRunner(checkpoint, windows[:1], session)  # the position biases of T5 have a length
            dense = None if runner is None else DenseStates(runner, windows, progress=progress)
            if any("observed" not in known for known in group.values()):
                if dense is None:
                    seen = [observe_window(Stack(checkpoint, session), windows, plans=0 in group)]
                else:
                    seen = observe_blocks(dense, plans=0 in group, progress=progress)
                for known, observer in zip(group.values(), seen, strict=True):
                    known["observed"] = observer.record
            _keep(journal, group)
            for kind, on in measured.items():
                if dense is not None and any(kind not in known for known in group.values()):
                    for known, losses in zip(group.values(), what_if_losses(dense, kind, on, progress), strict=True):
                        known[kind] = losses
                _keep(journal, group)
    return by_window


def _groups(inputs: Inputs, left: Sequence[int], size: int) -> list[list[int]]:
    """Divide windows into groups of at most `size`, in which all have the same number of tokens without padding."""
    by_length: dict[int, list[int]] = {}
    for index in left:
        window = as_samples(inputs[index : index + 1]).unpadded()
        by_length.setdefault(window.main.shape[1], []).append(index)
    return [indices[start : start + size] for indices in by_length.values() for start in range(0, len(indices), size)]


def _keep(journal: Journal, group: Mapping[int, dict[str, Any]]) -> None:
    """Keep what is known of some windows."""
    journal.update({f"window {index}": parts for index, parts in group.items()})


def what_if_losses(dense: DenseStates, kind: str, on: Sequence[int], progress: Step) -> list[list[Any]]:
    """Return, for every window, the loss of each layer in `on` in a what-if; for every expert, also its share."""
    objective, experts = Objective(dense.runner, dense.inputs, dense.final), ExpertWhatIfs(dense.runner)
    models = [(Edit(layer, kind, place - on.index(layer)),) for place, layer in enumerate(on)]
    by_model: dict[Edits, Tensor] = {}
    for some in edited_losses(objective, dense, models, experts=experts, progress=progress, label=f"what if, {kind}"):
        by_model |= some
    losses = (torch.stack([by_model[edits] for edits in models], dim=1) - objective(dense.final)[:, None]).tolist()
    if kind != EXPERT:
        return losses
    shares = [experts.shares[edit.layer, edit.expert] for (edit,) in models]
    return [[[*pair] for pair in zip(row, share, strict=True)] for row, *share in zip(losses, *shares, strict=True)]


# --- From what was measured to the record -----------------------------------------------------------------------------

_ON_TEXT = ("score_range", "tv_mean", "tv_max", "first_mass", "entropy")
"""The statistics of a head that are copied to its record."""


def subject_record(
    checkpoint: Checkpoint,
    weights: Sequence[Sequence[CircuitSizes]],
    notes: Sequence[str],
    text: TextWindows | None = None,
    by_window: Sequence[dict[str, Any]] = (),
    measured: Mapping[str, Sequence[int]] = MappingProxyType({}),
    unobserved: str | None = None,
) -> CheckpointSubject:
    """Combine what was measured window by window into the record of one checkpoint.

    `weights` has the circuit sizes by layer and head, empty where the family is not known; `by_window` is the result of
    `measure_windows` for the layers `measured` of each what-if. `unobserved` says why the
    attention was not observed.
    """
    L, observed = checkpoint.layers, [window["observed"] for window in by_window]
    what_ifs = {
        kind: {layer: mean_interval([window[kind][place] for window in by_window]) for place, layer in enumerate(on)}
        for kind, on in measured.items()
        if kind != EXPERT
    }
    scores = {
        name: torch.tensor([seen["scores"][name] for seen in observed], dtype=torch.float64).mean(dim=0).tolist()
        for name in (observed[0]["scores"] if observed else ())
    }
    trust = _trust(scores, what_ifs)
    has_loss = bool(observed) and observed[0]["loss"] is not None
    return CheckpointSubject(
        name=checkpoint.name,
        verdict=checkpoint_verdict(L, checkpoint.objective, what_ifs.get("block", {}), trust, measured=bool(observed)),
        model=checkpoint.describe(),
        text=text,
        regime=regime(weights) if weights else None,
        baseline=mean_interval([seen["loss"] for seen in observed]) if has_loss else None,
        accuracy=mean(seen["accuracy"] for seen in observed) if observed and "accuracy" in observed[0] else None,
        input=CheckpointState(residual=_residual(observed, 0)),
        layers=tuple(
            CheckpointLayer(
                index=layer,
                residual=_residual(observed, layer + 1),
                heads=_heads(checkpoint, observed, weights, layer),
                scores={name: finite(values[layer]) for name, values in scores.items() if values},
                fast=msgspec.convert(observed[0]["fast"][layer], FastPlan) if observed and unobserved is None else None,
                what_if={kind: by_layer[layer] for kind, by_layer in what_ifs.items() if layer in by_layer},
                experts=_experts(by_window, measured.get(EXPERT, ()), layer),
            )
            for layer in range(L)
        ),
        scores=tuple(trust),
        notes=tuple(notes),
        unobserved=unobserved,
    )


def _experts(by_window: Sequence[dict[str, Any]], on: Sequence[int], layer: int) -> tuple[ExpertLoss, ...]:
    """Return the experts of a layer; `on` has the layer of every expert that was measured on the windows."""
    by_expert = [[window[EXPERT][place] for window in by_window] for place, other in enumerate(on) if other == layer]
    return tuple(
        ExpertLoss(
            index=index,
            what_if=mean_interval([loss for loss, _ in windows]),
            share=sum(share for _, share in windows) / len(windows),
        )
        for index, windows in enumerate(by_expert)
    )


def _trust(scores: dict[str, list[float]], what_ifs: dict[str, dict[int, Interval]]) -> list[ScoreTrust]:
    """Return the rank correlation of each layer score with the what-if it predicts."""
    rows = []
    for score, values in scores.items():
        lost = what_ifs.get(SCORES[score].what_if, {})
        if lost and values:
            correlation = spearman([values[layer] for layer in lost], [one.loss for one in lost.values()])
            rows.append(ScoreTrust(score=score, what_if=SCORES[score].what_if, spearman=correlation, layers=len(lost)))
    return rows


def _residual(observed: Sequence[dict[str, Any]], state: int) -> Residual | None:
    """Return the residual of X_ℓ, mean and spread over windows; None where the states were not observed."""
    if not observed or not observed[0]["residuals"]:
        return None
    windows = [seen["residuals"][state] for seen in observed]
    return residual_record(
        {
            center: {
                norm: SampleResiduals(*torch.tensor([w[center][norm] for w in windows], dtype=torch.float64).unbind(1))
                for norm in norms
            }
            for center, norms in windows[0].items()
        }
    )


def _heads(
    checkpoint: Checkpoint,
    observed: Sequence[dict[str, Any]],
    weights: Sequence[Sequence[CircuitSizes]],
    layer: int,
) -> tuple[CheckpointHead, ...]:
    entries: list[dict[str, Any]] = [{"index": head} for head in range(checkpoint.heads)]
    if observed and observed[0]["heads"]:
        seen = combine([window["heads"][layer] for window in observed])
        errors = seen.static_errors()
        for head, entry in enumerate(entries):
            entry |= {name: finite(getattr(seen, name)[head]) for name in _ON_TEXT}
            entry["static"] = {name: finite(errors[i, head]) for i, name in enumerate(STATIC)}
            entry["static_best"] = STATIC[int(errors[:, head].nan_to_num(nan=torch.inf).argmin())]
    if weights:
        for entry, sizes in zip(entries, weights[layer], strict=True):
            entry |= {name: finite(size) for name, size in vars(sizes).items() if name != "score_norm"}
    return tuple(CheckpointHead(**entry) for entry in entries)
