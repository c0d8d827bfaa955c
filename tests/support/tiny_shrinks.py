"""Tiny checkpoints for `shrink`, and short runs of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import save_tokenizer
from tiny_models import tiny_model

from depthgauge.checkpoints.source.library import quiet
from depthgauge.surgery.student import EFFORT
from depthgauge.workflows.shrink import ShrinkResult, shrink

LAYERS = 4
STEPS, KEPT_STEPS = 8, 24
"""Steps for which the repair of `--effort quick` trains in most tests, and those that assert that it is kept."""


def save(folder: Path, name: str, dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> Path:
    """Save a tiny checkpoint with a tokenizer."""
    model = tiny_model(name, layers=layers).to(dtype)
    with quiet():
        model.save_pretrained(folder)
    save_tokenizer(folder, special=not hasattr(model, "lm_head"))
    return folder


def quick(model: Any, text: Path | None, **changes: Any) -> ShrinkResult:
    keywords: dict[str, Any] = {"window": 16, "effort": "quick", "text": text} | changes
    return shrink(model, **keywords)


def train_for(steps: int, patch: Any) -> None:
    """Let the repair of `--effort quick` train for this many steps."""
    patch.setitem(EFFORT, "quick", replace(EFFORT["quick"], steps=steps))
