"""Measure the dense and the shrunk model on the certify windows, and bound from above how much the loss grows.

The bound is computed from one number per certify window: the mean increase of the loss over the tokens of the window,
in nats per token. It assumes that the windows are exchangeable with future windows (`assumption`). It assumes no shape
of the distribution: no normality and no variance.
"""

import copy
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from jaxtyping import Float
from scipy import special
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.blocks.model_output import WindowBatches, accuracy, batch_size, model_output, window_losses
from depthgauge.checkpoints.tasks.confidence import mean_interval
from depthgauge.checkpoints.weights.load import Checkpoint
from depthgauge.results.shrink_record import (
    GuaranteeRecord,
    LabelAccuracy,
    LossRecord,
    QuantileRecord,
    TestedSize,
    TextRecord,
)  # fmt: skip
from depthgauge.surgery.calibration import Calibration
from depthgauge.surgery.extract import cast

SHARE = 0.95
"""Share of windows that the quantile guarantee covers."""

Losses = Float[Tensor, " windows"]
"""One number per certify window: nats per token, or another number of `window_losses`."""


def assumption(noun: str) -> str:
    """Return what a guarantee assumes, in one sentence.

    Args:
        noun: What one certify window is: a `window` of text, a whole `text`, an `image`, a `pair` or a `recording`.
    """
    data = "text" if noun == "window" else f"{noun}s"
    return (
        f"This holds for {data} like the certify {noun}s: it assumes that these {noun}s and future {noun}s are "
        "exchangeable."
    )


def as_dtype(model: Any, dtype: torch.dtype) -> Any:
    """Return the model, or a copy that computes in another dtype. Half precision is slow on a CPU."""
    return model if model.dtype == dtype else cast(copy.deepcopy(model), dtype)


@dataclass(frozen=True)
class Certified:
    """What the certify windows say, as in `ShrinkRecord`."""

    loss: LossRecord
    texts: tuple[TextRecord, ...]
    guarantee: GuaranteeRecord
    accuracy: LabelAccuracy | None


class Certifier:
    """The certify windows `inputs`, and the dense model on them.

    - `losses`: the dense model's losses; 0 where outputs are compared with its own
    - `outputs`: the dense model's outputs; None for a causal language model, whose logits are too large to keep
    - `confidence`: the probability that a guarantee is true
    """

    def __init__(
        self,
        dense: Checkpoint,
        calibration: Calibration,
        confidence: float,
        *,
        progress: Step = silent,
    ) -> None:
        self.dense, self.calibration, self.confidence, self.progress = dense, calibration, confidence, progress
        self.inputs = calibration.certify.inputs
        self.outputs: Tensor | None = None
        kinds = torch.tensor([source.kind == calibration.guaranteed_kind for source in calibration.record.sources])
        self._guaranteed = kinds[calibration.certify.source]
        size = batch_size(dense.model, calibration.record.window, dense.objective == "loss")
        self._batches = WindowBatches(size if dense.batched else 1)
        result = self.run(dense.model, "dense model, certify windows")
        if dense.objective != "loss":
            self.outputs = result
        self.losses = self.losses_of(result)

    @torch.no_grad()
    def run(self, model: Any, label: str = "shrunk model, certify windows") -> Tensor:
        """Return what `losses_of` needs of a model, computed in the dtype of the dense model.

        These are the losses of a causal language model, and the outputs of other models.
        """
        checkpoint = replace(self.dense, model=as_dtype(model, self.dense.model.dtype))
        objective = checkpoint.objective

        def compute(these: slice) -> Tensor:
            self.progress(these.start, len(self.inputs), label)
            inputs = self.inputs[these]
            output = model_output(checkpoint, inputs)
            if objective == "loss":
                output = window_losses(objective, output, inputs, output)
            return output.cpu() if objective == "loss" else output.float().cpu()

        return torch.cat(self._batches.map(compute, len(self.inputs)))

    def losses_of(self, found: Tensor) -> Losses:
        """Return one number per certify window, from the result of `run` or of a fresh process."""
        if self.outputs is None:
            return found
        return window_losses(self.dense.objective, found, self.inputs, self.outputs)

    def measure(self, model: Any, label: str = "shrunk model, certify windows") -> Losses:
        """Return the losses of a model."""
        return self.losses_of(self.run(model, label))

    def bound(self, losses: Losses, looks: int = 1) -> QuantileRecord:
        """Bound the increase on most windows; `looks` models were measured before this one was chosen."""
        increases = (losses - self.losses)[self._guaranteed].tolist()
        return quantile_guarantee(increases, SHARE, self.confidence, looks)

    def certified(
        self, found: Tensor | None, looks: int, limit: float | None = None, tested: tuple[TestedSize, ...] = ()
    ) -> Certified:
        """Return the losses of both models, and the bound on their increase.

        `found` is the result of `run`, or that of a fresh process; None if no model was made. `looks` models may have
        been measured before this one was chosen.

        Where sizes were `tested` against a `limit`, the certify windows chose the size. Testing in a fixed sequence
        then proves the limit and nothing smaller, so that limit is reported. A run that follows the plan of such a run
        has the same windows, so its bound is corrected for the sizes that may have been tested.
        """
        dense, guaranteed = float(self.losses[self._guaranteed].mean()), int(self._guaranteed.sum())
        loss = LossRecord(dense=dense, shrunk=None, low=None, high=None)
        quantile = QuantileRecord(increase=None, share=SHARE, confidence=self.confidence, windows=guaranteed)
        texts, right = tuple[TextRecord, ...](), None
        if found is not None:
            losses = self.losses_of(found)
            shrunk = mean_interval(losses[self._guaranteed].tolist())
            loss = LossRecord(dense=dense, shrunk=shrunk.loss, low=shrunk.low, high=shrunk.high)
            quantile = self.bound(losses, looks)
            texts, right = self._texts(losses), self._accuracy(found)
            if limit is not None:
                quantile = msgspec.structs.replace(quantile, increase=limit)
        guarantee = GuaranteeRecord(
            quantile=quantile,
            about=self.calibration.guaranteed_kind,
            assumption=assumption(self.calibration.record.noun),
            limit=limit,
            tested=tested,
        )
        return Certified(loss, texts, guarantee, right)

    def _accuracy(self, found: Tensor) -> LabelAccuracy | None:
        """Return the accuracy of both models where the windows have labels."""
        if self.dense.objective != "labels" or self.outputs is None:
            return None
        before, after = (accuracy(outputs, self.inputs) for outputs in (self.outputs, found))
        return LabelAccuracy(dense=before, shrunk=after, windows=len(self.inputs))

    def _texts(self, losses: Losses) -> tuple[TextRecord, ...]:
        """Return the increase on every source of text, with 95 % intervals."""
        texts = []
        for index, source in enumerate(self.calibration.record.sources):
            if not source.certify:
                continue
            chosen = self.calibration.certify.source == index
            before, after = self.losses[chosen], losses[chosen]
            interval = mean_interval((after - before).tolist())
            texts.append(
                TextRecord(
                    kind=source.kind,
                    name=source.name,
                    windows=len(before),
                    dense=float(before.mean()),
                    shrunk=float(after.mean()),
                    increase=interval.loss,
                    low=interval.low,
                    high=interval.high,
                )
            )
        return tuple(texts)


