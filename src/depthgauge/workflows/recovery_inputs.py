"""Choose what a recovery trains on, and how long: for `recover`, and for `shrink --recover`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from depthgauge.base.io import write_tensors
from depthgauge.base.journal import Journal
from depthgauge.base.progress import Step
from depthgauge.checkpoints.inputs.samples import Inputs, as_samples
from depthgauge.checkpoints.inputs.text_files import TextFile
from depthgauge.checkpoints.tasks.language import Start
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.recovery.recover_model import Recovery
from depthgauge.recovery.training_data import RecoveryData, training_data
from depthgauge.results.recover_record import Amount
from depthgauge.surgery.calibration import Calibration

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
