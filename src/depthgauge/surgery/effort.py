"""How much work `--effort` stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.surgery.guarantee import windows_needed


@dataclass(frozen=True)
class Effort:
    """Numbers of windows and candidates.

    - `fit`, `select`, `certify`: windows of each part
    - `ranking`: selection windows on which all candidates are ranked
    - `breadth`: candidates that are ranked at each removal after the first
    - `finalists`: candidates that are compared after repair, on all selection windows
    - `swaps`: exchanges of a removed and a kept block that are tried at the end
    - `steps`: step lengths of the repair that are compared, besides 0
    - `window`: tokens per window, unless the model's context is shorter
    """

    fit: int
    select: int
    certify: int
    ranking: int
    breadth: int
    finalists: int
    swaps: int
    steps: tuple[float, ...]
    window: int = 512


EFFORT: Mapping[str, Effort] = {
    "quick": Effort(32, 8, 60, 4, 8, 2, 0, (1.0,), window=256),
    "default": Effort(320, 48, 120, 12, 12, 3, 8, (1.0, 0.5)),
    "high": Effort(640, 64, 240, 32, 10**6, 6, 48, (1.0, 0.7, 0.4)),
}


def effort_of(settings: ShrinkOptions) -> Effort:
    """Return the effort, with enough certify windows for the requested confidence."""
    effort = EFFORT[settings.effort]
    return replace(effort, certify=max(effort.certify, windows_needed(confidence=settings.confidence)))
