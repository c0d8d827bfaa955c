"""The images of a shrink, in three parts without overlap: to fit the repair, to select the plan, to certify."""

import torch

from depthgauge.checkpoints.image_files import ImageWindows
from depthgauge.results.shrink_record import CalibrationRecord, SourceRecord
from depthgauge.surgery.calibration import Calibration, CalibrationPart, windows_digest
from depthgauge.surgery.cut_texts import CalibrationSizes


def image_calibration(images: ImageWindows, sizes: CalibrationSizes, tokens: int) -> Calibration:
    """Cut different images, which are in random order, into three parts; each image becomes `tokens` tokens."""
    rows = sizes.cut(torch.arange(sizes.total))
    parts = [CalibrationPart(images.inputs[one], torch.zeros(len(one), dtype=torch.long)) for one in rows]
    source = SourceRecord(
        kind="images", name=images.source, sha256=images.digest,
        fit=sizes.fit, select=sizes.select, certify=sizes.certify,
    )  # fmt: skip
    digest = windows_digest(parts)
    record = CalibrationRecord(window=tokens, bos=None, bos_reason="", sources=(source,), sha256=digest)
    return Calibration(record, *parts)
