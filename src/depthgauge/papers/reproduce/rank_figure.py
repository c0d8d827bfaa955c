"""Figure D2: the residual ratio by layer of a checkpoint with parts switched off, initialised and trained."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.checkpoints.library import quiet, transformers
from depthgauge.checkpoints.load import Checkpoint, Placement, load_config, load_model, load_tokenizer, wrap
from depthgauge.checkpoints.source import find
from depthgauge.checkpoints.switched_off import VARIANTS, residual_by_depth
from depthgauge.checkpoints.windows import drawn_windows
from depthgauge.errors import MissingPackageError
from depthgauge.papers.reproduce.catalog import MINILM
from depthgauge.papers.reproduce.study import Computing, Study
from depthgauge.progress import Step, silent

FLOOR = 1e-15
"""Ratios below this are rounding errors of float64."""


@dataclass(frozen=True)
class DepthCurves:
    """The residual ratios of one model by variant, each `[samples, L + 1]`."""

    model: str
    ratios: dict[str, Float[Tensor, "samples states"]]


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

    def compute(self, where: Computing) -> list[DepthCurves]:
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

    def table(self, results: list[DepthCurves]) -> list[dict[str, Any]]:
        """Return one row for each model, variant and layer.

        `ratio` and `factor` are the geometric mean and the geometric standard deviation over samples, `mean` and
        `deviation` the arithmetic ones.
        """
        return [
            {
                "model": curves.model,
                "variant": variant,
                "layer": layer,
                "ratio": float(column.log().mean().exp()),
                "factor": float(column.log().std(correction=0).exp()),
                "mean": float(column.mean()),
                "deviation": float(column.std(correction=0)),
                "samples": len(column),
            }
            for curves in results
            for variant, ratios in curves.ratios.items()
            for layer, column in enumerate(ratios.unbind(dim=1))
        ]

    def draw(self, results: list[DepthCurves]) -> Any:
        """Return the matplotlib figure."""
        from depthgauge.papers.figures.rank_by_depth import DepthCurve, DepthPanel, draw_depths

        def curve(name: str, ratios: Tensor) -> DepthCurve:
            logs = ratios.log()
            return DepthCurve(name, logs.mean(dim=0).exp().tolist(), logs.std(dim=0, correction=0).exp().tolist())

        panels = [
            DepthPanel(curves.model, [curve(name, ratios) for name, ratios in curves.ratios.items()])
            for curves in results
        ]
        return draw_depths(panels, FLOOR)


def depth_curves(checkpoint: Path, samples: int, tokens: int, seed: int, progress: Step = silent) -> list[DepthCurves]:
    """Return the curves of every variant, for the architecture with random weights and for the checkpoint itself."""
    source, placement = find(checkpoint), Placement("float64", "cpu")
    config = load_config(source, placement)
    ids = drawn_windows(load_tokenizer(source, placement), None, windows=samples, window=tokens, seed=seed)
    total, found = 2 * len(VARIANTS), list[DepthCurves]()
    for name, model in _initialised_and_trained(load_model(source, config, placement), config, seed):
        ratios: dict[str, Tensor] = {}
        for label, variant in VARIANTS.items():
            progress(len(found) * len(VARIANTS) + len(ratios), total, f"{name}, {label}")
            ratios[label] = residual_by_depth(model, ids, variant)
        found.append(DepthCurves(name, ratios))
    progress(total, total, "")
    return found


def _initialised_and_trained(trained: Checkpoint, config: Any, seed: int) -> Iterator[tuple[str, Checkpoint]]:
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        fresh = getattr(transformers(), type(trained.model).__name__)(config)
    yield "initialised", wrap(fresh.double(), "initialised")
    yield "trained", trained
