"""The measurements of the shrink benchmark as rows, and the claims that they decide."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS, RECOVERED = "depthgauge", "depthgauge, recovered"
OWN, OTHER = "texts of the calibration", "other texts"
RATIOS: Mapping[str, float] = {OWN: 0.6, OTHER: 0.75}
"""Largest ratio of our mean increase to the best peer's, where at least `RATIO_SHARE` of the blocks is removed."""
RATIO_SHARE = 0.2
SHARPER: Mapping[tuple[int, str, str, int], float] = {(30, "fortunes", OTHER, 7): 0.6}
"""(layers, source of the calibration, kind of text, removed blocks) → a smaller ratio that is wanted there."""
TARGETS: Mapping[tuple[int, str, str, str, str, int], float] = {
    (18, "default", "kjv", OURS, OWN, 4): 0.60,
    (18, "default", "kjv", OURS, OTHER, 4): 0.90,
    (18, "default", "all", OURS, OWN, 4): 0.77,
    (18, "default", "all", RECOVERED, OWN, 4): 0.50,
    (18, "quick", "kjv", OURS, OWN, 4): 0.70,
    (18, "quick", "kjv", OURS, OTHER, 4): 1.00,
    (30, "default", "all", OURS, OWN, 3): 1.03 * 0.096,
    (30, "default", "all", OURS, OWN, 7): 1.03 * 0.290,
    (30, "default", "all", OURS, OWN, 11): 1.03 * 0.570,
    (30, "default", "fortunes", OURS, OTHER, 3): 1.03 * 0.151,
    (30, "default", "fortunes", OURS, OTHER, 7): 1.03 * 0.517,
    (30, "default", "fortunes", OURS, OTHER, 11): 1.03 * 0.895,
}
"""(layers, effort, source of the calibration, method, kind of text, removed blocks) → largest mean increase in
nats/token. Those of 30 layers (SmolLM2-135M) are the results of an earlier version, with 3 % more."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    - `source`: what was calibrated on, `all` or the name of a text; `own` has the names of these texts
    - `method`: name of the method
    - `removed`: number of removed blocks
    - `increase`: text → mean increase of the loss in nats/token
    - `blocks`: the removed blocks; None if the method does not say
    """

    source: str
    own: tuple[str, ...]
    method: str
    removed: int
    increase: Mapping[str, float]
    blocks: tuple[int, ...] | None = None

    def mean(self, kind: str | None = None) -> float | None:
        """Return the mean over the texts of one kind, or over all; None if there is none."""
        chosen = [one for text, one in self.increase.items() if kind in (None, OWN if text in self.own else OTHER)]
        return sum(chosen) / len(chosen) if chosen else None

    @property
    def is_peer(self) -> bool:
        """Whether the method is not ours."""
        return self.method not in (OURS, RECOVERED)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; numbers that are not finite become null."""
        return {
            "source": self.source, "method": self.method, "removed": self.removed,
            "increase": {name: finite(value) for name, value in self.increase.items()}, "blocks": self.blocks,
        }  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A claim: the measured value is at most the limit."""

    text: str
    value: float
    limit: float

    @property
    def met(self) -> bool:
        """Whether the claim holds; a value that is not a number does not meet it."""
        return self.value <= self.limit


def claims(rows: Sequence[Row], layers: int, effort: str) -> list[Claim]:
    """Return the claims that the rows can decide.

    Args:
        rows: the measurements of all settings.
        layers: number of blocks of the dense model.
        effort: that of our method.
    """
    found = []
    for own in (row for row in rows if not row.is_peer):
        where = f"calibrated on {own.source}, {own.removed} blocks, {own.method}"
        others = [row for row in rows if row.is_peer and (row.source, row.removed) == (own.source, own.removed)]
        for text, value in own.increase.items() if others else ():
            best = min(_or_infinite(row.increase[text]) for row in others)
            found.append(Claim(f"{where}, {text}: at most the best peer", value, best))
        for kind, usual in RATIOS.items():
            mean, ratio = own.mean(kind), SHARPER.get((layers, own.source, kind, own.removed), usual)
            if mean is None:
                continue
            if others and own.removed >= RATIO_SHARE * layers:
                best = min(_or_infinite(row.mean(kind)) for row in others)
                found.append(Claim(f"{where}, {kind}: at most {ratio} of the best peer", mean, ratio * best))
            target = TARGETS.get((layers, effort, own.source, own.method, kind, own.removed))
            if target is not None:
                found.append(Claim(f"{where}, {kind}: target", mean, target))
    return found


def finite(value: float) -> float | None:
    """Return a number, or None if it is not finite."""
    return value if math.isfinite(value) else None


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def show(rows: Sequence[Row]) -> None:
    """Print the rows of a setting, the best method first."""
    texts = list(rows[0].increase)
    for count in sorted({row.removed for row in rows}):
        print(f"\ncalibrated on {rows[0].source}, {count} blocks removed: increase in nats/token")
        print(f"{'method':24}" + "".join(f"{text[:12]:>13}" for text in texts) + f"{'mean':>13}")
        chosen = [row for row in rows if row.removed == count]
        for row in sorted(chosen, key=lambda row: _or_infinite(row.mean())):
            values = [*(row.increase[text] for text in texts), row.mean() or 0.0]
            print(f"{row.method:24}" + "".join(f"{value:13.4f}" for value in values), flush=True)
    print()
