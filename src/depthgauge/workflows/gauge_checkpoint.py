"""Gauge a checkpoint: what its weights show, what its heads do on text, and what the model loses without each layer."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import pairwise
from typing import Any

from torch import Tensor

from depthgauge._journal import Journal
from depthgauge.checkpoints.averaging import first_layer_bound
from depthgauge.checkpoints.block_runner import tokens_of
from depthgauge.checkpoints.circuits import CircuitSizes, circuit_sizes, head_weights
from depthgauge.checkpoints.derive_family import derived
from depthgauge.checkpoints.experts import ExpertWhatIfs, expert_layers
from depthgauge.checkpoints.families import family_of
from depthgauge.checkpoints.given_inputs import load_reader, prepared, read_given
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.head_statistics import head_statistics
from depthgauge.checkpoints.input_kinds import TEXT, read_kind
from depthgauge.checkpoints.interface import AttentionCall, Session, attending
from depthgauge.checkpoints.layers import Stack, unusual_states
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import (
    BY_TARGETS,
    Checkpoint,
    Placement,
    context_length,
    fitted,
    load_config,
    load_model,
    refuse_infinite,
    require_kind,
    wrap,
)
from depthgauge.checkpoints.model_output import accuracy, require_output, window_losses
from depthgauge.checkpoints.probe import probe
from depthgauge.checkpoints.reads_text import started_windows
from depthgauge.checkpoints.registered_attention import layer_plan
from depthgauge.checkpoints.samples import Inputs, Samples
from depthgauge.checkpoints.scores import SublayerScores, angular_distance, block_influence
from depthgauge.checkpoints.sentence_pooling import longest_window, pooling_notes
from depthgauge.checkpoints.source import weight_files
from depthgauge.checkpoints.start_token import plan_start
from depthgauge.checkpoints.stored_weights import weights_digest
from depthgauge.checkpoints.what_if import (
    layers_of,
    objective,
    what_if,
)
from depthgauge.checkpoints.windows import Windows, read_windows
from depthgauge.measures.residuals import residual_sizes
from depthgauge.monitor.undisturbed import undisturbed
from depthgauge.progress import Step
from depthgauge.results.checkpoint_subject import (
    CheckpointSubject,
)
from depthgauge.results.gauge_options import SAMPLES, GaugeSettings
from depthgauge.results.labels import EXPERT
from depthgauge.results.verdicts import unobserved_sentence
from depthgauge.workflows.checkpoint_record import subject_record
from depthgauge.workflows.gauge_estimate import estimate_gauge
from depthgauge.workflows.gauge_request import GaugeRequest


def gauge_checkpoint(
    request: GaugeRequest, tokenizer: Any, journal: Journal, progress: Step, message: Callable[[str], None]
) -> tuple[GaugeSettings, CheckpointSubject]:
    """Gauge a directory, a GGUF file, a model on the hub or one in memory.

    Every option and file is checked before weights are read.

    The journal keeps every finished step; the steps of an interrupted run are not measured again. `message` is called
    with sentences such as the expected duration.

    Returns:
        The options with their defaults filled in, and the subject.
    """
    target, options, asked, source = request.target, request.given, request.asked, request.source
    assert asked.tokens is not None
    assert asked.bos is not None
    assert asked.dtype is not None
    kinds, text_file, seed, placement = request.kinds, request.text, asked.seed or 0, Placement.of(asked)
    reads = read_kind(asked)
    windows: Windows | GivenWindows | None = None
    if source is None:
        config = target.model.config
        require_kind(type(target.model), config, str(target.name), reads)
    else:
        config = load_config(source, placement, reads)
    if reads != TEXT or text_file is not None:
        tokenizer = load_reader(source, placement, asked, tokenizer)
    if reads != TEXT:
        wanted = asked.samples or SAMPLES
        windows = read_given(asked, tokenizer, config, target.description, wanted=wanted, seed=seed)
    elif text_file is None:
        if family_of(config) is None:  # the projections of other families are not derived
            raise CheckpointError(
                f"--weights-only cannot be used for {target.name}: depthgauge does not know where a "
                f"{config.model_type} model keeps its weights; gauge it on text"
            )
    else:
        start = plan_start(asked.bos, source, tokenizer)
        windows = read_windows(
            tokenizer,
            text_file,
            tokens=asked.tokens,
            window=asked.window,
            context=longest_window(None if source is None else source.folder, context_length(config)),
            seed=seed,
            special=(start.before, start.after),
        )
    filled = {
        "tokens": asked.tokens if isinstance(windows, Windows) else None,
        "window": int(windows.ids.shape[1]) if isinstance(windows, Windows) else asked.window,
        "samples": len(windows.inputs) if isinstance(windows, GivenWindows) else None,
        "seed": seed,
        "what_if": ",".join(kinds) or "none",
        "dtype": asked.dtype,
    }
    used = target.name if source is None or source.hub is None else source.target
    settings = GaugeSettings(**{**options.given(), **filled, "target": used, "in_memory": target.model is not None})
    # Names and sizes of the weight files show that a checkpoint was replaced between two runs.
    files = (
        weights_digest(target.model) if source is None else [[p.name, p.stat().st_size] for p in weight_files(source)]
    )
    journal.begin(settings.to_json() | {"files": files, "sha256": None if windows is None else windows.digest})
    if source is not None:
        placement = fitted(source, config, placement, message)
    if not placement.stream:
        _say_estimate(request, config, windows, message)
    with nullcontext() if target.model is None else undisturbed(target.model):
        if source is None:
            checkpoint = wrap(target.model, str(target.name))
            refuse_infinite(target.model, checkpoint.name)
        else:
            message(f"loading {source.target}")
            checkpoint = load_model(source, config, placement)
        if windows is None:
            weights, notes = measure_weights(checkpoint, progress)
            first_layer = first_layer_bound(checkpoint, progress)
            return settings, subject_record(checkpoint, weights, notes, first_layer=first_layer)
        inputs: Inputs
        if isinstance(windows, GivenWindows):
            checkpoint, inputs = prepared(checkpoint, windows, asked), windows.inputs
            require_output(checkpoint, inputs)
            text = windows.record(tokens_of(checkpoint, inputs))
        else:
            windows, decided = started_windows(checkpoint, windows, start, tokenizer, bool(asked.force), message)
            inputs, text = windows.ids, windows.record(decided.bos, decided.reason)
        checkpoint = derived(checkpoint, inputs)
        probed = probe(checkpoint, inputs[:1])
        if probed.attention is not None:
            message(unobserved_sentence(probed.attention))
        weights, notes = measure_weights(checkpoint, progress)
        observable = probed.attention is None
        measured = {kind: layers_of(kind, checkpoint.families, observable) for kind in kinds if not probed.blocks}
        if EXPERT in measured:
            measured[EXPERT] = expert_layers(Stack(checkpoint, Session()).blocks, checkpoint.families)
        notes += _unmeasured(kinds, measured, checkpoint, probed.blocks)
        measured = {kind: layers for kind, layers in measured.items() if layers}
        if checkpoint.objective == "embedding" and source is not None:
            notes += pooling_notes(source.folder)
        found = measure_windows(checkpoint, inputs, measured, observable, journal, progress, message)
        return settings, subject_record(checkpoint, weights, notes, text, found, measured, unobserved=probed.attention)


def _say_estimate(
    request: GaugeRequest, config: Any, windows: Windows | GivenWindows | None, message: Callable[[str], None]
) -> None:
    """Say what the run will take, if a few blocks of this model can be timed; otherwise loading says more."""
    with suppress(CheckpointError):
        given = windows if isinstance(windows, GivenWindows) else None
        message(estimate_gauge(request, config, given).sentence)


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
    sizes = []
    for layer, block in enumerate(stack.blocks):
        progress(layer, len(stack), f"weights of layer {layer}")
        sizes.append([circuit_sizes(head) for head in head_weights(checkpoint, block)])
    return sizes, []


def measure_windows(
    checkpoint: Checkpoint,
    inputs: Inputs,
    measured: Mapping[str, Sequence[int]],
    observable: bool,
    journal: Journal,
    progress: Step,
    message: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Observe every window, then measure every what-if on it. Each part is kept as soon as it is known.

    `measured` has the layers of each what-if. If the attention is not `observable`, the model computes its own.

    Returns:
        What was found on each window: `observed`, and for each what-if the loss of every measured layer; for every
        expert, the loss and the share of tokens.
    """
    count, found = len(inputs), list[dict[str, Any]]()
    with attending(checkpoint.model) if observable else nullcontext(Session()) as session:
        stack = Stack(checkpoint, session)
        for index in range(count):
            window, known = inputs[index : index + 1], dict(journal.get(f"window {index}", {}))
            if isinstance(window, Samples):
                window = window.unpadded()  # padding is nothing to observe
            found.append(known)
            wanted = [kind for kind in measured if kind not in known]
            if "observed" in known and not wanted:
                continue
            base = stack.full(window)
            lost = objective(checkpoint.objective, window, base.output)
            states = () if unusual_states(base.states, window) else base.states
            own: dict[str, float | None] = {"loss": None}
            if checkpoint.objective in BY_TARGETS:
                own["loss"] = float(window_losses(checkpoint.objective, base.output, window, base.output).mean())
            if checkpoint.objective == "labels":
                own["accuracy"] = accuracy(base.output, window)
            del base  # frees the logits, the largest tensor
            if "observed" not in known:
                progress(0, 1, f"heads, window {index}")
                known["observed"] = {**own, **observe(stack, window, states, plans=index == 0)}
                journal.put(f"window {index}", known)
            total, done = sum(len(measured[kind]) for kind in wanted), 0
            for kind in wanted:
                losses: list[Any] = []
                experts = ExpertWhatIfs(stack, window) if kind == EXPERT else None
                for place, layer in enumerate(measured[kind]):
                    progress(done, total, f"what if, window {index}, {kind} {layer}")
                    if experts is None:
                        losses.append(lost(what_if(stack, window, states, kind, layer)))
                    else:
                        output, share = experts.without(states[layer], layer, place - measured[kind].index(layer))
                        losses.append([lost(output), share])
                    done += 1
                known[kind] = losses
                journal.put(f"window {index}", known)
    return found


