"""Draw the pictures of the concept pages: rank collapse, layer collapse, why small weights, the sandwich, regions.

Every number in the pictures is computed here with depthgauge. The script takes less than a minute.

Run: python docs/figures/make_concepts.py [NAME...]
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.colors import hsv_to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator
from torch import Tensor

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.papers.reproduce.style import BLUE, FAINT, FIVE, GREEN, INK, VERMILION, figure_style
from depthgauge.papers.sweep_tasks import SplitState, split_states
from depthgauge.theory.surrogates.closed_forms import fold

HERE = Path(__file__).parent
WIDTH = 6.0
PIXELS_PER_INCH = 200
_DASHED = (0, (4, 1.8))


# --- rank collapse ----------------------------------------------------------------------------------------------------

RANK = {"layers": 4, "heads": 2, "dim": 2, "eta": 1.8, "seed": 6}
"""Width 2, so that a token is a point of the plane."""


def ring(tokens: int = 36) -> Tensor:
    """Return tokens [n, 2] on a circle that does not contain the origin in its centre."""
    angle = 2 * math.pi * torch.arange(tokens, dtype=torch.float64) / tokens
    return torch.stack([0.35 + 0.6 * angle.cos(), 0.25 + 0.6 * angle.sin()], dim=1)


def states(skip: bool) -> list[SplitState]:
    """Return X_0, …, X_L, each [n, 2], of the same weights with or without skip connections."""
    return split_states(dg.random_network(**RANK, skip=skip), ring())


def log10_residual(state: SplitState) -> float:
    """Return log₁₀ of the residual ratio ‖Res(X)‖max/‖X‖max."""
    return (state.log_residual("max", "midrange") - math.log(float(state.joined().abs().amax()))) / math.log(10)


def rank_collapse() -> Figure:
    """Draw the tokens after every layer, without and with skip connections."""
    rows = {"without\nskip connections": states(skip=False), "with\nskip connections": states(skip=True)}
    count = RANK["layers"] + 1
    with figure_style():
        figure = Figure(figsize=(WIDTH, 3.1), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.02))
        grid = figure.subplots(2, count, sharex=True, sharey=True)
        for r, (row, (name, found)) in enumerate(zip(grid, rows.items(), strict=True)):
            for ell, (axes, state) in enumerate(zip(row, found, strict=True)):
                _draw_tokens(axes, state.joined())
                axes.set_xlabel(f"residual {_power(log10_residual(state))}", fontsize=8, labelpad=3)
                if r == 0:
                    axes.set_title("input" if ell == 0 else f"after layer {ell}", loc="center", fontsize=8.5)
            row[0].set_ylabel(name, fontsize=8.5)
    return figure


def _draw_tokens(axes: Axes, X: Tensor) -> None:
    shown = X / X.abs().amax()
    colours = [hsv_to_rgb((k / len(X), 0.75, 0.8)) for k in range(len(X))]
    axes.axhline(0, color="#DDDDDD", linewidth=0.7, zorder=1)
    axes.axvline(0, color="#DDDDDD", linewidth=0.7, zorder=1)
    axes.scatter(shown[:, 0], shown[:, 1], c=colours, s=13, linewidths=0, zorder=3)
    axes.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", xticks=[], yticks=[])
    axes.grid(False)
    for side in axes.spines.values():
        side.set(visible=True, color="#BBBBBB")


def _power(log10: float) -> str:
    return f"{10**log10:.2f}" if log10 > -2 else f"$10^{{{log10:.0f}}}$"


# --- layer collapse ---------------------------------------------------------------------------------------------------

COLLAPSE = {"layers": 6, "heads": 2, "dim": 16, "seed": 0}
COLLAPSE_ETAS = [0.003 * 2**k for k in range(7)]
METHODS = {"identity": 1, "last-layer": 1, "parallel": 2, "mean-field": 3, "corrected": 4}


@torch.no_grad()
def surrogate_errors(method: str) -> list[float]:
    """Return the largest |S(X) − S'(X)| over 8 random inputs of 32 tokens in [−1, 1], for every η."""
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.rand(8, 32, COLLAPSE["dim"], generator=generator, dtype=torch.float64) - 1
    found = []
    for eta in COLLAPSE_ETAS:
        network = dg.random_network(**COLLAPSE, eta=eta)
        found.append(float((network(x) - dg.collapse(network, method)(x)).abs().max()))
    return found


