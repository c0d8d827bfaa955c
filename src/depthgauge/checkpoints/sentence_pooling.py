"""What a sentence-transformers directory says about the embedding that its users read.

Its `modules.json` lists a transformer, which is in the directory itself, a pooling module, and possibly others.
"""

import json
from pathlib import Path
from typing import Any

from depthgauge.checkpoints.library import CheckpointError, attempt

POOLING_MODES = ("cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean")
"""The pooling modes of sentence-transformers, in the order in which it joins several."""
_OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Keys of a pooling module → mode; newer versions write one key, `pooling_mode`."""
_HARMLESS = ("Transformer", "Pooling", "Normalize")
"""Modules that leave the cosine of pooled embeddings as it is."""


def pooling_modes(folder: Path | None) -> tuple[str, ...]:
    """Return how the states of the tokens become one embedding; empty if this is no sentence-transformers directory.

    Raises:
        CheckpointError: the directory has a pooling module that cannot be read.
    """
    for kind, path in _modules(folder):
        if kind == "Pooling" and folder is not None:
            return _modes(folder / path / "config.json", str(folder))
    return ()


def pooling_notes(folder: Path) -> tuple[str, ...]:
    """Say which modules, such as Dense, change the embedding after it is measured."""
    later = [kind for kind, _ in _modules(folder) if kind not in _HARMLESS]
    return (f"the embedding is measured before the modules that follow: {', '.join(later)}",) if later else ()


def longest_window(folder: Path | None, context: int | None) -> int | None:
    """Return the longest window: the model's context, or the `max_seq_length` at which longer texts are cut."""
    path = None if folder is None else folder / "sentence_bert_config.json"
    if path is None or not path.is_file():
        return context
    settings = attempt(str(folder), "sentence_bert_config.json", lambda: json.loads(path.read_text("utf-8")))
    longest = settings.get("max_seq_length") if isinstance(settings, dict) else None
    return min(longest, context or longest) if isinstance(longest, int) and longest > 0 else context


def _modules(folder: Path | None) -> list[tuple[str, str]]:
    """Return the kind and the path of every module; the kind is the last part of the name of its class."""
    path = None if folder is None else folder / "modules.json"
    if path is None or not path.is_file():
        return []

    def load() -> list[tuple[str, str]]:
        modules: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
        return [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in modules]

    return attempt(str(folder), "list of modules (modules.json)", load)  # type: ignore[no-any-return]


def _modes(path: Path, name: str) -> tuple[str, ...]:
    """Return the modes of the configuration of a pooling module."""
    settings = attempt(name, "pooling module", lambda: json.loads(path.read_text("utf-8")))
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} is not the configuration of a pooling module; download it again")
    given = settings.get("pooling_mode") or [mode for key, mode in _OLD_KEYS.items() if settings.get(key)]
    modes = [given] if isinstance(given, str) else list(given)
    if not modes or any(mode not in POOLING_MODES for mode in modes):
        raise CheckpointError(
            f"{path} names the pooling {', '.join(map(str, modes)) or 'none'}, expected some of "
            f"{', '.join(POOLING_MODES)}; install a version of depthgauge that knows it"
        )
    return tuple(sorted(modes, key=POOLING_MODES.index))
