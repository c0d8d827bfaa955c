"""The images, pairs or recordings of a shrink, in three parts without overlap: to fit, to select and to certify."""

import torch

from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.results.shrink_record import CalibrationRecord, SourceRecord
from depthgauge.surgery.calibration import Calibration, CalibrationPart, windows_digest
from depthgauge.surgery.cut_texts import CalibrationSizes


def given_calibration(given: GivenWindows, sizes: CalibrationSizes, tokens: int) -> Calibration:
    """Cut different windows, which are in random order, into three parts; each one becomes `tokens` tokens."""
    rows = sizes.cut(torch.arange(sizes.total))
    parts = [CalibrationPart(given.inputs[one], torch.zeros(len(one), dtype=torch.long)) for one in rows]
    source = SourceRecord(
        kind=given.kind, name=given.source, sha256=given.digest,
        fit=sizes.fit, select=sizes.select, certify=sizes.certify,
    )  # fmt: skip
    digest = windows_digest(parts)
    record = CalibrationRecord(window=tokens, bos=None, bos_reason="", sources=(source,), sha256=digest)
    fit, select, certify = parts
    return Calibration(record, fit, select, certify)