def slope(x: list[float], y: list[float]) -> float:
    """Return the slope of log y against log x at the smallest two x."""
    return math.log(y[1] / y[0]) / math.log(x[1] / x[0])


def layer_collapse() -> Figure:
    """Draw the error of every one-layer surrogate against η."""
    with figure_style():
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log")
        ends = []
        for (method, order), colour in zip(METHODS.items(), FIVE, strict=True):
            errors = surrogate_errors(method)
            axes.plot(COLLAPSE_ETAS, errors, color=colour, marker="o", markersize=4, linewidth=1.8)
            ends.append((method, order, colour, errors[0]))
        _label_left(axes, ends)
        axes.set_xlim(COLLAPSE_ETAS[0] / 9, COLLAPSE_ETAS[-1] * 1.2)
        axes.set_xticks([0.003, 0.01, 0.03, 0.1], ["0.003", "0.01", "0.03", "0.1"])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(base=100, numticks=12))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("largest |weight| $\\eta$", fontsize=9)
        axes.set_ylabel("error of one layer instead of six", fontsize=9)
    return figure


def _label_left(axes: Axes, ends: list[tuple[str, int, str, float]]) -> None:
    """Write the name and the order of every curve at its left end; labels that would overlap are moved apart."""
    places: list[float] = []
    for *_, value in ends:
        place = math.log10(value) + (0.3 if not places else 0.0)
        while any(abs(place - other) < 0.62 for other in places):
            place -= 0.05
        places.append(place)
    for (method, order, colour, _), place in zip(ends, places, strict=True):
        power = "\\eta" if order == 1 else f"\\eta^{order}"
        axes.annotate(
            f"{method}  ~ ${power}$", (COLLAPSE_ETAS[0], 10**place), xytext=(-8, 0), textcoords="offset points",
            ha="right", va="center", fontsize=8.5, color=colour,
        )  # fmt: skip


# --- why small weights ------------------------------------------------------------------------------------------------

RANGES = [0.2, 2.0, 20.0]


def random_scores(count: int = 160, tokens: int = 32) -> tuple[list[float], list[float]]:
    """Return range and total variation from uniform of random score rows of many sizes."""
    generator = torch.Generator().manual_seed(2)
    spreads, distances = [], []
    for k in range(count):
        s = torch.randn(tokens, generator=generator, dtype=torch.float64)
        s = s * (10 ** (-1.6 + 3.1 * k / count) / float(s.max() - s.min()))
        spreads.append(float(s.max() - s.min()))
        distances.append(float((torch.softmax(s, 0) - 1 / tokens).abs().sum() / 2))
    return spreads, distances


def worst_scores(points: int = 12) -> tuple[list[float], list[float]]:
    """Return the same for two-valued rows of 2000 scores with a fraction 1/(1 + e^{θ/2}) at the top."""
    spreads, distances, n = [], [], 2000
    for k in range(points):
        theta = 10 ** (-1.5 + 2.7 * k / (points - 1))
        s = torch.zeros(n, dtype=torch.float64)
        s[: max(1, round(n / (1 + math.exp(theta / 2))))] = theta
        spreads.append(theta)
        distances.append(float((torch.softmax(s, 0) - 1 / n).abs().sum() / 2))
    return spreads, distances


