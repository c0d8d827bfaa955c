"""Stub."""

from dataclasses import dataclass, field

from depthgauge._records import ArrayRecord
from depthgauge.checkpoints.samples import Inputs


@dataclass(frozen=True, eq=False, repr=False)
class RecoveryData(ArrayRecord):
    """The windows to train on."""

    windows: Inputs
    own: int
    sources: dict[str, int] = field(default_factory=dict)


def training_data(teacher, tokenizer, texts, general, *, start, window, wanted, held, seed, seconds, progress, message):
    import torch

    from depthgauge.checkpoints.windows import surround, tokenize_text

    length = window - len(start.before) - len(start.after)
    bodies = torch.cat(
        [tokenize_text(tokenizer, text, wanted=wanted, length=length, seed=seed).bodies(length) for text in texts]
    )
    windows = surround(bodies, start.before, start.after)
    return RecoveryData(windows, len(windows), {"stub": windows.numel()})
