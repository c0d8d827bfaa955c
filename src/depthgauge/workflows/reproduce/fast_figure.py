"""Figure A5, fast or deep: where attention is cheap, depth does nothing."""

import math
from statistics import fmean, median
from typing import Any, ClassVar

from depthgauge.sweeps.grid import Grid
from depthgauge.workflows.reproduce.collapse_figures import GridStudy, Results


class A5(GridStudy):
    """Degree, features, speed-up and effective depth against the size of the weights."""

    id, title, repetitions = "A5", "Fast or deep: attention is cheap exactly where depth does nothing", 3
    ETAS: ClassVar = [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28]
    SHAPE: ClassVar = {"layers": 6, "heads": 2, "dim": 16, "tokens": 128}
    TOLERANCE, LENGTH, ERROR = 1e-3, 65536, 0.01

    def grids(self) -> list[Grid]:
        """The plans of every layer's attention, and the effective depth of such networks."""
        fast = self._grid("fast-attention", eta=self.ETAS, tolerance=self.TOLERANCE, length=self.LENGTH, **self.SHAPE)
        return [fast, self._grid("effective-depth", eta=self.ETAS, tolerance=self.ERROR, **self.SHAPE)]

    def caption(self) -> str:
        """As `GridStudy` asks."""
        shape = f"L = {self.SHAPE['layers']}, H = {self.SHAPE['heads']}, d = {self.SHAPE['dim']}"
        return (
            f"A5. {self.title}. Random networks with skips (weights uniform in [−η, η], {shape}) on 128 tokens uniform "
            f"in [−1, 1]. Top: the degree at which a polynomial stands for exp in every head within {self.TOLERANCE:g} "
            "of the values' range, for the scores as they are proved; numbers: its features C(d + g, g). Middle: the "
            f"cost of exact attention over that of the cheaper path, predicted on a CPU for the tokens repeated to "
            f"{self.LENGTH:,}; band from the least to the largest. Bottom: the fewest layers that do the network's "
            f"work within {self.ERROR:g}, certified for every input with |entries| ≤ 1 and measured on 4 inputs. "
            f"Medians, and means of depths, over {self.repeats} repetitions (drawn anew, seed {self.seed})."
        )

    def draw(self, results: Results) -> Any:
        """As `GridStudy` asks."""
        from depthgauge.figures.fast_or_deep import FastOrDeep, draw_fast_or_deep

        plans = [self.where(results, eta=eta, tolerance=self.TOLERANCE) for eta in self.ETAS]
        depths = [self.where(results, eta=eta, tolerance=self.ERROR) for eta in self.ETAS]

        def middle(name: str) -> list[float]:
            """The median over repetitions, infinite where most have none."""
            return [median(math.inf if r[name] is None else r[name] for r in rows) for rows in plans]

        return draw_fast_or_deep(
            FastOrDeep(
                etas=self.ETAS,
                degree=middle("degree"),
                features=middle("features"),
                speedup=middle("speedup"),
                spread=[(min(r["speedup"] for r in rows), max(r["speedup"] for r in rows)) for rows in plans],
                certified=[fmean(r["certified"] for r in rows) for rows in depths],
                measured=[fmean(r["measured"] for r in rows) for rows in depths],
                layers=self.SHAPE["layers"],
                tokens=self.LENGTH,
            )
        )