def why_small_weights() -> Figure:
    """Draw three attention matrices with growing scores, and the distance from uniform against the score range."""
    with figure_style():
        figure = Figure(figsize=(WIDTH, 4.6), layout=ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.04, hspace=0.06))
        top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.45))
        _draw_matrices(top)
        axes = bottom.subplots()
        theta = [10 ** (-1.7 + 3.3 * k / 200) for k in range(201)]
        axes.plot(theta, [math.tanh(t / 4) for t in theta], color=INK, linewidth=1.6, zorder=4)
        axes.plot(*random_scores(), "o", color=BLUE, markersize=3, alpha=0.55, markeredgewidth=0, zorder=3)
        axes.plot(*worst_scores(), "D", color=VERMILION, markersize=4.5, markeredgewidth=0, zorder=5)
        axes.set(xscale="log", yscale="log", xlim=(0.022, 36), ylim=(1e-3, 1.6))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        axes.set_yticks([0.001, 0.01, 0.1, 1], ["0.001", "0.01", "0.1", "1"])
        axes.set_xlabel("range $\\theta$ of a row of scores", fontsize=9)
        axes.set_ylabel("distance from uniform (TV)", fontsize=9)
        handles = [
            Line2D([], [], color=INK, linewidth=1.6, label="proved bound  $\\tanh(\\theta/4)$"),
            Line2D([], [], color=VERMILION, marker="D", linestyle="", markersize=4.5, label="worst-case scores"),
            Line2D([], [], color=BLUE, marker="o", linestyle="", markersize=3.5, label="random scores, 32 tokens"),
        ]
        axes.legend(handles=handles, loc="lower right", fontsize=8.5)
    return figure


def _draw_matrices(figure: object) -> None:
    """Draw softmax of the same 12 × 12 scores, scaled so that the widest row has each of the ranges."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    scores /= (scores.amax(1) - scores.amin(1)).amax()
    grid = figure.subplots(1, len(RANGES))  # type: ignore[attr-defined]
    for axes, theta in zip(grid, RANGES, strict=True):
        image = axes.imshow(torch.softmax(theta * scores, dim=1).numpy(), cmap="Blues", vmin=0, vmax=0.6)
        axes.set_title(f"score range $\\theta$ = {theta:g}", loc="center", fontsize=8.5)
        axes.set(xticks=[], yticks=[])
        axes.grid(False)
        for side in axes.spines.values():
            side.set(visible=True, color="#BBBBBB")
    grid[0].set_ylabel("attention matrix", fontsize=8.5)
    bar = figure.colorbar(image, ax=grid, fraction=0.025, pad=0.02, ticks=[0, 0.3, 0.6])  # type: ignore[attr-defined]
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7.5, length=2)


# --- the sandwich -----------------------------------------------------------------------------------------------------

SANDWICH = {"layers": 3, "heads": 2, "dim": 6, "seed": 0}
SANDWICH_ETAS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32]


def sandwich_bounds() -> dict[str, list[float]]:
    """Return, for every η, the error on random inputs, the attacked lower bound and the certified upper bound."""
    generator = torch.Generator().manual_seed(3)
    x = 2 * torch.rand(64, 16, SANDWICH["dim"], generator=generator, dtype=torch.float64) - 1
    found: dict[str, list[float]] = {"random": [], "lower": [], "upper": []}
    for eta in SANDWICH_ETAS:
        network = dg.random_network(**SANDWICH, eta=eta)
        surrogate = dg.collapse(network, "mean-field")
        certificate = dg.certify(network, surrogate, radius=1.0)
        with torch.no_grad():
            found["random"].append(float((network(x) - surrogate(x)).abs().max()))
        found["lower"].append(certificate.lower)
        found["upper"].append(certificate.upper)
    return found


def sandwich() -> Figure:
    """Draw lower bound, upper bound and the band between them that contains the worst error."""
    found = sandwich_bounds()
    with figure_style():
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log")
        axes.plot(
            SANDWICH_ETAS, found["upper"], color=INK, marker="v", markersize=5, linewidth=1.8,
            label="certified upper bound: no input is worse",
        )  # fmt: skip
        axes.fill_between(
            SANDWICH_ETAS, found["lower"], found["upper"], color=GREEN, alpha=0.22, linewidth=0,
            label="the worst error lies in this band",
        )  # fmt: skip
        axes.plot(
            SANDWICH_ETAS, found["lower"], color=VERMILION, marker="^", markersize=5, linewidth=1.8,
            label="attacked lower bound: one input attains it",
        )  # fmt: skip
        axes.plot(
            SANDWICH_ETAS, found["random"], color=FAINT, marker=".", linewidth=1.2, linestyle=_DASHED,
            label="largest error on 64 random inputs",
        )  # fmt: skip
        axes.legend(loc="upper left", fontsize=8.5)
        axes.set_xticks(SANDWICH_ETAS, [f"{eta:g}" for eta in SANDWICH_ETAS])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("largest |weight| $\\eta$", fontsize=9)
        axes.set_ylabel("error of the mean-field surrogate", fontsize=9)
    return figure


# --- regions and arithmetics ------------------------------------------------------------------------------------------

KINDS: dict[str, tuple[dict[str, object], Callable[[dg.SelfAttentionNetwork], dg.SelfAttentionNetwork]]] = {
    "one layer: corrected": ({}, lambda net: dg.collapse(net, method="corrected")),
    "folding: one layer kept": ({}, lambda net: fold(net, [1])),
    "causal: mean-field": ({"causal": True}, lambda net: dg.collapse(net, method="mean-field", length=4)),
    "MLPs: attention deleted": ({"mlp": 6}, lambda net: dg.collapse(net, method="last-layer")),
    "LayerNorm, MLPs: wide block": (
        {"mlp": 6, "mlp_skip": True, "norm": "pre", "activation": "gelu"},
        lambda net: dg.collapse(net, method="parallel"),
    ),
}
"""What is compared: the settings of S, and how S' is made from it."""


