"""Figure D2: the residual ratio by layer of a checkpoint with parts switched off, initialised and trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from depthgauge.base.errors import MissingPackageError
from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.library import quiet, transformers
from depthgauge.checkpoints.load import Checkpoint, Placement, load_config, load_model, load_tokenizer, wrap
from depthgauge.checkpoints.source import find
from depthgauge.checkpoints.switched_off import VARIANTS, residual_by_depth
from depthgauge.checkpoints.windows import drawn_windows
from depthgauge.papers.figures.style import BLUE, FAINT, GREEN, INK, LAYER, MARKERS, VERMILION, figure_style
from depthgauge.papers.reproduce.catalog import MINILM
from depthgauge.papers.reproduce.study import Computing, Study

FLOOR = 1e-15
"""Ratios below this are rounding errors of float64."""


DepthCurves = Mapping[str, Mapping[str, Tensor]]
"""The residual ratios by model and variant, each [samples, L + 1]."""
_COLOURS = (VERMILION, INK, GREEN, BLUE)


def installed_checkpoint() -> Path:
    """Return the path of the MiniLM checkpoint in its installed package."""
    spec = find_spec(MINILM.module)
    if spec is None or spec.origin is None:
        raise MissingPackageError(f"{MINILM.label} is not installed; install it with `{MINILM.install}`")
    return Path(spec.origin).parent / "model"


@dataclass(frozen=True)
class RankStudy(Study):
    """D2 as `reproduce` draws it; `models` is the number of text samples, `checkpoint` replaces MiniLM."""

    checkpoint: Path | None = None

    title = "Without skip connections the tokens of a real model become equal"
    floor = FLOOR
    SAMPLES: ClassVar[int] = 32
    TOKENS: ClassVar[int] = 128

    about = (
        "Residual ratio ‖X − 1x̄ᵀ‖/‖X‖ after each layer, where x̄ is the token mean and "
        "the norm is √(largest column sum × largest row sum), for the architecture of MiniLM with random initial "
        "weights (top) and with trained weights (bottom). The variants are those of Dong et al. (2021): attention "
        "only, with the MLP, with the skip connection around attention, and the full model. Geometric mean and one "
        "geometric standard deviation over {self.samples} samples of {self.TOKENS} tokens of text (seed "
        "{self.seed}), in float64; values below {self.floor:g} are rounding errors. Variants without the skip "
        "connection around attention keep LayerNorm and the skip connection around the MLP."
    )

    @property
    def samples(self) -> int:
        """Number of text samples."""
        return self.models or self.SAMPLES

    def compute(self, where: Computing) -> DepthCurves:
        """Compute the curves of both models. They are not kept in the store; they take seconds."""
        path = installed_checkpoint() if self.checkpoint is None else self.checkpoint
        return depth_curves(path, self.samples, self.TOKENS, self.seed, where.progress)

    def settings(self) -> dict[str, Any]:
        """Return everything needed to compute the figure again."""
        return {
            "samples": self.samples,
            "tokens": self.TOKENS,
            "checkpoint": MINILM.module if self.checkpoint is None else self.checkpoint.name,
            "variants": {name: vars(variant) for name, variant in VARIANTS.items()},
        }

    def table(self, results: DepthCurves) -> list[dict[str, Any]]:
        """Return one row for each model, variant and layer.

        `ratio` and `factor` are the geometric mean and the geometric standard deviation over samples, `mean` and
        `deviation` the arithmetic ones.
        """
        return [
            {
                "model": model,
                "variant": variant,
                "layer": layer,
                "ratio": float(column.log().mean().exp()),
                "factor": float(column.log().std(correction=0).exp()),
                "mean": float(column.mean()),
                "deviation": float(column.std(correction=0)),
                "samples": len(column),
            }
            for model, curves in results.items()
            for variant, ratios in curves.items()
            for layer, column in enumerate(ratios.unbind(dim=1))
        ]

    def draw(self, results: DepthCurves) -> Figure:
        """Draw one panel for each model on a common logarithmic axis; values below `FLOOR` are rounding errors."""
        with figure_style():
            figure = Figure(figsize=(3.6, 4.6), layout=ConstrainedLayoutEngine(h_pad=0.05, hspace=0.05))
            grid = figure.subplots(len(results), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
            for axes, (model, curves) in zip(grid, results.items(), strict=True):
                _draw_model(axes, curves)
                axes.set_title(model, color=INK)
            grid[-1].set_xlabel(LAYER)
            handles, labels = grid[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=4, handletextpad=0.4, columnspacing=1.0)
        return figure


def _draw_model(axes: Axes, curves: Mapping[str, Tensor]) -> None:
    """Draw the geometric mean and the geometric standard deviation over samples of every variant."""
    axes.set_yscale("log")
    axes.axhspan(FLOOR / 100, FLOOR, color=FAINT, alpha=0.15, linewidth=0)
    for order, (label, ratios) in enumerate(curves.items()):
        logs, layers = ratios.log(), range(ratios.shape[1])
        mean, factor = logs.mean(dim=0).exp().numpy(), logs.std(dim=0, correction=0).exp().numpy()
        wide = order % 2 == 0  # drawn wider, since the next curve may cover it
        axes.fill_between(layers, mean / factor, mean * factor, color=_COLOURS[order], alpha=0.18, linewidth=0)
        axes.plot(
            layers, mean, color=_COLOURS[order], marker=MARKERS[order], markersize=6.0 if wide else 3.0,
            linewidth=2.6 if wide else 1.2, label=label, zorder=4,
        )  # fmt: skip
    axes.set_ylim(FLOOR / 20, 4)
    axes.yaxis.set_major_locator(LogLocator(base=10, numticks=9))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("residual ratio")
    axes.text(0.1, FLOOR / 3, "rounding error", fontsize=7, color=FAINT, va="center")


def depth_curves(checkpoint: Path, samples: int, tokens: int, seed: int, progress: Step = silent) -> DepthCurves:
    """Return the curves of every variant, for the architecture with random weights and for the checkpoint itself."""
    source, placement = find(checkpoint), Placement("float64", "cpu")
    config = load_config(source, placement)
    ids = drawn_windows(load_tokenizer(source, placement), None, windows=samples, window=tokens, seed=seed)
    total, found = 2 * len(VARIANTS), dict[str, dict[str, Tensor]]()
    for name, model in _initialised_and_trained(load_model(source, config, placement), config, seed):
        ratios = found.setdefault(name, {})
        for label, variant in VARIANTS.items():
            progress((len(found) - 1) * len(VARIANTS) + len(ratios), total, f"{name}, {label}")
            ratios[label] = residual_by_depth(model, ids, variant)
    progress(total, total, "")
    return found


def _initialised_and_trained(trained: Checkpoint, config: Any, seed: int) -> Iterator[tuple[str, Checkpoint]]:
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        fresh = getattr(transformers(), type(trained.model).__name__)(config)
    yield "initialised", wrap(fresh.double(), "initialised")
    yield "trained", trained
