"""A tiny trained model on disk, a model with fewer blocks, and a text that both can read."""

from pathlib import Path

import torch
from tiny_checkpoints import SPECIAL, WORDS, save_tokenizer
from trained_models import LAYERS, sequences, trained_model

from depthgauge.checkpoints.source.library import quiet
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.surgery.extract import extract

WINDOW = 24
REMOVED = 2
"""The block that the smaller model lacks."""


def save_models(folder: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    """Save a trained model, and the same without a block; return the directories `model` and `smaller`."""
    model = trained_model(name).to(dtype)
    smaller = extract(wrap(model), [layer for layer in range(LAYERS) if layer != REMOVED])
    for part, made in (("model", model), ("smaller", smaller)):
        with quiet():
            made.save_pretrained(folder / part)
        save_tokenizer(folder / part, special=False)
    return folder / "model", folder / "smaller"


def save_text(path: Path, windows: int = 300, seed: int = 7) -> Path:
    """Write sequences like those that the model was trained on, as words."""
    names = [*SPECIAL, *WORDS]
    rows = sequences(seed, windows, WINDOW).tolist()
    path.write_text("\n".join(" ".join(names[token] for token in row) for row in rows))
    return path
