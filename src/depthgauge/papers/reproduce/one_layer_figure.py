"""Figure A7: how close one layer can come to two layers, and where it begins to fail (docs/math.md §3.14)."""

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.special import expit

from depthgauge.papers.ledger.arithmetic import FLOATS
from depthgauge.papers.ledger.one_layer import deep_output
from depthgauge.papers.reproduce.study import Computing, Study
from depthgauge.papers.reproduce.style import DASHED, DOTTED, INK, MARKERS, ORDERED, figure_style, legend_below

Numbers = NDArray[np.float64]
_SHARES = (1 / 2, 5 / 8, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""The shares q of the second token. Those above ½ decide at small weights, the smallest at large weights."""


_LIMITS = (0.1, 0.3, 3.0)
"""The largest coefficients of fitted heads that are tried, in units of z·min(1, w); larger ones fit only the grid."""


@dataclass(frozen=True)
class Network:
    """Two layers with one head, every weight z/d, β = 1, on tokens x·1ᵀ and y·1ᵀ of which a share q is y·1ᵀ."""

    d: int
    z: float

    @property
    def weight(self) -> float:
        """w = 1ᵀW1 = d z²."""
        return self.d * self.z**2

    @property
    def upper(self) -> float:
        """The smaller bound of 3.14 on the distance of every such network from one layer, over all inputs."""
        z = self.z
        return min(z + z**2, self.weight * z**2 * (4 + 3 * z + z**2))

    def rest(self, x: Numbers, y: Numbers, q: Numbers) -> Numbers:
        """Return S − x − ((1 + z)² − 1)·mean at the token x: what one layer has to fit beyond the mean-field layer."""
        out: Numbers = deep_output(FLOATS, x, y, q, [(self.z, self.weight)] * 2)
        return out - x - ((1 + self.z) ** 2 - 1) * ((1 - q) * x + q * y)


def annihilated(network: Network) -> tuple[float, int]:
    """Return the distance of S from all one-layer networks on a grid of inputs, and how many inputs decide it.

    On these inputs S' − x is V·mean + factor·H with a free number H for every (q, t), so a linear program has the
    distance. Its multipliers annihilate every one-layer network.
    """
    rows = [(1.0, 1.0, 0.5, 0, 0.0), *((0.0, y, q, 0, 0.0) for q in _SHARES for y in (0.25, 0.5, 0.75, 1.0))]
    groups: dict[tuple[float, float], int] = {}
    scores, own = (2 * np.linspace(0.15, 0.98, 20) ** 2).tolist(), np.delete(np.linspace(-1, 1, 61), 30).tolist()
    for share, t, sign in itertools.product(_SHARES, scores, (1, -1)):
        group = groups.setdefault((share if sign > 0 else 1 - share, t), len(groups) + 1)
        pairs = ((x, x - sign * t / x) for x in own)
        rows += [(x, y, share, group, sign * (x - y)) for x, y in pairs if abs(y) <= 1]
    x, y, q, at, factor = np.array(rows).T
    columns = np.zeros((len(rows), len(groups) + 1))
    columns[np.arange(len(rows)), at.astype(int)] = factor
    columns[:, 0] = (1 - q) * x + q * y
    _, error, multipliers = _fit(columns, network.rest(x, y, q), network.upper, None)
    return error, int((abs(multipliers) > 1e-9).sum())


def fitted(network: Network, heads: int, repeats: int, seed: int) -> float:
    """Return the largest error of a one-layer network with many heads, fitted on a grid, on random inputs."""
    rates = np.outer([1, -1], np.geomspace(0.3, 4 * max(network.weight, 1), heads // 2)).ravel()

    def columns(x: Numbers, y: Numbers, q: Numbers) -> Numbers:
        attended = expit(np.outer(x * (x - y), rates) + np.log((1 - q) / q)[:, None]) - (1 - q)[:, None]
        return np.hstack([((1 - q) * x + q * y)[:, None], (x - y)[:, None] * attended])

    side, random = np.linspace(-1, 1, 21), np.random.default_rng(seed)
    grid = [a.ravel() for a in np.meshgrid(side, side, _SHARES)]
    others = [[*random.uniform(-1, 1, (2, 4000)), random.choice(_SHARES, 4000)] for _ in range(repeats)]
    table = columns(*grid)
    scales = abs(table).max(axis=0)
    targets = network.rest(*grid)
    unit = network.z * min(1, network.weight)
    fits = [_fit(table / scales, targets, network.upper, limit * unit)[0] / scales for limit in _LIMITS]
    return min(max(float(abs(network.rest(*at) - columns(*at) @ v).max()) for at in (grid, *others)) for v in fits)


def _fit(columns: Numbers, target: Numbers, scale: float, most: float | None) -> tuple[Numbers, float, Numbers]:
    """Minimise the largest |target − columns·v|; return v, the error and the multipliers of the rows.

    `scale` is the size of the errors. Entries of v are at most `most` in size.
    """
    ones = np.ones((len(target), 1))
    both = np.vstack([np.hstack([columns, -ones]), np.hstack([-columns, -ones])])
    cost = np.eye(columns.shape[1] + 1)[-1]
    sides, limit = np.concatenate([target, -target]) / scale, None if most is None else most / scale
    found = linprog(
        cost, both, sides, bounds=[(limit and -limit, limit)] * columns.shape[1] + [(0, None)], method="highs"
    )
    over, under = np.split(found.ineqlin.marginals, 2)
    return found.x[:-1] * scale, found.fun * scale, under - over


@dataclass(frozen=True)
class OneLayerDistance(Study):
    """A7: the distance of two layers from one, between annihilators and a fit; `models` are sets of random inputs."""

    title = "One layer of any weights does not replace two layers of small weights, from η ≈ d^(−5/3) on"
    DIMS: ClassVar = [16, 64, 256, 1024]
    SIZES: ClassVar = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.6, 1.0]
    """dη."""
    HEADS: ClassVar = 30

    about = (
        "Distance sup‖S(X) − S'(X)‖max of the network S with L = 2, H = 1, β = 1 and every weight η from the nearest "
        "one-layer network S' with any heads and any weights. Filled: a lower bound, by the best annihilator on a grid "
        "of inputs with two different tokens and |entries| ≤ 1 (a linear program in float64; two or three inputs "
        "decide it). Open: the error of an S' with {self.HEADS} heads, fitted on such inputs, on {self.repeats} "
        "repetitions of 4000 random ones (seed {self.seed}). Dashed: the upper bound of docs/math.md 3.14, for all "
        "inputs and all networks with these weights. Left: the distance against dη. For large d it approaches "
        "dη(1 + dη), the error of keeping only the first layer. Right: the distance divided by η against ηd^(5/3). "
        "Theorem D.1 of paper A, with a constant that does not depend on d, says that all curves stay below one line. "
        "They do up to η of the order d^(−5/3), and not beyond."
    )

    @property
    def repeats(self) -> int:
        """Number of sets of random inputs."""
        return self.models or 3

    def compute(self, where: Computing) -> list[dict[str, Any]]:
        """Compute the rows. They are not kept in the store; they take minutes."""
        networks = [Network(d, z) for d in self.DIMS for z in self.SIZES]
        rows = []
        for done, network in enumerate(networks):
            where.progress(done, len(networks), f"{self.id} d = {network.d}")
            lower, inputs = annihilated(network)
            upper = fitted(network, self.HEADS, self.repeats, self.seed)
            row = {"dim": network.d, "eta": network.z / network.d, "lower": lower, "inputs": inputs}
            rows.append({**row, "fitted": upper, "proved_upper": network.upper, "seed": self.seed})
        where.progress(len(networks), len(networks), "")
        return rows

    def settings(self) -> dict[str, Any]:
        """Return everything needed to compute the figure again."""
        return {"dims": self.DIMS, "dim_times_eta": self.SIZES, "heads": self.HEADS, "repetitions": self.repeats}

    def table(self, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return one row for each width and η."""
        return results

    def draw(self, results: list[dict[str, Any]]) -> Figure:
        """Draw the distance against dη, and the distance divided by η against η d^(5/3)."""
        with figure_style():
            figure = Figure(figsize=(7.3, 3.5), layout="constrained")
            absolute, relative = figure.subplots(1, 2)
            lines = []
            for d, color, marker in zip(self.DIMS, ORDERED, MARKERS, strict=False):
                rows = [row for row in results if row["dim"] == d]
                etas = np.array([row["eta"] for row in rows])
                lower, fit, upper = (
                    np.array([row[name] for row in rows]) for name in ("lower", "fitted", "proved_upper")
                )
                line = {"color": color, "marker": marker, "markersize": 3.6, "linewidth": 1.4}
                lines.append({**line, "label": f"d = {d}"})
                for axes, x, scale in ((absolute, d * etas, 1.0), (relative, etas * d ** (5 / 3), etas)):
                    axes.fill_between(x, lower / scale, fit / scale, color=color, alpha=0.25, linewidth=0)
                    axes.plot(x, lower / scale, **line)
                    axes.plot(x, fit / scale, **{**line, "markersize": 7, "linewidth": 0, "fillstyle": "none"})
                    axes.plot(x, upper / scale, color=color, linewidth=0.9, linestyle=DASHED)
                    axes.set(xscale="log", yscale="log")
            absolute.set(xlabel="dη", ylabel="distance from every one-layer network")
            absolute.set_title("the distance", color=INK)
            relative.set(xlabel="η d$^{5/3}$", ylabel="distance / η")
            relative.set_title("divided by η", color=INK)
            relative.axvline(1, color=INK, linewidth=0.9, linestyle=DOTTED)
            ring = {"color": INK, "marker": "o", "markersize": 7, "linewidth": 0, "fillstyle": "none"}
            lines.append({**ring, "label": "a fitted S'"})
            lines.append({"color": INK, "linewidth": 0.9, "linestyle": DASHED, "label": "proved for all inputs"})
            legend_below(figure, lines, 6, 1.3)
        return figure
