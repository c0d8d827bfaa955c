"""Measure the dense and the shrunk model on the certify windows, and bound the increase."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.checkpoints.load import measured_part
from depthgauge.checkpoints.mean_interval import mean_interval
from depthgauge.errors import InputError
from depthgauge.progress import Step, silent
from depthgauge.results.shrink_record import (
    GuaranteeRecord,
    LossRecord,
    MeanRecord,
    QuantileRecord,
    TestedSize,
    TextRecord,
)
from depthgauge.surgery.calibration import Calibration
from depthgauge.surgery.guarantee import (
    ASSUMPTION,
    largest_passing,
    loss_ceiling,
    mean_guarantee,
    mean_p_value,
    mixed_loss,
    quantile_guarantee,
    quantile_p_value,
)
from depthgauge.surgery.objective import token_losses

SHARE = 0.95
"""Share of windows that the quantile guarantee covers."""
_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Largest size of the logits of one batch, by type of device."""


@dataclass(frozen=True, eq=False)
class Measured:
    """One number per certify window.

    - `losses`: nats per token, or for an encoder the relative distance of the final states from the dense model's
    - `mixed`: the loss of predictions mixed with the uniform distribution; equal to `losses` for an encoder
    - `vocabulary`: number of tokens that a decoder predicts, None for an encoder
    - `states`: the final states of an encoder, None for a decoder
    """

    losses: Float[Tensor, " windows"]
    mixed: Float[Tensor, " windows"]
    vocabulary: int | None = None
    states: Float[Tensor, "windows n d"] | None = None


