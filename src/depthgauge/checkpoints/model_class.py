"""The class that loads a checkpoint, and what is measured of a model of this class."""

from typing import Any

from depthgauge.checkpoints.inputs.kinds import is_classifier
from depthgauge.checkpoints.library import CheckpointError, transformers
from depthgauge.checkpoints.sentence_pooling import pooling_modes
from depthgauge.checkpoints.source import Source


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
    found = getattr(library, named, None)
    if found is None:
        raise CheckpointError(
            f"the checkpoint is a {named}, which transformers {library.__version__} does not know; install a version "
            "that does"
        )
    parts = (config, *(getattr(config, part, None) for part in getattr(config, "sub_configs", ())))
    if not any(isinstance(part, getattr(found, "config_class", None) or object) for part in parts):
        raise CheckpointError(
            f"the config.json of the checkpoint contradicts itself: the model_type is {config.model_type!r}, and "
            f"architectures names a {named}; correct it"
        )
    return auto_class if is_causal else found, objective_of(named)
