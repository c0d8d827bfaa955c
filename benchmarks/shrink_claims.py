"""The measurements of the shrink benchmark as rows, and the claims that they decide."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS, HEALED = "depthgauge", "depthgauge, healed"
RATIO, RATIO_COUNTS = 0.6, (7, 11)
TARGET_LAYERS = 30
TARGETS: Mapping[tuple[str, str, int], float] = {
    ("known", OURS, 3): 0.125, ("known", OURS, 7): 0.42, ("known", OURS, 11): 0.76,
    ("known", HEALED, 3): 0.100, ("known", HEALED, 7): 0.33, ("known", HEALED, 11): 0.62,
    ("unknown", OURS, 3): 0.18, ("unknown", OURS, 7): 0.58, ("unknown", OURS, 11): 0.98,
    ("unknown", HEALED, 3): 0.155, ("unknown", HEALED, 7): 0.50, ("unknown", HEALED, 11): 0.85,
}  # fmt: skip
"""(setting, method, removed blocks) → largest mean increase in nats/token."""


@dataclass(frozen=True)
class Row:
    """One measurement.

    - `setting`, `source`: as in `shrink.Setting`
    - `method`: name of the method
    - `removed`: number of removed blocks
    - `increase`: text → mean increase of the loss in nats/token
    - `blocks`: the removed blocks; None if the method does not say
    """

    setting: str
    source: str
    method: str
    removed: int
    increase: Mapping[str, float]
    blocks: tuple[int, ...] | None = None

    @property
    def mean(self) -> float:
        """The mean over the texts."""
        return sum(self.increase.values()) / len(self.increase)

    @property
    def is_peer(self) -> bool:
        """Whether the method is not ours."""
        return self.method not in (OURS, HEALED)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; numbers that are not finite become null."""
        numbers = {name: finite(value) for name, value in self.increase.items()}
        return {
            "setting": self.setting, "source": self.source, "method": self.method, "removed": self.removed,
            "increase": numbers, "mean": finite(self.mean), "blocks": self.blocks,
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


def claims(rows: Sequence[Row], layers: int) -> list[Claim]:
    """Return the claims that the rows can decide.

    Args:
        rows: the measurements of all settings.
        layers: number of blocks of the dense model; `TARGETS` applies to 30.
    """
    found = []
    for own in (row for row in rows if row.method == OURS):
        others = [row for row in rows if row.is_peer and _cell(row) == _cell(own)]
        if not others:
            continue
        where = f"{own.setting}, calibrated on {own.source}, {own.removed} blocks"
        for text, value in own.increase.items():
            best = min(_or_infinite(row.increase[text]) for row in others)
            found.append(Claim(f"{where}, {text}: at most the best peer", value, best))
        if own.setting == "known" and own.removed in RATIO_COUNTS:
            best = min(_or_infinite(row.mean) for row in others)
            found.append(Claim(f"{where}: at most {RATIO} of the best peer's mean", own.mean, RATIO * best))
    for (setting, method, count), limit in TARGETS.items() if layers == TARGET_LAYERS else ():
        means = [row.mean for row in rows if (row.setting, row.method, row.removed) == (setting, method, count)]
        if means:
            found.append(Claim(f"{setting}, {method}, {count} blocks: target", sum(means) / len(means), limit))
    return found


def _cell(row: Row) -> tuple[str, str, int]:
    return row.setting, row.source, row.removed


def finite(value: float) -> float | None:
    """Return a number, or None if it is not finite."""
    return value if math.isfinite(value) else None


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the rows of a setting, the best method first."""
    texts = list(rows[0].increase)
    for count in sorted({row.removed for row in rows}):
        print(f"\n{title}, {count} blocks removed: increase in nats/token")
        print(f"{'method':24}" + "".join(f"{text[:12]:>13}" for text in texts) + f"{'mean':>13}")
        chosen = [row for row in rows if row.removed == count]
        for row in sorted(chosen, key=lambda row: _or_infinite(row.mean)):
            print(f"{row.method:24}" + "".join(f"{row.increase[text]:13.4f}" for text in texts) + f"{row.mean:13.4f}")