@torch.no_grad()
def measure_windows(
    model: Any,
    ids: Int[Tensor, "windows n"],
    *,
    decoder: bool,
    dense: Measured | None = None,
    progress: Step = silent,
    label: str = "certify windows",
) -> Measured:
    """Measure a model on windows.

    Args:
        model: a transformers model in evaluation mode.
        ids: token ids.
        decoder: whether the model returns logits.
        dense: the dense model's measurement, which an encoder is compared with; None for the dense model itself.
        progress: called before every batch.
        label: what is being measured.
    """
    embedding = model.get_input_embeddings().weight
    device = embedding.device if embedding.device.type != "meta" else torch.device("cpu")
    wide = model.config.get_text_config().vocab_size if decoder else 8 * embedding.shape[1]
    batch = max(1, _BYTES.get(device.type, 2**28) // (4 * ids.shape[1] * wide))
    losses, mixed, states, vocabulary = [], [], [], None
    for start in range(0, len(ids), batch):
        progress(start, len(ids), label)
        part = ids[start : start + batch].to(device)
        if decoder:
            logits = model(input_ids=part, use_cache=False).logits
            vocabulary = int(logits.shape[-1])
            tokens = token_losses(logits, part.to(logits.device))
            losses.append(tokens.double().mean(dim=1).cpu())
            mixed.append(mixed_loss(-tokens, vocabulary).mean(dim=1).cpu())
        else:
            states.append(measured_part(model, decoder)(input_ids=part).last_hidden_state.float().cpu())
    if decoder:
        return Measured(torch.cat(losses), torch.cat(mixed), vocabulary)
    final = torch.cat(states)
    if dense is None:
        zeros = torch.zeros(len(ids), dtype=torch.float64)
        return Measured(zeros, zeros, None, final)
    assert dense.states is not None
    apart = (final.double() - dense.states.double()).flatten(1).norm(dim=1)
    distance = apart / dense.states.double().flatten(1).norm(dim=1)
    return Measured(distance, distance, None, final)


def text_records(calibration: Calibration, dense: Measured, shrunk: Measured) -> tuple[TextRecord, ...]:
    """Return the increase on every source of text, with 95 % intervals."""
    found = []
    for index, source in enumerate(calibration.sources):
        chosen = calibration.certify.source == index
        if not bool(chosen.any()):
            continue
        before, after = dense.losses[chosen], shrunk.losses[chosen]
        interval = mean_interval((after - before).tolist())
        found.append(
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
    return tuple(found)


def guaranteed(calibration: Calibration) -> Tensor:
    """Return which certify windows the guarantee is about."""
    kinds = [source.kind == calibration.guaranteed_kind for source in calibration.sources]
    return torch.tensor(kinds)[calibration.certify.source]


def loss_record(calibration: Calibration, dense: Measured, shrunk: Measured) -> LossRecord:
    """Return the mean losses on the windows that the guarantee is about."""
    chosen = guaranteed(calibration)
    interval = mean_interval(shrunk.losses[chosen].tolist())
    return LossRecord(
        dense=float(dense.losses[chosen].mean()), shrunk=interval.loss, low=interval.low, high=interval.high
    )


@dataclass(frozen=True)
class Certifier:
    """The statistical guarantee about one calibration.

    - `calibration`: the windows
    - `dense`: the dense model on them
    - `confidence`: the probability that a guarantee is true
    """

    calibration: Calibration
    dense: Measured
    confidence: float

    def _increases(self, shrunk: Measured, mixed: bool) -> list[float]:
        chosen = guaranteed(self.calibration)
        before, after = (self.dense.mixed, shrunk.mixed) if mixed else (self.dense.losses, shrunk.losses)
        found: list[float] = (after - before)[chosen].tolist()
        return found

    def _ceiling(self) -> float:
        assert self.dense.vocabulary is not None
        return loss_ceiling(self.dense.vocabulary)

    def quantile(self, shrunk: Measured, looks: int = 1) -> QuantileRecord:
        """Bound the increase on most windows.

        Args:
            shrunk: the shrunk model on the certify windows.
            looks: how many models were measured on the certify windows before this one was chosen; the error
                probability is divided by this number (Bonferroni).
        """
        found = quantile_guarantee(self._increases(shrunk, mixed=False), SHARE, self._corrected(looks))
        return QuantileRecord(
            increase=found.increase, share=found.share, confidence=self.confidence, windows=found.windows
        )

    def mean(self, shrunk: Measured, looks: int = 1) -> MeanRecord:
        """Bound the mean increase of predictions mixed with the uniform distribution; see `quantile`."""
        increases = self._increases(shrunk, mixed=True)
        if self.dense.vocabulary is None:
            return MeanRecord(
                increase=None,
                confidence=self.confidence,
                method="none: the distance of an encoder's states has no upper limit",
                windows=len(increases),
            )
        found = mean_guarantee(increases, self._ceiling(), self._corrected(looks))
        return MeanRecord(
            increase=found.increase, confidence=self.confidence, method=found.method, windows=found.windows
        )

    def _corrected(self, looks: int) -> float:
        return 1 - (1 - self.confidence) / looks

    def passes(self, shrunk: Measured, limit: float, kind: str) -> bool:
        """Return whether the hypothesis that the increase exceeds `limit` is rejected."""
        if kind == "quantile":
            p_value = quantile_p_value(self._increases(shrunk, mixed=False), limit, SHARE)
        else:
            p_value = mean_p_value(self._increases(shrunk, mixed=True), limit, self._ceiling())
        return largest_passing([p_value], self.confidence) is not None

    def require_reachable(self, limit: float, kind: str) -> None:
        """Raise if the mean could not be bounded by the limit even if no window changed."""
        if kind != "mean":
            return
        least = self.mean(self.dense)
        if least.increase is not None and least.increase > limit:
            raise InputError(
                f"--max-increase {limit:g} cannot be proved for the mean with {least.windows} certify windows: the "
                f"bound is {least.increase:.3g} even if the loss does not grow; allow more, use --effort high, or "
                "--guarantee quantile"
            )

    def record(
        self,
        shrunk: Measured,
        limit: float | None = None,
        kind: str = "",
        tested: Sequence[TestedSize] = (),
        looks: int = 1,
    ) -> GuaranteeRecord:
        """Return both guarantees with their assumption.

        Where sizes were tested against a limit, the certify windows chose the size. Fixed-sequence testing then proves
        the limit for the tested kind and nothing smaller, so that limit is reported. The other kind is corrected for
        the number of sizes tested.

        Args:
            shrunk: the shrunk model on the certify windows.
            limit: the limit that sizes were tested against, or None.
            kind: which guarantee was tested, `quantile` or `mean`.
            tested: the sizes that were tested.
            looks: how many sizes an earlier run may have tested on these windows.
        """
        looks = max(looks, len(tested))
        quantile, mean = self.quantile(shrunk, looks), self.mean(shrunk, looks)
        if limit is not None and kind == "quantile":
            quantile = msgspec.structs.replace(quantile, increase=limit)
        if limit is not None and kind == "mean":
            mean = msgspec.structs.replace(mean, increase=limit)
        return GuaranteeRecord(
            quantile=quantile,
            mean=mean,
            about=self.calibration.guaranteed_kind,
            assumption=ASSUMPTION,
            limit=limit,
            tested=tuple(tested),
        )
