"""How long the rest of `shrink` takes, from the measured durations of its parts."""

from dataclasses import dataclass

from depthgauge._format import duration
from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.results.shrink_record import PlanRecord
from depthgauge.surgery.calibration import Calibration
from depthgauge.surgery.open_model import OpenedModel
from depthgauge.surgery.shrinker import PEERS, Shrinker
from depthgauge.surgery.shrunk_model import heal_batch
from depthgauge.surgery.speed import NEW_TOKENS, REPEATS
from depthgauge.surgery.student import Effort

JOINT = 3.0
"""About how long the repair of a block takes at the end, in durations of one during the search: it refits twice as many
maps, in two stages or in three times as many iterations."""
_SPEED_RUNS = 2 * (REPEATS + 1)
"""Runs of the two models when their speed is compared."""


@dataclass(frozen=True)
class PartCosts:
    """Measured seconds of parts of the work.

    - `window`, `token`: a forward pass of one window, and of one token; the latter is 0 for models that do not generate
    - `repair`: one repair of a block during the search; 0 without repair
    - `fresh`: starting a process that imports transformers and loads the model
    """

    window: float
    repair: float
    token: float
    fresh: float


@dataclass(frozen=True)
class ShrinkJob:
    """What is left to do after the dense model has run on the calibration windows.

    - `effort`, `layers`: how much work each step is
    - `count`: blocks to remove; with a limit on the loss, a guess
    - `certify`: number of certify windows
    - `is_planned`, `stops`: whether a plan says which blocks to remove, and whether the run stops after the search
    - `sizes`, `healed`: how many models are made and measured, and the windows on which each of them is trained
    - `writes`: whether the model is written and verified in a fresh process
    """

    effort: Effort
    layers: int
    count: int
    certify: int
    is_planned: bool = False
    sizes: int = 1
    healed: int = 0
    stops: bool = False
    writes: bool = False


def time_left(
    shrinker: Shrinker,
    opened: OpenedModel,
    calibration: Calibration,
    settings: ShrinkOptions,
    followed: PlanRecord | None,
    *,
    stops: bool = False,
    writes: bool = False,
) -> str:
    """Return a sentence about how long the rest takes, which is measured on a few windows.

    The run may follow a plan, stop after the search, or write the model.
    """
    layers, is_limited = len(shrinker.runner), followed is None and settings.max_increase is not None
    count = max(2, layers // 3)
    if followed is not None:
        count = len(followed.removed)
    elif settings.remove is not None:
        count = settings.count(layers, opened.checkpoint.name)
    job = ShrinkJob(
        shrinker.effort,
        layers,
        count,
        certify=len(calibration.certify),
        is_planned=followed is not None,
        sizes=count if is_limited else 1,
        healed=(settings.heal or 0) * heal_batch(calibration.record.window),
        stops=stops,
        writes=writes,
    )
    costs = PartCosts(shrinker.window_seconds, shrinker.repair_seconds(), shrinker.token_seconds(), opened.fresh)
    steps = "the search" if stops else "search, repair and measurement"
    then = ", and a new process that loads the result" if writes else ""
    return f"about {duration(seconds_left(job, costs))} left: {steps}{then}"


def seconds_left(job: ShrinkJob, costs: PartCosts) -> float:
    """Return the expected duration of a job.

    The objective after a removal or a repair needs about half of the model.
    """
    search = 0.0 if job.is_planned else _search(job, costs)
    return search if job.stops else search + job.sizes * _model(job, costs) + _end(job, costs)


def _search(job: ShrinkJob, costs: PartCosts) -> float:
    """Ranking, repair of the finalists, and exchanges, which only a given number of blocks has."""
    effort, fit = job.effort, job.effort.fit if costs.repair else 0
    ranked = job.layers + min(effort.breadth, job.layers) * max(0, job.count - 1)
    compared = effort.finalists * (1 + len(effort.steps)) * effort.select
    windows = 0.6 * effort.ranking * ranked + job.count * (0.6 * compared + 0.8 * fit)
    repairs: float = job.count * effort.finalists
    if job.sizes == 1:
        trials = 1 + len(PEERS) + effort.swaps
        windows += trials * (0.8 * fit + effort.select)
        repairs += trials * (1 + job.count) / 2  # gaps: from one run of blocks to single blocks
    return windows * costs.window + repairs * costs.repair


def _model(job: ShrinkJob, costs: PartCosts) -> float:
    """Repair of all kept blocks, training, and the loss on the certify windows."""
    effort, kept = job.effort, job.layers - job.count
    windows: float = job.certify + 4 * job.healed  # the dense model forward, the shrunk one forward and backward
    repair = 0.0
    if costs.repair:
        windows += 0.6 * kept * effort.select * len(effort.steps) + effort.fit
        repair = JOINT * kept * costs.repair
    return windows * costs.window + repair


def _end(job: ShrinkJob, costs: PartCosts) -> float:
    """The dense model on the certify windows, the curve, the comparison of speed, and the fresh process."""
    windows = job.certify + 6 * job.effort.select + _SPEED_RUNS
    seconds = windows * costs.window + _SPEED_RUNS * NEW_TOKENS * costs.token
    if job.writes:
        seconds += costs.fresh + 2 * NEW_TOKENS * costs.token
    return seconds
