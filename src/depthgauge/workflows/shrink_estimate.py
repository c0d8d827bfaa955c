"""How long `shrink` takes, part by part, and how much memory and disk space it needs.

The parts have the names of `ShrinkRecord.durations`. Everything is counted in windows that pass a block, and in windows
that pass the head; `PartCosts` has the seconds of both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from depthgauge.base.format import duration
from depthgauge.checkpoints.dense_states import STATES_SHARE
from depthgauge.checkpoints.given_inputs import prepared
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.load import Checkpoint, Placement
from depthgauge.checkpoints.samples import Inputs
from depthgauge.recovery.distillation import TRAINING, step_windows
from depthgauge.results.estimate_record import DIRECTORY, GGUF, PLAN, EstimateRecord
from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.results.shrink_record import PlanRecord
from depthgauge.surgery.block_sizes import requested_counts
from depthgauge.surgery.calibration import BUILT_IN_WINDOWS, SAMPLE_TOKENS
from depthgauge.surgery.gguf_layout import GgufLayout
from depthgauge.surgery.open_model import calibration_request
from depthgauge.surgery.part_costs import LIBRARIES, PartCosts, few_blocks, measure_costs, update_time
from depthgauge.surgery.speed import SECONDS
from depthgauge.surgery.student import HEADLESS, Effort, effort_of

_NEW_TOKENS = 32
"""Tokens that the new process generates, with a cache and without."""
_BACKWARD = 1.8
"""The backward pass of a block in forward passes, where the repair trains a part of its weights."""
_AFTER = 0.6
"""Share of the kept blocks after the first gap, which the repair changes: half for SmolLM2, nearly all for MiniLM."""
_REFIT = 5.0
"""Least squares of a block, in forward passes: three of them, and the products of the features."""
_REPAIRED = 0.35
"""Share of the weights of a block that the repair changes: the last maps of its sublayers."""
_MOVES = 6
"""How often the changed weights are copied: the original ones, before and after each stage, to the disk, and back."""
_WRITTEN = 1e9
"""Bytes that are written or copied per second."""
PROCESSES = (2, 4, 8)
"""Numbers of processes for which a run is estimated too."""
_DIVIDED = ("dense model", "search", "repair and comparison", "certification")
"""The parts of a run that processes divide among them."""


@dataclass(frozen=True)
class ShrinkJob:
    """What a run does.

    - `effort`, `layers`: how much work each step is
    - `counts`: blocks to remove, for each model that is made; with a limit on the loss, a guess
    - `certify`: number of certify windows
    - `window`: tokens per window
    - `samples`, `sample_tokens`: samples that are drawn from the model, and the tokens of each
    - `is_given`: whether the blocks are given
    - `repairs`: whether weights are repaired
    - `has_head`: whether the loss of a language model is measured
    - `makes`: what the run ends with: `PLAN`, `MEMORY`, `DIRECTORY` or `GGUF`
    - `stored`: bytes of a parameter in what is written
    - `task_tokens`: tokens that a model reads to answer the tasks, if there are any
    - `streams`: whether the weights are read in every pass over the blocks; nothing is then sampled or trained, and no
      speed is measured
    - `update`: the seconds in which a weight is changed by a training step in main memory, if the GPU has no room
    """

    effort: Effort
    layers: int
    counts: tuple[int, ...]
    certify: int
    window: int
    samples: int = 0
    sample_tokens: int = 0
    is_given: bool = False
    repairs: bool = True
    has_head: bool = True
    makes: str = DIRECTORY
    stored: float = 4.0
    task_tokens: int = 0
    streams: bool = False
    update: float = 0.0

    @property
    def finalists(self) -> int:
        """Sets of blocks that are repaired, for each size."""
        return (1 if self.is_given else self.effort.finalists) if self.repairs else 0

    @property
    def kept(self) -> float:
        """The share of blocks that the largest of the models keeps."""
        return 1 - self.counts[0] / self.layers


@dataclass(frozen=True)
class Work:
    """Work of a part of a run.

    - `blocks`, `heads`: windows that pass all blocks, and the head, in forward passes
    - `seconds`: what does not depend on the number of windows
    - `passes`: how often a streamed run reads all weights
    """

    blocks: float = 0.0
    heads: float = 0.0
    seconds: float = 0.0
    passes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        added = (self.blocks + other.blocks, self.heads + other.heads, self.seconds + other.seconds)
        return Work(*added, self.passes + other.passes)

    def resident(self, costs: PartCosts) -> float:
        """Return the seconds of a run that keeps the weights in memory."""
        return self.blocks * costs.blocks + self.heads * costs.head + self.seconds

    def streamed(self, costs: PartCosts) -> float:
        """Return the seconds of a run that reads the weights in every pass over the blocks."""
        return self.resident(costs) + self.passes * costs.passed

    def divided(self, costs: PartCosts, processes: int) -> float:
        """Return the seconds of a run whose windows are divided over processes."""
        return self.seconds + (self.resident(costs) - self.seconds) / processes


def work_of(job: ShrinkJob, costs: PartCosts) -> dict[str, Work]:
    """Return the work of every part of a run, in order; parts that a run does not have are left out."""
    effort, sizes = job.effort, len(job.counts)
    parts = {
        "loading": Work(8, 8, costs.load + costs.hashed, 1),
        "calibration windows": Work() if job.streams else Work(seconds=_sampling(job, costs)),
        "dense model": Work(effort.fit + effort.select + 4, effort.select + 4, passes=2),
        "search": Work() if job.is_given else _search(job),
        "repair and comparison": _compared(job, costs),
    }
    if job.makes != PLAN:
        kept = job.kept
        reads = -(-job.certify // costs.batch)
        everything = Work(job.certify, job.certify, passes=reads)
        tasks = job.task_tokens / job.window
        made = Work(kept * job.certify, job.certify, passes=kept * reads)
        parts["certification"] = everything if job.makes == DIRECTORY else everything + _times(sizes, made)
        if not job.streams:  # both models read a prompt; then the time limit is what it takes at most
            parts["speed"] = _times(sizes, Work(1 + kept, 0, SECONDS))
        if tasks:
            parts["tasks"] = Work(tasks * (1 + sizes * kept), tasks * (1 + sizes))
        # The new process computes the windows one by one, and both processes hash all tensors.
        slower = kept * job.certify * max(0.0, costs.token - costs.window)
        load, spoken = kept * (costs.load + 2 * costs.hashed), _NEW_TOKENS * kept * costs.token
        if job.makes == GGUF:
            parts["reading the file back"] = _times(sizes, Work(4, 4, load, kept))
        elif job.makes == DIRECTORY:
            parts["writing"] = _times(sizes, Work(seconds=kept * job.stored * costs.parameters / _WRITTEN))
            parts["check in a new process"] = _times(sizes, made + Work(4, 4, load + spoken + slower))
    return {name: work for name, work in parts.items() if work != Work()}


def _times(count: int, work: Work) -> Work:
    return Work(count * work.blocks, count * work.heads, count * work.seconds, count * work.passes)


def _sampling(job: ShrinkJob, costs: PartCosts) -> float:
    return -(-job.samples // max(1, costs.rows)) * job.sample_tokens * costs.step


def _search(job: ShrinkJob) -> Work:
    """Rankings and exchanges. A set of blocks needs the blocks after its first difference, half of them on average."""
    effort, most, sizes = job.effort, job.counts[-1], len(job.counts)
    breadth = min(effort.breadth, job.layers)
    exchanged = sum(job.counts) if effort.swaps else 0
    first = effort.ranking / 2 * job.layers
    ranked = effort.ranking * (breadth * (most + sizes) + sizes * effort.swaps)
    measured = effort.select * (most + exchanged)
    return Work(
        0.5 * (first + ranked) + 0.6 * measured,
        first + ranked + measured,
        passes=0.6 * (1 + 2 * most + sizes + 2 * exchanged),
    )


def _compared(job: ShrinkJob, costs: PartCosts) -> Work:
    """The sets of blocks without repair, least squares of the best ones, and the training of one."""
    effort, after = job.effort, _AFTER * job.kept
    bare = Work(0.5 * 4 * effort.select, 4 * effort.select, passes=1)
    steps = effort.steps * (1 if job.has_head else HEADLESS)
    trained = 0 if job.streams or not job.repairs else steps * step_windows(effort.fit, job.window)
    moves = _MOVES * after * _REPAIRED * costs.block_parameters * costs.itemsize / _WRITTEN
    refit = Work(after * (_REFIT * effort.fit + 2 * effort.select), 2 * effort.select, seconds=moves, passes=5 * after)
    training = Work(
        trained * (1 + job.kept * (1 + _BACKWARD)), 4 * trained,
        seconds=steps * _update(job, costs) if trained else 0,
    )  # fmt: skip
    return _times(len(job.counts), bare + _times(job.finalists, refit) + training)


def _update(job: ShrinkJob, costs: PartCosts) -> float:
    """Return how much longer a training step takes because the weights are changed in main memory."""
    return job.update * _AFTER * _trained(job, costs)


def _trained(job: ShrinkJob, costs: PartCosts) -> float:
    """Return how many weights are trained at most."""
    if job.streams:
        return 0
    share = _REPAIRED if job.repairs else 0
    return share * job.kept * costs.block_parameters


def _states(job: ShrinkJob, costs: PartCosts) -> float:
    """Return the bytes of the dense model's states on the windows that are kept."""
    windows = job.effort.select + (job.effort.fit if job.repairs else 0)
    return (job.layers + 1) * windows * costs.tokens * costs.width * costs.itemsize


