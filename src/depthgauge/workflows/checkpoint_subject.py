"""What was found about a checkpoint, window by window, put together: the subject of the result document."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from depthgauge._format import number as digits
from depthgauge.checkpoints.bootstrap import Interval, bootstrap
from depthgauge.checkpoints.circuits import CircuitSizes
from depthgauge.checkpoints.head_statistics import STATIC, HeadStatistics, combine
from depthgauge.checkpoints.load import Checkpoint
from depthgauge.checkpoints.regime import Regime, regime
from depthgauge.checkpoints.removal import MeasuredDepth
from depthgauge.checkpoints.scores import SCORES, spearman
from depthgauge.checkpoints.windows import Windows
from depthgauge.measures.profile import number

_ON_TEXT = ("score_range", "tv_mean", "tv_max", "first_mass", "entropy")


@dataclass(frozen=True)
class ModelSubject:
    """One checkpoint and what was found: `weights` by layer and head, `found` by window, `kinds` the what-ifs made."""

    checkpoint: Checkpoint
    seed: int
    weights: Sequence[Sequence[CircuitSizes]]
    windows: Windows | None = None
    found: Sequence[dict[str, Any]] = ()
    kinds: tuple[str, ...] = ()
    measured: MeasuredDepth | None = None
    notes: Sequence[str] = field(default_factory=list)

    def regime(self) -> Regime | None:
        """How far the weights are from small, where they are known."""
        return regime(self.weights) if self.weights else None

    def baseline(self) -> Interval | None:
        """The loss of the intact model; an encoder has none."""
        losses = [window["observed"]["loss"] for window in self.found]
        return None if not losses or losses[0] is None else bootstrap(losses, self.seed)

    def what_if(self, kind: str, layer: int) -> Interval | None:
        """What is lost in one what-if."""
        if kind not in self.kinds or layer >= len(self.found[0][kind]):
            return None
        return bootstrap([window[kind][layer] for window in self.found], self.seed)

    def scores(self) -> dict[str, list[float]]:
        """The cheap scores by name and layer, means over windows."""
        names = self.found[0]["observed"]["scores"] if self.found else {}
        return {
            name: torch.tensor([window["observed"]["scores"][name] for window in self.found], dtype=torch.float64)
            .mean(dim=0)
            .tolist()
            for name in names
        }

    def trust(self) -> list[dict[str, Any]]:
        """Each cheap score against the loss that was measured: their rank correlation over layers."""
        rows = []
        for score, values in self.scores().items():
            kind = SCORES[score]
            if kind not in self.kinds or len(values) != self.checkpoint.layers:
                continue
            losses = [self.what_if(kind, layer) for layer in range(len(values))]
            measured = [interval.mean for interval in losses if interval is not None]
            rows.append(
                {"score": score, "what_if": kind, "spearman": spearman(values, measured), "layers": len(values)}
            )
        return rows

    def verdict(self) -> str:
        """One sentence: what is missed least and most, which cheap score to trust, or how far the weights are off."""
        L, parts = self.checkpoint.layers, []
        unit = "of loss" if self.checkpoint.objective == "loss" else "of change in the final states"
        if "block" in self.kinds:
            means = [interval.mean for layer in range(L) if (interval := self.what_if("block", layer)) is not None]
            least, most = min(range(L), key=means.__getitem__), max(range(L), key=means.__getitem__)
            low, high = digits(means[least], 2), digits(means[most], 2)
            parts.append(f"layer {least} is missed least ({low} {unit}), layer {most} most ({high})")
        ranked = [row for row in self.trust() if row["spearman"] is not None]
        if ranked:
            best = max(ranked, key=lambda row: row["spearman"])
            parts.append(f"of the cheap scores {best['score']} ranks best (correlation {best['spearman']:.2f})")
        if self.measured is not None:
            parts.append(f"{self.measured.layers} keep it within {digits(self.measured.increase, 6)}")
        known = self.regime()
        if not parts and known is not None:
            parts.append(f"the weights are {known.corrected_orders:.1f} orders of magnitude from provably one layer")
        return f"{L} layers; " + "; ".join(parts) if parts else f"{L} layers"

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        known, baseline = self.regime(), self.baseline()
        return {
            "kind": "model",
            "name": self.checkpoint.name,
            "verdict": self.verdict(),
            "model": self.checkpoint.describe(),
            "text": None if self.windows is None else self.windows.to_json(),
            "regime": None if known is None else known.to_json(),
            "baseline": None if baseline is None else baseline.to_json(),
            "input": self._residual(0),
            "layers": [self._layer(index) for index in range(self.checkpoint.layers)],
            "scores": self.trust(),
            "collapse": [],
            "depth": [] if self.measured is None else [self.measured.to_json(self.seed)],
            "notes": list(self.notes),
        }

    def _layer(self, index: int) -> dict[str, Any]:
        what_if = {kind: interval for kind in self.kinds if (interval := self.what_if(kind, index)) is not None}
        return {
            "index": index,
            **self._residual(index + 1),
            "heads": self._heads(index),
            "scores": {name: number(values[index]) for name, values in self.scores().items() if values},
            "fast": self.found[0]["observed"]["fast"][index] if self.found else None,
            "what_if": {kind: interval.to_json() for kind, interval in what_if.items()},
        }

    def _residual(self, state: int) -> dict[str, Any]:
        """Centre → norm → mean and spread over windows, of X_ℓ; nothing where the states were not seen."""
        if not self.found or not self.found[0]["observed"]["residuals"]:
            return {}
        windows = [window["observed"]["residuals"][state] for window in self.found]
        residual = {
            center: {norm: _spread([window[center][norm] for window in windows]) for norm in norms}
            for center, norms in windows[0].items()
        }
        return {"residual": residual}

    def _heads(self, layer: int) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = [{"index": head} for head in range(self.checkpoint.heads)]
        if self.found:
            seen = combine([HeadStatistics.from_json(window["observed"]["heads"][layer]) for window in self.found])
            errors = seen.static_errors()
            for head, entry in enumerate(entries):
                entry |= {name: number(getattr(seen, name)[head]) for name in _ON_TEXT}
                entry["static"] = {name: number(errors[i, head]) for i, name in enumerate(STATIC)}
                entry["static_best"] = STATIC[int(errors[:, head].nan_to_num(nan=torch.inf).argmin())]
        if self.weights:
            for entry, sizes in zip(entries, self.weights[layer], strict=True):
                entry |= {name: number(value) for name, value in sizes.to_json().items()}
        return entries


def _spread(pairs: Sequence[Sequence[float]]) -> dict[str, float | None]:
    value, ratio = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    return {
        "value": number(value.mean()),
        "ratio": number(ratio.mean()),
        "ratio_std": number(ratio.std(correction=0)),
    }
