"""The class that loads a checkpoint, what is measured of a model of this class, and how much it reads at once."""

import json
from pathlib import Path
from typing import Any

from depthgauge.checkpoints.source.library import CheckpointError, attempt, transformers
from depthgauge.checkpoints.source.model_files import Source

# --- What a sentence-transformers directory says about the embedding that its users read -----------------------------
# Its `modules.json` lists a transformer, which is in the directory itself, a pooling module, and possibly others.

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


def is_classifier(architecture: str) -> bool:
    """Return whether a class has a classification head."""
    return "Classification" in architecture


def predicts_label(architecture: str) -> bool:
    """Return whether a class predicts one label for each input."""
    return is_classifier(architecture) and "ForToken" not in architecture


# --- The class that loads a checkpoint, and what is measured of a model of this class --------------------------------


def objective_of(architecture: str) -> str:
    """Return how a change of a model with this class is measured.

    Models that write text are measured by their `loss`, classifiers by their `logits`, and all others, such as masked
    language models and bare decoders, by the `states` before their head.
    """
    auto = transformers().models.auto.modeling_auto
    writers = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    )
    is_writer = any(architecture in names.values() for names in writers)
    return "loss" if is_writer else "logits" if is_classifier(architecture) else "states"


def loader_of(config: Any, source: Source | None = None) -> tuple[Any, str]:
    """Return the class that loads a checkpoint with its head, and how a change is measured; see `objective_of`.

    The class is the one that the configuration names. What is measured of a sentence-transformers directory is the
    `embedding`.
    """
    loader, objective = _named_loader(config)
    is_pooled = source is not None and source.gguf is None and bool(pooling_modes(source.folder))
    return loader, "embedding" if is_pooled else objective


def _named_loader(config: Any) -> tuple[Any, str]:
    library = transformers()
    auto = library.models.auto.modeling_auto
    named = (getattr(config, "architectures", None) or [""])[0]
    own_code = getattr(config, "auto_map", None) or {}  # a checkpoint that brings its own code declares its classes
    is_causal = named in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if not named:
        kind = config.model_type
        masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        is_causal = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not masked
    is_causal = is_causal or "AutoModelForCausalLM" in own_code
    auto_class = library.AutoModelForCausalLM if is_causal else library.AutoModel
    if not named or own_code:
        return auto_class, "loss" if is_causal else "states"
    model_class = getattr(library, named, None)
    if model_class is None:
        raise CheckpointError(
            f"the checkpoint is a {named}, which transformers {library.__version__} does not know; install a version "
            "that does"
        )
    parts = (config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", ())))
    if not any(isinstance(part, getattr(model_class, "config_class", None) or object) for part in parts):
        raise CheckpointError(
            f"the config.json of the checkpoint contradicts itself: the model_type is {config.model_type!r}, and "
            f"architectures names a {named}; correct it"
        )
    return auto_class if is_causal else model_class, objective_of(named)


def context_length(config: Any) -> int | None:
    """Return the largest number of tokens the model accepts, or None if its configuration does not say."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    longest = next((value for name in names if (value := getattr(text, name, None))), None)
    if longest is None or longest < 1:  # XLNet says −1: there is no limit
        return None
    # The positions of RoBERTa models start at pad_token_id + 1; the ones before are never used.
    offset = (text.pad_token_id or 0) + 1 if text.model_type in ("roberta", "xlm-roberta", "camembert") else 0
    return int(longest) - offset