def covered_bounds() -> dict[tuple[str, str], float]:
    """Return upper/lower of every kind of comparison over every region that is covered, all verified."""
    vectors = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).clamp(-1, 1)
    found = {}
    for kind, (settings, surrogate) in KINDS.items():
        net = dg.random_network(layers=3, heads=2, dim=4, eta=0.02, seed=0, **settings)  # type: ignore[arg-type]
        small = surrogate(net)
        regions: dict[str, dict[str, object]] = {
            "box": {"radius": 1.0, "tokens": 4},
            "ball": {"ball": 1.0, "tokens": 4},
            "tokens": {"inputs": dg.Tokens(vectors, length=4)},
        }
        for region, given in regions.items():
            try:
                certificate = dg.certify(net, small, **given, starts=4)  # type: ignore[arg-type]
            except InputError:  # not covered
                continue
            assert certificate.verify()
            found[kind, region] = certificate.ratio or math.inf
    return found


def regions_and_arithmetics() -> Figure:
    """Draw which comparisons are covered over which regions, and the two arithmetics."""
    found, regions = covered_bounds(), ("box", "ball", "tokens")
    with figure_style():
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        axes = figure.subplots()
        for row, kind in enumerate(KINDS):
            for column, region in enumerate(regions):
                ratio = found.get((kind, region))
                face = "white" if ratio is None else GREEN
                axes.bar(column, 0.86, width=0.92, bottom=row - 0.43, color=face, edgecolor=FAINT, alpha=0.3)
                text = "not covered" if ratio is None else f"× {ratio:.3g}"
                axes.text(
                    column, row, text, ha="center", va="center", fontsize=9, color=FAINT if ratio is None else INK
                )
        for row, (name, use, color) in enumerate(
            (("float64, outward", "gives upper", BLUE), ("arb, 200 bits", "verify()", VERMILION))
        ):
            axes.bar(3.35, 1.9, width=1.3, bottom=2.5 * row - 0.2, color=color, alpha=0.25, edgecolor=FAINT)
            axes.text(3.35, 2.5 * row + 0.75, f"{name}\n{use}", ha="center", va="center", fontsize=9, color=INK)
        axes.set_xticks([0, 1, 2, 3.35], [*regions, "arithmetic of\nevery bound"], fontsize=9)
        axes.set_yticks(range(len(KINDS)), list(KINDS), fontsize=9)
        axes.set(xlim=(-0.6, 4.1), ylim=(len(KINDS) - 0.4, -0.6))
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.grid(visible=False)
        for spine in axes.spines.values():
            spine.set_visible(False)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "rank-collapse": rank_collapse,
    "layer-collapse": layer_collapse,
    "why-small-weights": why_small_weights,
    "sandwich": sandwich,
    "regions-and-arithmetics": regions_and_arithmetics,
}


def main() -> None:
    """Write the pictures as PNG files beside this script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PICTURES)} (default: all)")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    for name in options.names or PICTURES:
        with figure_style():
            PICTURES[name]().savefig(
                options.out / f"{name}.png", dpi=PIXELS_PER_INCH, facecolor="white", metadata={"Software": None}
            )


if __name__ == "__main__":
    main()