def observe(stack: Stack, inputs: Inputs, states: tuple[Tensor, ...], plans: bool) -> dict[str, Any]:
    """Return residuals, head statistics, layer scores and, if `plans`, attention plans of one window, as JSON."""
    heads, fast = list[dict[str, Any]](), list[dict[str, Any]]()

    def watch(call: AttentionCall) -> Tensor:
        if plans:
            fast.append(layer_plan(call).to_json())
        output, statistics = head_statistics(call)
        heads.append(statistics.to_json())
        return output

    families = stack.checkpoint.families
    sublayers = SublayerScores(stack.blocks, families) if any(families) and len(stack) else None
    with nullcontext() if sublayers is None else sublayers.listening():
        stack.run(inputs, watch=watch)
    steps = list(pairwise(states))
    scores = {
        "block_influence": [block_influence(x, y) for x, y in steps],
        "angular_distance": [angular_distance(x, y) for x, y in steps],
    }
    if sublayers is not None:
        scores |= {
            name: found
            for name, found in (("attention_cosine", sublayers.attention), ("mlp_cosine", sublayers.mlp))
            if not all(map(math.isnan, found))
        }
    residuals = [
        {
            center: {norm: [float(size.value), float(size.ratio)] for norm, size in sizes.items()}
            for center, sizes in residual_sizes(state.float()).items()
        }
        for state in states
    ]
    return {"residuals": residuals, "heads": heads, "fast": fast, "scores": scores}
