"""Train a student towards its teacher with transformers' Trainer.

The trainer brings the loop, resuming, and several processes (DDP, FSDP) by accelerate. What is added here: the loss
(`Pair`), a rate that falls to zero with the tokens or with the time, whichever comes first, measurements on the way,
and what to do if memory runs out or a loss is not finite.
"""

import copy
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn
from torch.utils.data import SequentialSampler

from depthgauge.base.errors import install_command, is_out_of_memory
from depthgauge.base.format import counted
from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.source.library import CheckpointError, quiet, transformers
from depthgauge.recovery.divergence import APART, SELECT, Pair, trained_alone
from depthgauge.results.record import finite
from depthgauge.results.recover_record import NO_GAIN, TIME_OVER, TOKENS_DONE, Amount, RecoveryPoint

T = TypeVar("T")
RATE = 0.003
"""Largest learning rate, as a share of the median size (root mean square) of the trained matrices, because AdamW moves
every weight by about the rate: 1.2e-4 for Gemma-3-270m and 5.7e-4 for SmolLM2-135M. On both, 0.001 and 0.01 were worse
after 100 steps."""
STEP_TOKENS = 4096
"""About how many tokens each step takes. Two and four times as many were worse after as many tokens, on both."""
SHARE = 24
"""Each step takes at most one window of this many: for the same number of tokens, small steps reached more than large
ones (2,048 against 8,192 tokens on SmolLM2-135M, 96 against 288 on MiniLM)."""
TRAINING = 16
"""Bytes that training takes per weight: a copy in float32, its gradient, and the two moments of AdamW."""
FASTEST = 10**6
"""More tokens than a training can take in a second, for one that is limited in time alone."""
WARMUP = 20
"""Steps during which the rate grows; at most a tenth of all."""
POINTS, MEASURED = 10, 5
"""Measurements on the way, at most; at least this many windows are trained on for each that is measured."""
PATIENCE = 2
"""Measurements without a gain larger than its standard error after which `stops` ends the training."""
SAVE_EVERY = 60.0
"""Seconds between two savings, at least."""


