"""One run of `recover`: read both models and the texts, train, measure, write, and check what was written."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from depthgauge._version import __version__
from depthgauge.base.errors import InputError
from depthgauge.base.io import write_tensors
from depthgauge.base.journal import RECORD, Journal
from depthgauge.base.progress import Step
from depthgauge.checkpoints.inputs.text_files import TextFile
from depthgauge.checkpoints.inputs.windows import WINDOW, Inputs, as_samples
from depthgauge.checkpoints.source.library import library_versions
from depthgauge.checkpoints.source.model_class import context_length
from depthgauge.checkpoints.source.model_files import Source, file_digests
from depthgauge.checkpoints.tasks.confidence import mean_interval
from depthgauge.checkpoints.tasks.language import Start, measure_start, plan_start
from depthgauge.checkpoints.weights.described import describe, opened
from depthgauge.checkpoints.weights.load import Checkpoint, require_rows, wrap
from depthgauge.checkpoints.weights.stored_weights import stored_dtype
from depthgauge.recovery.divergence import require_pair
from depthgauge.recovery.recover_model import Recovery, trained_weights
from depthgauge.recovery.training_data import RecoveryData, training_data
from depthgauge.results.evaluate_record import EvaluateOptions
from depthgauge.results.record import finite
from depthgauge.results.recover_record import Amount, RecoveredText, RecoverOptions, RecoverRecord
from depthgauge.results.shrink_document import reload_sentence
from depthgauge.surgery.calibration import (
    Calibration,
    CalibrationRequest,
    CalibrationSizes,
    cut_texts,
    prepare_calibration,
)
from depthgauge.surgery.certify import Certifier, as_dtype
from depthgauge.surgery.extract import cast
from depthgauge.surgery.verify import verify_reload
from depthgauge.surgery.write_model import written_model
from depthgauge.workflows.evaluate_models import (
    ModelAnswers,
    evaluation_record,
    fall_warnings,
    measure_model,
    prepare_evaluation,
    tasks_after,
)

RECOVERED = "the recovered model"
"""The name of the result in the record of its tasks."""
SELECT, CERTIFY = 64, 60
"""Windows that decide whether the result is kept, and windows that measure it."""


def run_recovery(
    small: Source,
    source: Source,
    settings: RecoverOptions,
    texts: tuple[TextFile, ...],
    out: str | Path | None,
    overwrite: bool,
    journal: Journal,
    progress: Step,
    message: Callable[[str], None],
) -> tuple[Any, RecoverRecord]:
    """Train the model `small` towards the model `source`; return it, and the record of the run."""
    started = time.perf_counter()
    smaller, larger = (describe(None, one, settings, message=message, may_stream=False) for one in (small, source))
    own, tokenizer = smaller.reader, larger.reader
    if own.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"{small.target} and {source.target} have different tokenizers, so their predictions cannot be compared; "
            "give the model that the smaller one was made from"
        )
    context = context_length(larger.config)
    request = CalibrationRequest(
        texts,
        CalibrationSizes(max(1, len(texts)), max(SELECT, len(texts)), max(CERTIFY, len(texts))),
        sampled=0.0 if texts else 1.0,
        window=min(WINDOW, context or WINDOW) if settings.window is None else settings.window,
        context=context,
        start=plan_start(settings.bos, source, tokenizer),
        seed=settings.seed,
        decoder=True,
    )
    cut = cut_texts(tokenizer, request)
    journal.begin(
        {
            "version": __version__, "settings": settings.to_json(), "model": file_digests(small),
            "teacher": file_digests(source),
        }
    )  # fmt: skip
    teacher, student = opened(larger, message), opened(smaller, message)
    require_pair(student, teacher)
    require_rows(teacher, cut.ids)
    start = measure_start(request.start, teacher, tokenizer)
    calibration = prepare_calibration(teacher, tokenizer, cut, start, progress=progress, message=message)
    journal.describe("digest of the windows", calibration.record.sha256)
    certifier = Certifier(teacher, calibration, 0.95, progress=progress)
    before = certifier.measure(student.model, "smaller model")
    recovery = recovery_on_text(
        teacher, tokenizer, texts, settings.general, calibration, start, settings.amount, settings.seed, journal,
        progress, message,
    )  # fmt: skip
    tasks = tasks_after(settings.evaluate, teacher.device, teacher.objective)
    work = None if tasks is None else prepare_evaluation(EvaluateOptions(tasks=tasks), message)

    def answers(checkpoint: Checkpoint, name: str) -> list[ModelAnswers]:
        return [] if work is None else [measure_model(work, checkpoint, tokenizer, name, start, progress)]

    compared = [*answers(teacher, teacher.name), *answers(student, student.name)]
    made = recovery.run(student, teacher, trained_weights(student), journal.directory("recovery", ()), progress)
    stored = stored_dtype(smaller.config, small) if small.gguf is None and settings.dtype in (None, "auto") else None
    model = student.model if stored is None else cast(student.model, stored)
    after = certifier.measure(model, "recovered model")
    compared += answers(wrap(as_dtype(model, teacher.model.dtype)), RECOVERED)
    notes = [] if made.kept else ["the training gained less than its standard error, so the weights are unchanged"]
    evaluation = None
    if work is not None:
        evaluation = evaluation_record(work, compared, fall_warnings(*compared[1:]), time.perf_counter() - started)
    record = RecoverRecord(
        version=__version__,
        name=student.name,
        teacher=teacher.name,
        objective=student.objective,
        layers=student.layers,
        teacher_layers=teacher.layers,
        window=calibration.record.window,
        texts=_texts(calibration, certifier.losses, before, after),
        recovery=made,
        settings=settings,
        evaluation=evaluation,
        notes=(*calibration.notes, *notes),
        versions=library_versions(),
        seconds=time.perf_counter() - started,
        out=None if out is None else str(out),
    )
    if out is None:
        return model, record
    return model, _written(model, record, small, own, certifier, student, overwrite, journal, started)


def _written(
    model: Any,
    record: RecoverRecord,
    small: Source,
    tokenizer: Any,
    certifier: Certifier,
    student: Checkpoint,
    overwrite: bool,
    journal: Journal,
    started: float,
) -> RecoverRecord:
    """Write the model, load it in a fresh process and compare; return the record with what was found."""
    out = record.out
    assert out is not None
    device = str(student.device)
    compute = torch.float32 if device == "cpu" and model.dtype.itemsize < 4 else None
    replaces = overwrite or journal.has_written(out)
    with written_model(model, small, tokenizer, out, overwrite=replaces) as folder:
        certifier.progress(0, 1, "loading the result in a fresh process")
        reload, _ = verify_reload(folder, certifier.inputs[:1], model, device=device, like=student, compute=compute)
        record = msgspec.structs.replace(record, check=reload_sentence(reload), seconds=time.perf_counter() - started)
        text = record.dump()
        journal.claim(out, text)
        (folder / RECORD).write_text(text, encoding="utf-8")
    return record


def _texts(calibration: Calibration, teacher: Any, before: Any, after: Any) -> tuple[RecoveredText, ...]:
    """Return the objective of the three models on the certify windows of every source."""
    texts = []
    for index, source in enumerate(calibration.record.sources):
        chosen = calibration.certify.source == index
        if not bool(chosen.any()):
            continue
        interval = mean_interval((after - before)[chosen].tolist())
        texts.append(
            RecoveredText(
                kind=source.kind, name=source.name, windows=int(chosen.sum()), teacher=finite(teacher[chosen].mean()),
                before=finite(before[chosen].mean()), after=finite(after[chosen].mean()), change=interval.loss,
                low=interval.low, high=interval.high,
            )
        )  # fmt: skip
    return tuple(texts)


# --- What a recovery trains on, also in shrink ------------------------------------------------------------------------

ENOUGH = 2**16
"""Windows that are read at most if the training is limited in time alone."""


def recovery_on_text(
    teacher: Checkpoint,
    tokenizer: Any,
    texts: Sequence[TextFile],
    general: str | None,
    calibration: Calibration,
    start: Start,
    amount: Amount,
    seed: int,
    journal: Journal,
    progress: Step,
    message: Callable[[str], None],
) -> Recovery:
    """Return the training on all windows of the texts that share nothing with selection and certify windows.

    An interrupted run continues with the windows of its journal: how many are sampled may depend on the time.
    """
    window, saved = calibration.record.window, journal.file("windows", ())
    if saved is not None and saved.exists():
        data = RecoveryData(**torch.load(saved, map_location="cpu", weights_only=True))
    else:
        held = [as_samples(part.inputs).main for part in (calibration.select, calibration.certify)]
        data = training_data(
            teacher, tokenizer, texts, general,
            start=start, window=window, wanted=ENOUGH if amount.tokens is None else -(-amount.tokens // window),
            held=held, seed=seed, seconds=amount.seconds, progress=progress, message=message,
        )  # fmt: skip
        if saved is not None:
            write_tensors(saved, {"windows": data.windows, "own": data.own, "sources": data.sources})
    return Recovery(data, calibration.select.inputs, _apart(calibration), amount, seed)


def recovery_on_windows(calibration: Calibration, amount: Amount, seed: int) -> Recovery:
    """Return the training on the windows to fit: images, pairs, recordings or labelled texts are not read again."""
    fit, record = calibration.fit.inputs, calibration.record
    names = {source.name: source.fit * record.window for source in record.sources if source.fit}
    return Recovery(RecoveryData(fit, len(fit), names), calibration.select.inputs, None, amount, seed)


def _apart(calibration: Calibration) -> Inputs | None:
    """Return the certify windows of the built-in text, if there are any besides those of the user's texts."""
    kinds = [source.kind for source in calibration.record.sources]
    if "built-in" not in kinds or len(set(kinds)) == 1:
        return None
    return calibration.certify.inputs[calibration.certify.source == kinds.index("built-in")]
