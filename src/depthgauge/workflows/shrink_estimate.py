"""How long the rest of `shrink` takes, from the measured durations of its parts."""

from dataclasses import dataclass

from depthgauge._format import duration
from depthgauge.surgery.distill import windows_per_step
from depthgauge.surgery.shrunk_model import HEAL_TOKENS
from depthgauge.surgery.speed import NEW_TOKENS, REPEATS
from depthgauge.surgery.student import Effort

_SPEED_RUNS = 2 * (REPEATS + 1)
"""Runs of the two models when their speed is compared."""
_TRAINED = 2.5
"""About how long training on a window takes, in forward passes of the dense model: the kept blocks after the first gap
forward and backward, and the head three times."""
_HEALED = 4.0
"""The same where all blocks are trained."""
ADVISED_STEPS = 200
"""Steps of healing that a result without healing tells the cost of."""


@dataclass(frozen=True)
class PartCosts:
    """Measured seconds: a forward pass of one window, of one token (0 for models that do not generate), a new process.

    The new process imports transformers and loads the model.
    """

    window: float
    token: float
    fresh: float


@dataclass(frozen=True)
class ShrinkJob:
    """What is left to do after the dense model has run on the calibration windows.

    - `effort`, `layers`: how much work each step is
    - `counts`: blocks to remove, for each model that is made; with a limit on the loss, a guess
    - `certify`: number of certify windows
    - `window`: tokens per window
    - `is_given`, `stops`: whether the blocks are given, and whether the run stops after the search
    - `repairs`, `healed`: whether weights are repaired, and the steps of healing
    - `writes`: whether the model is written and verified in a fresh process
    - `task_tokens`: tokens that a model reads to answer the tasks, if there are any
    """

    effort: Effort
    layers: int
    counts: tuple[int, ...]
    certify: int
    window: int
    is_given: bool = False
    repairs: bool = True
    healed: int = 0
    stops: bool = False
    writes: bool = False
    task_tokens: int = 0


def time_left(job: ShrinkJob, costs: PartCosts, is_most: bool) -> str:
    """Return a sentence about how long the rest of a run takes, about or at most."""
    parts = "search and comparison" if job.stops else "search, repair and measurement"
    parts += ", the tasks on both models" if job.task_tokens and not job.stops else ""
    then = ", and a new process that loads the result" if job.writes else ""
    return f"{'at most' if is_most else 'about'} {duration(seconds_left(job, costs))} left: {parts}{then}"


def seconds_left(job: ShrinkJob, costs: PartCosts) -> float:
    """Return the expected duration of a job. The objective after a removal needs about half of the model."""
    search = 0.0 if job.is_given else _search(job, costs)
    made = len(job.counts) * _compared(job, costs)
    if job.stops:
        return search + made
    dense = (job.certify + job.task_tokens / job.window) * costs.window
    return search + made + len(job.counts) * _model(job, costs) + dense


def _search(job: ShrinkJob, costs: PartCosts) -> float:
    """Ranking and exchanges. All sets of a ranking share the states before their first difference."""
    effort = job.effort
    ranked = job.layers / 2 + (min(effort.breadth, job.layers) + 1) * job.counts[-1] + len(job.counts) * effort.swaps
    exchanged = sum(job.counts) if effort.swaps else 0
    windows = effort.ranking * ranked + effort.select * (job.counts[-1] + exchanged)
    return 0.6 * windows * costs.window


def _compared(job: ShrinkJob, costs: PartCosts) -> float:
    """The sets of blocks without repair, and the repair of the best ones."""
    effort = job.effort
    windows = 0.6 * (5 * effort.select + min(effort.breadth, job.layers) * effort.ranking)
    finalists = (1 if job.is_given else effort.finalists) if job.repairs else 0
    trained = effort.steps * windows_per_step(effort.tokens, effort.fit, job.window)
    return (windows + finalists * (_TRAINED * trained + 3 * effort.fit + 2 * effort.select)) * costs.window


def _model(job: ShrinkJob, costs: PartCosts) -> float:
    """Healing, the loss on the certify windows, the tasks, the comparison of speed, and the fresh process."""
    windows = job.certify + job.task_tokens / job.window + _SPEED_RUNS
    seconds = windows * costs.window + _SPEED_RUNS * NEW_TOKENS * costs.token
    seconds += heal_seconds(job.healed, job.effort, job.window, costs.window)
    if job.writes:
        seconds += costs.fresh + 2 * NEW_TOKENS * costs.token
    return seconds


def heal_seconds(steps: int, effort: Effort, window: int, seconds: float) -> float:
    """Return the expected duration of healing: a forward pass of a window takes `seconds`."""
    return steps * windows_per_step(HEAL_TOKENS, effort.fit, window) * _HEALED * seconds


def heal_advice(steps: int, seconds: float) -> str:
    """Return what healing would cost, and what it gave where it was measured (benchmarks/shrink.py --heal 200)."""
    return (
        f"--heal {steps} would train the kept blocks for about {duration(seconds)} more. Measured: 200 steps lowered "
        "the increase of SmolLM2-135M without 7 blocks from 0.24 to 0.20 nats per token, and did not help Gemma-3-270m "
        "without 4 blocks; training that does not help is undone"
    )