def _states_there(job: ShrinkJob, costs: PartCosts) -> float:
    """Return the bytes of these states on the device: all of them if they have room, or none."""
    states = _states(job, costs)
    return states if states < STATES_SHARE * costs.room else 0


def estimate_shrink(
    whole: Checkpoint,
    given: GivenWindows | None,
    settings: ShrinkOptions,
    placement: Placement,
    plan: PlanRecord | None,
    stored: torch.dtype | GgufLayout | None,
    makes: str,
    task_tokens: int = 0,
) -> EstimateRecord:
    """Estimate a run before weights are loaded.

    Args:
        whole: the model, described by its configuration; see `describe_model`.
        given: the images, pairs or recordings that it reads; None for text.
        settings: the options.
        placement: how the weights would be loaded, or streamed.
        plan: the plan that the run follows, if there is one.
        stored: in which dtype, or in the types of which GGUF file, the result is written.
        makes: what the run ends with.
        task_tokens: tokens that a model reads to answer the tasks.

    Raises:
        CheckpointError: no small model can be built from the configuration, or it cannot be run.
    """
    source, effort = whole.source, effort_of(settings)
    certify, samples, length = effort.certify, 0, 0
    example: Inputs
    if given is not None:
        whole, example = prepared(whole, given, settings), given.inputs[:1]
    else:
        request = calibration_request(settings, whole.config, source, whole.objective == "loss")
        example = torch.zeros(1, request.window, dtype=torch.long)
        pieces = -(-request.window // SAMPLE_TOKENS)  # of each sampled window
        certify += request.samples.certify * bool(request.texts) + BUILT_IN_WINDOWS
        samples, length = pieces * request.samples.total, -(-request.window // pieces)
    parts = few_blocks(whole, placement)
    costs = measure_costs(parts, example, samples=samples, sample_tokens=length, streams=placement.stream)
    removed = settings.layers_to_remove(whole.layers, whole.name) if plan is None else plan.removed
    if removed is not None:
        counts: tuple[int, ...] = (len(removed),)
    elif settings.max_increase is not None:
        counts = tuple(range(1, max(3, whole.layers // 3 + 1)))
    else:
        counts = requested_counts(settings, whole, stored)
    written = costs.files / costs.parameters
    if not isinstance(stored, GgufLayout):
        written = (stored or whole.model.dtype).itemsize
    job = ShrinkJob(
        effort,
        whole.layers,
        counts,
        certify=certify,
        window=costs.tokens,
        samples=samples,
        sample_tokens=length,
        is_given=removed is not None,
        repairs=not settings.no_repair,
        has_head=whole.objective == "loss",
        makes=makes,
        stored=written,
        task_tokens=task_tokens,
    )
    device = parts.few.device
    if device.type != "cpu":
        if not (there := _states_there(job, costs)):
            costs = replace(costs, blocks=costs.blocks + costs.moved)
        if TRAINING * _trained(job, costs) > costs.room - there:
            job = replace(job, update=update_time(device))
    streamed = {}
    if source is not None:
        streamed = {name: one.streamed(costs) for name, one in work_of(replace(job, streams=True), costs).items()}
    work = work_of(job, costs)
    resident = {name: one.resident(costs) for name, one in work.items()}
    divided = {
        str(count): sum(one.divided(costs, count if name in _DIVIDED else 1) for name, one in work.items())
        for count in PROCESSES
    }
    gpu, ram, disk = needed_bytes(replace(job, streams=placement.stream), costs, device.type)
    return EstimateRecord(
        **costs.described(parts),
        parts=streamed if placement.stream else resident,
        streamed=streamed,
        processes={} if placement.stream else divided,
        gpu=round(gpu),
        ram=round(ram),
        disk=round(disk),
    )


def needed_bytes(job: ShrinkJob, costs: PartCosts, device: str) -> tuple[float, float, float]:
    """Return the largest number of bytes on a GPU, in memory and on disk at a time."""
    size = costs.itemsize
    weights, blocks = float(costs.parameters * size), costs.block_parameters
    smaller = weights - (1 - job.kept) * blocks * size
    if job.streams:  # one block is in memory, and the next one
        weights = smaller = weights - (1 - 2 / job.layers) * blocks * size
    states, changed = _states(job, costs), _trained(job, costs)
    originals, training = 2 * size * changed, TRAINING * changed
    # The journal has the weights of every repair.
    kept = job.finalists * _REPAIRED * job.kept * blocks * size
    written = len(job.counts) * job.stored * (costs.parameters - (1 - job.kept) * blocks)
    disk = written + kept if job.makes in (DIRECTORY, GGUF) else 0
    fresh = smaller if job.makes == DIRECTORY else 0
    libraries = LIBRARIES["cpu" if device == "cpu" else "cuda"] * (2 if fresh else 1)
    if device == "cpu":
        gradients = size * changed
        model = weights + states + max(originals + gradients + training + 3 * costs.output, smaller)
        return 0, model + fresh + libraries, disk
    # What has no room on the GPU is in main memory, where a streamed model has the pages that it copies.
    there = _states_there(job, costs)
    trained = 0 if job.update else training
    checked = min(fresh, costs.room - there)
    gpu = weights + there + max(trained, 3 * costs.output, checked)
    ram = libraries + (weights if job.streams else originals)
    return gpu, ram + states - there + training - trained + fresh - checked, disk


def time_left(estimate: EstimateRecord, done: Mapping[str, float]) -> str:
    """Return a sentence about how long the rest of a run takes, given how long its first parts took."""
    known = [name for name in done if name in estimate.parts]
    slower = sum(done[name] for name in known) / max(1e-9, sum(estimate.parts[name] for name in known))
    left = sum(seconds for name, seconds in estimate.parts.items() if name not in done)
    return f"about {duration(left * slower)} left"