@dataclass(frozen=True)
class Training:
    """How much to train, and how.

    - `steps`, `batch`: optimizer steps at most, and windows of each
    - `tokens`: tokens of a window
    - `rate`: the largest learning rate
    - `seconds`: a limit in time, or None
    - `stops`: end as soon as the selection windows gain no more
    - `points`: measurements after the first one
    - `save_every`: seconds between two savings
    """

    steps: int
    batch: int
    tokens: int
    rate: float
    seconds: float | None = None
    stops: bool = False
    points: int = POINTS
    save_every: float = SAVE_EVERY

    @classmethod
    def of(cls, amount: Amount, windows: int, tokens: int, rate: float, measured: int) -> "Training":
        """Return the training for an amount, on so many windows of so many tokens; `measured` others are measured."""
        batch = step_windows(windows, tokens)
        most = FASTEST * (amount.seconds or 0.0) if amount.tokens is None else amount.tokens
        steps = max(1, round(most / (batch * tokens)))
        points = max(1, min(POINTS, steps * batch // (MEASURED * measured)))
        return cls(steps, batch, tokens, rate, amount.seconds, amount.stops, points)


@dataclass(frozen=True)
class Fit:
    """What is done so that training fits into memory, in the order of what it costs.

    - `rows`: windows that are computed together
    - `recomputes`: compute activations again in the backward pass instead of keeping them
    - `in_bytes`: weights in bfloat16 with stochastic rounding, and moments of AdamW in 8 bits (extra `train`)
    """

    rows: int
    recomputes: bool = False
    in_bytes: bool = False

    def smaller(self) -> "Fit | None":
        """Return what needs less memory, or None."""
        if self.rows > 1:
            return replace(self, rows=self.rows // 2)
        if not self.recomputes:
            return replace(self, recomputes=True)
        return None if self.in_bytes or find_spec("torchao") is None else replace(self, in_bytes=True)

    def sentences(self, batch: int) -> tuple[str, ...]:
        """Say what was done."""
        said = {
            f"{counted(self.rows, 'window')} at a time, gradients of {batch} added": self.rows < batch,
            "activations computed again in the backward pass": self.recomputes,
            "weights in bfloat16 with stochastic rounding, moments of AdamW in 8 bits": self.in_bytes,
        }
        return tuple(sentence for sentence, is_true in said.items() if is_true)


@dataclass(frozen=True, eq=False)
class Trained:
    """What a training did: the losses on the selection windows at its start and end, and the way between them."""

    before: Float[Tensor, " select"]
    after: Float[Tensor, " select"]
    curve: tuple[RecoveryPoint, ...]
    steps: int
    seconds: float
    how: tuple[str, ...]
    ended: str


def step_windows(windows: int, tokens: int) -> int:
    """Return how many of these windows, with so many tokens each, a step takes.

    >>> step_windows(4000, 512), step_windows(192, 512), step_windows(48, 256)
    (8, 8, 2)
    """
    return max(1, min(round(STEP_TOKENS / tokens), windows // SHARE))


class TrainingMemoryError(CheckpointError):
    """Memory is too small to train a model, in any of the ways of `Fit`."""


class _NotFiniteError(Exception):
    """A loss that is NaN or infinite."""


def _processes() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def usual_rate(weights: Sequence[nn.Parameter]) -> float:
    """Return `RATE` times the median root mean square of the matrices among these weights."""
    sizes = [float(weight.detach().float().square().mean().sqrt()) for weight in weights if weight.dim() > 1]
    return RATE * statistics.median(sizes) if sizes else RATE * 0.02


def distil(
    pair: Pair,
    weights: Sequence[nn.Parameter],
    order: Sequence[int],
    training: Training,
    *,
    folder: Path | None = None,
    progress: Step = silent,
) -> Trained:
    """Train these weights of the student in place, on the windows in this order.

    If memory runs out, it starts again with less (`Fit`). After a loss that is not finite, it continues once from the
    last saved state at half the rate. An interrupted training with the same `folder` is continued.

    Raises:
        TrainingMemoryError: memory is too small for any way to train.
        CheckpointError: a loss is not finite for the second time.
    """
    each = -(-training.batch // _processes())
    initial, slower = [one.detach().to("cpu", copy=True) for one in weights], 1.0
    with ExitStack() as stack:
        place = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="depthgauge-")))
        place = _of_first(place)  # FSDP saves a part of the state in each process
        known = place / "fit.json"  # saved states belong to a way to train
        fit = Fit(each if pair.checkpoints[0].batched else 1)
        if known.exists():
            fit = Fit(**json.loads(known.read_text()))
        while True:
            try:
                with _divided(pair, weights) as (model, own):
                    made = _train(model, own, initial, order, training, fit, slower, place, progress)
                slow = () if slower == 1 else ("half the learning rate, after a loss that was not finite",)
                return replace(made, how=(*fit.sentences(each), *slow))
            except _NotFiniteError as error:
                if slower < 1:
                    raise CheckpointError(
                        f"the training of {pair.checkpoints[0].name} ended in a loss that is not finite, also at half "
                        "the learning rate; leave the recovery out, or use --dtype float32"
                    ) from error
                slower = 0.5
            except Exception as error:
                less = fit.smaller()
                if not is_out_of_memory(error):
                    raise
                if less is None:
                    help_is = f"run {install_command('train')}, for an optimizer of 6 bytes per weight instead of 16"
                    raise TrainingMemoryError(
                        f"there is not enough memory to train {pair.checkpoints[0].name}, one window at a time and "
                        f"with activations computed again; {'use a larger GPU' if fit.in_bytes else help_is}"
                    ) from error
                fit = less
                known.write_text(json.dumps(asdict(fit)))
            torch.cuda.empty_cache()


@contextmanager
def _divided(pair: Pair, weights: Sequence[nn.Parameter]) -> Iterator[tuple[Pair, Sequence[nn.Parameter]]]:
    """Yield the pair and the weights to train: with FSDP, of a copy, whose weights are gathered at the end.

    FSDP divides the models of the copy among the processes for good; the models themselves wait in main memory.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        yield pair, weights
        return
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    device = pair.checkpoints[0].device
    pair.to("cpu")
    try:
        student, teacher = (replace(one, model=copy.deepcopy(one.model).to(device)) for one in pair.checkpoints)
        made = Pair(student, teacher, pair.windows)
        twins = dict(zip(pair.parameters(), made.parameters(), strict=True))
        yield made, [twins[weight] for weight in weights]
        for part in made.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
        for own, other in zip(pair.student.parameters(), made.student.parameters(), strict=True):
            own.data = (other.full_tensor() if isinstance(other, DTensor) else other).detach().cpu()
    finally:
        pair.to(device)


def _train(
    pair: Pair,
    weights: Sequence[nn.Parameter],
    initial: Sequence[Tensor],
    order: Sequence[int],
    training: Training,
    fit: Fit,
    slower: float,
    folder: Path,
    progress: Step,
) -> Trained:
    """Train from the last saved state in `folder`, or else from the `initial` weights."""
    library, device = transformers(), pair.checkpoints[0].device
    dtype = torch.bfloat16 if fit.in_bytes else torch.float32
    for weight in pair.student.parameters():  # small steps vanish in half precision
        weight.data = weight.data.to(dtype) if weight.is_floating_point() else weight.data
    for weight, value in zip(weights, initial, strict=True):
        weight.data = value.to(weight.device, dtype, copy=True)  # the teacher may have the same tensors
    if fit.recomputes:
        pair.student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    state = _Observed(pair, training, progress)
    together = fit.rows * _processes()
    parts = -(-training.batch // together)
    places = []  # of windows: parts · together in each step, of which some may be empty, −1
    for start in range(0, len(order), training.batch):
        places += [*order[start : start + training.batch], *[-1] * (parts * together - training.batch)]

    class Distillation(library.Trainer):  # type: ignore[misc, name-defined]
        """The loop of transformers with the divergence as the loss."""

        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **keywords: Any) -> Tensor:
            """Return the divergence on a batch: the mean over the batches of a step is that over its windows."""
            index = inputs["index"]
            windows = index[index >= 0]
            loss: Tensor = model(windows if len(windows) else index[:1] * 0)
            return loss * (len(windows) / fit.rows * (parts * together / training.batch))

        def training_step(self, *args: Any, **keywords: Any) -> Tensor:
            """Raise if the loss is not finite, before the weights change."""
            loss: Tensor = super().training_step(*args, **keywords)
            if not bool(loss.isfinite()):
                raise _NotFiniteError
            return loss

        def create_optimizer(self, *args: Any, **keywords: Any) -> Any:
            """Return AdamW, in 8 bits if memory is short."""
            if fit.in_bytes:
                self.optimizer = _in_bytes(weights, training.rate)
            return super().create_optimizer(*args, **keywords)

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            """Return the rate: linear growth, then a linear fall to zero."""
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: slower * state.share_of_rate(step)
            )
            self._created_lr_scheduler = True
            return self.lr_scheduler

    class Observer(library.TrainerCallback):  # type: ignore[misc, name-defined]
        """Measures, saves and ends the training."""

        def on_train_begin(self, args: Any, about: Any, control: Any, **keywords: Any) -> None:
            state.resume(about.log_history)
            if not about.log_history:
                trainer.log(state.measured(trainer.model_wrapped))

        def on_step_end(self, args: Any, about: Any, control: Any, **keywords: Any) -> None:
            control.should_save, control.should_training_stop = state.tick(about.global_step)
            if state.is_point(about.global_step):
                trainer.log(state.measured(trainer.model_wrapped))
                control.should_training_stop |= training.stops and state.has_ended
                control.should_log = True  # which logging has reset: the loss of the training comes next

    with quiet(), trained_alone(pair, [*weights]):
        arguments = library.TrainingArguments(
            output_dir=str(folder), max_steps=training.steps, per_device_train_batch_size=fit.rows,
            gradient_accumulation_steps=parts, learning_rate=training.rate,
            adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, bf16=device.type == "cuda" and not fit.in_bytes,
            use_cpu=device.type == "cpu", save_strategy="no", logging_strategy="no", logging_nan_inf_filter=False,
            save_total_limit=1, report_to=[], disable_tqdm=True, remove_unused_columns=False,
            dataloader_pin_memory=False, log_level="critical",
        )  # fmt: skip
        if _processes() == 1:
            arguments._n_gpu = min(1, arguments.n_gpu)  # the models are on one GPU, although others may be visible
        trainer = Distillation(
            model=pair, args=arguments, train_dataset=places,
            data_collator=lambda rows: {"index": torch.tensor(rows)}, callbacks=[Observer],
        )  # fmt: skip
        trainer.remove_callback(library.PrinterCallback)
        saved = _of_first(_last_saved(folder))
        trainer.train(resume_from_checkpoint=None if saved is None else str(saved))
    history, steps = trainer.state.log_history, int(trainer.state.global_step)
    if fit.recomputes:
        pair.student.gradient_checkpointing_disable()
    return Trained(*state.ends, _curve(history, training), steps, state.elapsed, (), state.ended)


class _Observed:
    """The clock and the measurements of a training.

    - `elapsed`: seconds so far, those of an interrupted run included; equal in all processes
    - `ends`: the losses on the selection windows at the start and at the last measurement
    - `ended`: why the training ended
    """

    def __init__(self, pair: Pair, training: Training, progress: Step) -> None:
        self.pair, self.training, self.progress = pair, training, progress
        self.elapsed, self.ended, self._earlier = 0.0, TOKENS_DONE, 0.0
        self._started, self._saved_at = time.perf_counter(), 0.0
        self._losses: list[Tensor] = []

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        return self._losses[0], self._losses[-1]

    def resume(self, history: Sequence[dict[str, Any]]) -> None:
        """Continue the clock and the measurements of an interrupted training."""
        measured = [entry for entry in history if "losses" in entry]
        self._losses = [torch.tensor(entry["losses"], dtype=torch.float64) for entry in measured]
        self._earlier = float(measured[-1]["seconds"]) if measured else 0.0
        self._started, self._saved_at = time.perf_counter(), self._earlier

    def share_done(self, step: int) -> float:
        """Return how much of the training is done after a step, by tokens or by time."""
        late = 0.0 if self.training.seconds is None else self.elapsed / self.training.seconds
        return min(1.0, max(step / self.training.steps, late))

    def share_of_rate(self, step: int) -> float:
        """Return the rate of a step as a share of the largest one."""
        warm = max(1, min(WARMUP, self.training.steps // 10))
        return min(1.0, (step + 1) / warm) * (1 - self.share_done(step))

    def tick(self, step: int) -> tuple[bool, bool]:
        """Report progress; return whether to save now, and whether the time is over."""
        self.elapsed = _of_first(self._earlier + time.perf_counter() - self._started)
        self.progress(int(100 * self.share_done(step)), 100, "percent of the recovery")
        is_late = self.training.seconds is not None and self.elapsed >= self.training.seconds
        if is_late:
            self.ended = TIME_OVER
        is_due = self.elapsed - self._saved_at >= self.training.save_every
        if is_due:
            self._saved_at = self.elapsed
        return is_due and not is_late, is_late

    def is_point(self, step: int) -> bool:
        """Return whether to measure after this step: the start was measured already, the last one is the end."""
        return math.floor(self.training.points * self.share_done(step)) >= len(self._losses)

    def measured(self, model: Any) -> dict[str, Any]:
        """Measure the student on the selection windows and those kept apart; return an entry of the history."""
        losses = {part: self.pair.losses(part, model) for part in (SELECT, APART) if part in self.pair.windows}
        self._losses.append(losses[SELECT])
        if not bool(losses[SELECT].isfinite().all()):
            raise _NotFiniteError
        apart = float(losses[APART].mean()) if APART in losses else None
        return {
            "select": float(losses[SELECT].mean()), "apart": apart, "losses": losses[SELECT].tolist(),
            "seconds": self.elapsed,
        }  # fmt: skip

    @property
    def has_ended(self) -> bool:
        """Whether the last `PATIENCE` measurements gained no more than their standard error over the one before."""
        if len(self._losses) <= PATIENCE + 1:
            return False
        apart = self._losses[-1 - PATIENCE] - self._losses[-1]
        error = float(apart.std()) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
        if float(apart.mean()) > error:
            return False
        self.ended = NO_GAIN
        return True


def _of_first(value: T) -> T:
    """Return the value of process 0, so that all processes decide alike."""
    if not distributed.is_initialized():
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0)
    return values[0]


def _last_saved(folder: Path) -> Path | None:
    """Return the last saved state that is complete; its description is written last."""
    folders = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return max(folders, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _in_bytes(weights: Sequence[nn.Parameter], rate: float) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, bf16_stochastic_round=True)


def _curve(history: Sequence[dict[str, Any]], training: Training) -> tuple[RecoveryPoint, ...]:
    """Combine the measurements with the training losses that the trainer has logged at the same steps."""
    train = {entry["step"]: finite(entry["loss"]) for entry in history if "loss" in entry}
    return tuple(
        RecoveryPoint(
            tokens=entry["step"] * training.batch * training.tokens, train=train.get(entry["step"]),
            select=entry["select"], apart=entry["apart"],
        )
        for entry in history
        if "losses" in entry
    )  # fmt: skip
