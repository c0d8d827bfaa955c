"""Load checkpoints one after the other, let them answer tasks and read texts, and compare what was measured."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from depthgauge._version import __version__
from depthgauge.base.format import counted
from depthgauge.base.journal import RECORD
from depthgauge.base.progress import Step
from depthgauge.checkpoints.inputs.text_files import TextFile
from depthgauge.checkpoints.source.library import library_versions
from depthgauge.checkpoints.source.model_files import Source
from depthgauge.checkpoints.tasks.confidence import accuracy_record, mean_record
from depthgauge.checkpoints.tasks.harness import METRICS, ItemAnswers, answer_tasks, load_tasks
from depthgauge.checkpoints.tasks.known_tasks import ClozeText, cloze_items, lm_eval
from depthgauge.checkpoints.tasks.language import (
    Start,
    WindowLosses,
    measure_start,
    perplexity_losses,
    plan_start,
    text_windows,
)
from depthgauge.checkpoints.weights.described import describe, opened
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.results.evaluate_document import AS_FIRST, difference_text
from depthgauge.results.evaluate_record import (
    CLOZE,
    EvaluatedModel,
    EvaluatedTask,
    EvaluatedText,
    EvaluateOptions,
    EvaluateRecord,
)
from depthgauge.results.record import ResultError, load_document
from depthgauge.results.recover_record import RECOVER_SCHEMA, check_recover
from depthgauge.results.shrink_record import SHRINK_ADVICE, CalibrationRecord, check_shrink


def evaluate_models(
    sources: Mapping[str | Path, Source],
    settings: EvaluateOptions,
    texts: tuple[tuple[str, TextFile], ...],
    progress: Step,
    message: Callable[[str], None],
) -> EvaluateRecord:
    """Measure the models one after the other; every option, file and task is checked before weights are read.

    `sources` has the models by their names in the result, and `texts` the names and files for the perplexity.
    """
    started, work = time.perf_counter(), prepare_evaluation(settings, message, texts)
    models = {path: describe(None, source, settings, message=message) for path, source in sources.items()}
    planned = {path: plan_start(settings.bos, model.source, model.reader) for path, model in models.items()}
    for path, model in models.items():
        for _, text in work.texts:
            text_windows(model.reader, text, settings.window, model.config, planned[path])  # raises if it is too short
    answers: list[ModelAnswers] = []
    for path, model in models.items():
        checkpoint = opened(model, message)
        start = _decided_start(planned[path], checkpoint, model.reader, answers[0].start if answers else None)
        if start.reason.startswith("measured"):
            message(f"BOS token {'added' if start.bos else 'not added'}: {start.reason}")
        answers.append(measure_model(work, checkpoint, model.reader, str(path), start, progress))
        del checkpoint  # before the next one is loaded
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    notes = [note for path in sources for note in _notes_about(path, work)]
    return evaluation_record(work, answers, notes, time.perf_counter() - started)


@dataclass(frozen=True, eq=False)
class PreparedEvaluation:
    """Everything that models will be measured on, loaded and checked.

    - `tasks`: tasks of lm-eval by name
    - `cloze`: the items of the shipped task, if it is among them
    - `texts`: name and file of each text for the perplexity
    """

    settings: EvaluateOptions
    tasks: dict[str, Any]
    cloze: ClozeText | None
    texts: tuple[tuple[str, TextFile], ...]


@dataclass(frozen=True, eq=False)
class ModelAnswers:
    """What was measured of one model: its answers by task, its losses by text, and its special tokens."""

    model: EvaluatedModel
    start: Start
    answers: dict[str, ItemAnswers]
    losses: tuple[WindowLosses, ...]


def prepare_evaluation(
    settings: EvaluateOptions, message: Callable[[str], None], texts: tuple[tuple[str, TextFile], ...] = ()
) -> PreparedEvaluation:
    """Load the tasks; needs no model. `texts` are the names and files for the perplexity."""
    names = settings.task_names
    cloze = cloze_items(settings.text) if CLOZE in names else None
    tasks = load_tasks(names, cloze, message) if names else {}
    return PreparedEvaluation(settings, tasks, cloze, texts)


def measure_model(
    work: PreparedEvaluation,
    checkpoint: Checkpoint,
    tokenizer: Any,
    name: str,
    start: Start,
    progress: Step,
) -> ModelAnswers:
    """Let one model answer the tasks and read the texts; items and windows begin with the tokens of `start`."""
    settings, config = work.settings, checkpoint.model.config
    answers = {}
    if work.tasks:
        answers = answer_tasks(checkpoint, tokenizer, start, work.tasks, settings.limit, progress)
    losses = []
    for _, text in work.texts:
        windows = text_windows(tokenizer, text, settings.window, config, start)
        losses.append(perplexity_losses(checkpoint, tokenizer, windows, progress))
    about = checkpoint.describe()
    model = EvaluatedModel(
        name=name,
        family=about.family,
        layers=about.layers,
        parameters=about.parameters,
        dtype=about.dtype,
        bos=start.bos,
        bos_reason=start.reason,
    )
    return ModelAnswers(model, start, answers, tuple(losses))


def evaluation_record(
    work: PreparedEvaluation, models: Sequence[ModelAnswers], notes: Sequence[str], seconds: float
) -> EvaluateRecord:
    """Compare what was measured of the models, item by item, with the first of them."""
    confidence, dense = work.settings.confidence, models[0]
    tasks, main = [], []
    for name in work.tasks:
        answers = [model.answers[name] for model in models]
        assert len({one.sha256 for one in answers}) == 1, name  # the same items and prompts for all
        metrics = [metric for metric in METRICS if all(metric in one.right for one in answers)]
        for metric in sorted(metrics):
            right = [one.right[metric] for one in answers]
            if metric == metrics[0]:
                main.append(right)
            rows = (accuracy_record(one, right[0] if k else None, confidence) for k, one in enumerate(right))
            tasks.append(
                EvaluatedTask(
                    task=name,
                    metric=metric,
                    is_main=metric == metrics[0],
                    items=len(right[0]),
                    all_items=answers[0].all_items,
                    shots=answers[0].shots,
                    sha256=answers[0].sha256,
                    results=tuple(rows),
                )
            )
    mean = []
    for k in range(len(models) if len(main) > 1 else 0):
        ours, theirs = [task[k] for task in main], [task[0] for task in main]
        mean.append(mean_record(ours, theirs if k else None, confidence))
    texts, notes = [], [*notes]
    for index, (name, _) in enumerate(work.texts):
        losses = [model.losses[index] for model in models]
        for (count, n), unread in {(tuple(one.windows.ids.shape), one.windows.unread): None for one in losses}:
            read = f"perplexity on {name}: {counted(count, 'window')} of {n} tokens"
            notes += [f"{read}; the last {counted(unread, 'token')} of the text do not fill one"] * bool(unread)
        windows = dense.losses[index].windows
        texts.append(
            EvaluatedText(
                name=name,
                source=windows.source,
                sha256=windows.digest,
                window=int(windows.ids.shape[1]),
                results=tuple(one.record(losses[0] if k else None) for k, one in enumerate(losses)),
            )
        )
    return EvaluateRecord(
        version=__version__,
        models=tuple(model.model for model in models),
        tasks=tuple(tasks),
        mean=tuple(mean),
        texts=tuple(texts),
        settings=work.settings,
        notes=tuple(notes),
        versions=library_versions(**({"lm-eval": str(lm_eval().__version__)} if work.tasks else {})),
        seconds=seconds,
    )


def tasks_after(asked: str | None, device: torch.device, objective: str) -> str | None:
    """Return the tasks that the dense, the smaller and the recovered model answer: loss does not predict tasks.

    By default this is the shipped one on a GPU, where lm-eval is installed. On a CPU it would take longer than many
    trainings.
    """
    if asked is not None or objective != "loss" or device.type == "cpu":
        return asked
    return CLOZE if find_spec("lm_eval") is not None else None


def fall_warnings(before: ModelAnswers, after: ModelAnswers) -> list[str]:
    """Return a warning for each task that the recovered model answers worse than before, surely, item by item."""
    warnings = []
    for name, answers in after.answers.items():
        metric = next(metric for metric in METRICS if metric in answers.right)
        change = accuracy_record(answers.right[metric], before.answers[name].right[metric])
        if change.high is not None and change.high < 0:
            warnings.append(
                f"warning: the recovery lowered the loss and the accuracy on {name}, by {difference_text(change)} "
                "points; train on text that is more general, with --general"
            )
    return warnings


def calibration_notes(name: str, calibration: CalibrationRecord, work: PreparedEvaluation) -> list[str]:
    """Return a note for each text of the evaluation that a shrunk model was also fitted or selected on.

    The note is part of the model card, so texts are named without their directories.
    """
    return [
        f"{name} was calibrated on {Path(source.name).name} (windows to fit: {source.fit}, to select: "
        f"{source.select}), so its {what} is not independent of the calibration; use another text"
        for text, digest, what in _texts_of(work)
        for source in calibration.sources
        if source.fit + source.select and (source.name == text or source.sha256 == digest)
    ]


def _texts_of(work: PreparedEvaluation) -> list[tuple[str, str, str]]:
    """Return the name and the digest of each text that is evaluated, where known, and what is measured on it."""
    texts = [(text.name, "", f"perplexity on {label}") for label, text in work.texts]
    if work.cloze is not None:
        texts.append((work.cloze.source, work.cloze.sha256, f"accuracy on {CLOZE}"))
    return texts


def _notes_about(path: str | Path, work: PreparedEvaluation) -> list[str]:
    """Return notes about a model of `shrink` or `recover`: its record says what it was calibrated or trained on."""
    written = Path(path) / RECORD
    if not written.is_file():
        return []
    try:
        document = load_document(written, SHRINK_ADVICE)
        if isinstance(document, dict) and document.get("schema") == RECOVER_SCHEMA:
            trained = check_recover(document, str(written)).recovery.data
            return [
                f"{path} was trained on {Path(text).name}, so its {what} is not independent of that; use another text"
                for text, _, what in _texts_of(work)
                if text in trained
            ]
        return calibration_notes(str(path), check_shrink(document, str(written)).plan.calibration, work)
    except ResultError as error:
        return [f"what {path} was made with is not known: {error}"]


def _decided_start(start: Start, checkpoint: Checkpoint, tokenizer: Any, first: Start | None) -> Start:
    """Decide about the BOS token where the tokenizer and the file do not: as for the first model, or by measuring."""
    if start.candidate is not None and first is not None and first.bos is not None:
        return start.decided(start.candidate, first.bos, AS_FIRST)
    return measure_start(start, checkpoint, tokenizer)