def quantile_guarantee(
    increases: Sequence[float] | Float[np.ndarray, "..."], share: float = 0.95, confidence: float = 0.95, looks: int = 1
) -> QuantileRecord:
    """Bound the `share`-quantile of the increases from above by an order statistic.

    The bound is the k-th smallest of the m increases, x_(k), with the smallest k such that

        P[Binomial(m, share) ≥ k] ≤ (1 − confidence)/looks.

    Let q be the smallest number with P[x ≤ q] ≥ share. Then P[x < q] ≤ share, and the bound fails exactly if
    x_(k) < q, so if at least k increases are below q. This has probability at most P[Binomial(m, share) ≥ k]. Ties need
    no special treatment. If the windows have chosen one of several models, the probability that the bound of any of
    them fails is at most the sum of their error probabilities (Bonferroni).

    Args:
        increases: x_1 … x_m, one increase per certify window.
        share: share of windows that the bound must cover, between 0 and 1.
        confidence: probability that the bound is true, between 0 and 1.
        looks: how many models were measured on these windows before this one was chosen.

    Returns:
        The bound. Its `increase` is None if m < `windows_needed(share, confidence)`.

    Raises:
        InputError: an increase is not finite, or `share` or `confidence` is not between 0 and 1.
    """
    x = np.sort(_checked(increases))
    tail = _tail(share, confidence) / looks
    m = len(x)
    enough = _binomial_tail(np.arange(1, m + 1), m, share) <= tail  # one entry per k
    increase = float(x[np.argmax(enough)]) if enough.any() else None
    return QuantileRecord(increase=increase, share=share, confidence=confidence, windows=m)


def windows_needed(share: float = 0.95, confidence: float = 0.95) -> int:
    """Return the smallest number of windows with a quantile bound: the smallest m with shareᵐ ≤ 1 − confidence.

    >>> windows_needed(0.95, 0.95)
    59
    """
    tail = _tail(share, confidence)
    m = max(1, math.floor(math.log(tail) / math.log(share)) - 1)
    while _binomial_tail(m, m, share) > tail:
        m += 1
    return m


def _binomial_tail(k: int | np.ndarray, m: int, share: float) -> Any:
    """Return P[Binomial(m, share) ≥ k], rounded up."""
    return np.minimum(1, special.betainc(k, m - k + 1, share) * (1 + 1e-12))


def _tail(share: float, confidence: float) -> float:
    """Return 1 − confidence, after checking both numbers."""
    meanings = {
        "share": (share, "the share of windows that the bound covers"),
        "confidence": (confidence, "the probability that the guarantee is true"),
    }
    for name, (value, meaning) in meanings.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < 1:
            raise InputError(f"{name} must be a number between 0 and 1, got {value!r}; it is {meaning}")
    return 1 - confidence


def _checked(increases: Sequence[float] | Float[np.ndarray, "..."]) -> Float[np.ndarray, " m"]:
    x = np.asarray(increases, dtype=np.float64)
    if x.ndim != 1:
        raise InputError(f"increases must be a list of numbers, one per window, got an array of shape {x.shape}")
    if not np.isfinite(x).all():
        index = int(np.argmin(np.isfinite(x)))
        raise InputError(f"increases must be finite numbers, got {x[index]} for window {index}")
    return x
