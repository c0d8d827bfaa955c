"""Figure A5, fast or deep: the cost of attention and the effective depth against the size of the weights."""

import math
from statistics import fmean, median
from typing import Any, ClassVar

from depthgauge.papers.reproduce.study import GridStudy, Results
from depthgauge.sweeps.grid import Grid


class FastOrDeepStudy(GridStudy):
    """A5: polynomial degree, number of features, predicted speed-up and effective depth against η."""

    title = "Fast or deep: attention is cheap where depth is not needed"
    repetitions = 3
    ETAS: ClassVar = [0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28]
    SHAPE: ClassVar = {"layers": 6, "heads": 2, "dim": 16, "tokens": 128}
    TOLERANCE, LENGTH, ERROR = 1e-3, 65536, 0.01

    about = (
        "Random networks with skip connections (weights uniform in [−η, η], L = {self.SHAPE[layers]}, "
        "H = {self.SHAPE[heads]}, d = {self.SHAPE[dim]}) on 128 "
        "tokens uniform in [−1, 1]. Top: the degree g at which a polynomial can replace exp in every head with an "
        "error of at most {self.TOLERANCE:g} of the range of the values, from the proved bound on the scores; "
        "labels give the number of features C(d + g, g). Middle: cost of exact attention divided by the cost of "
        "the cheaper path, predicted for a CPU and {self.LENGTH:,} tokens (the input repeated); the band shows "
        "the minimum to the maximum. Bottom: the smallest number of layers that reproduces the output within "
        "{self.ERROR:g}, certified for every input with |entries| ≤ 1, and measured on 4 inputs. Degree and "
        "speed-up are medians, depths are means, over {self.repeats} repetitions (a new network and input each, "
        "seed {self.seed})."
    )

    def grids(self) -> list[Grid]:
        """Return two grids: the plans of fast attention in every layer, and the effective depth."""
        fast = self._grid("fast-attention", eta=self.ETAS, tolerance=self.TOLERANCE, length=self.LENGTH, **self.SHAPE)
        return [fast, self._grid("effective-depth", eta=self.ETAS, tolerance=self.ERROR, **self.SHAPE)]

    def draw(self, results: Results) -> Any:
        """Return the matplotlib figure."""
        from depthgauge.papers.figures.fast_or_deep import FastOrDeep, draw_fast_or_deep

        plans = [self.where(results, eta=eta, tolerance=self.TOLERANCE) for eta in self.ETAS]
        depths = [self.where(results, eta=eta, tolerance=self.ERROR) for eta in self.ETAS]

        def middle(name: str) -> list[float]:
            """Return the median over repetitions; a missing value counts as infinite."""
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
