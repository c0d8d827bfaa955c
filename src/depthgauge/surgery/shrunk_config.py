"""The configuration of a model from which blocks were removed.

Layer j of the new model is layer `kept[j]` of the old one. Everything that a configuration says about single layers
must follow: the number of layers, lists with one entry per layer, and rules that compute such a list from the index.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from depthgauge._format import counted
from depthgauge.checkpoints.library import quiet
from depthgauge.errors import InputError

PER_LAYER = (
    "layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta",
    "num_attention_heads_per_layer", "num_key_value_heads_per_layer",
)  # fmt: skip
"""Keys of configurations that hold one entry per layer; the list may be longer than the number of layers."""
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
"""Keys that generate `layer_types` from the layer index. The explicit list replaces them."""
_OWN_TO_A_FILE = ("quantization_config", "transformers_version", "_name_or_path")
"""Keys that describe the file that was loaded, not the model."""


def shrunk_config(config: Any, kept: Sequence[int]) -> Any:
    """Return the configuration of the model that consists of some layers of another model.

    - The number of layers becomes `len(kept)`, and lists with one entry per layer keep the entries of `kept`.
    - `max_window_layers` m becomes #{i in kept: i < m}. In Qwen models layer i has a sliding window if i ≥ m and
      `layer_types` is missing; both rules now give each layer its former attention.
    - `quantization_config` is removed: the weights of the new model are not quantized.

    A configuration that is saved and loaded again gives the same layers, because all lists are explicit.

    Args:
        config: a transformers configuration; it is not changed.
        kept: the layers to keep, from 0, in increasing order.

    Returns:
        A new configuration of the same type.

    Raises:
        InputError: `kept` is empty, not increasing, or names a layer that does not exist.
    """
    layers = int(config.num_hidden_layers)
    kept = require_layers(kept, layers)
    values: dict[str, Any] = config.to_dict()
    for key in (*_OWN_TO_A_FILE, *_PATTERNS):
        values.pop(key, None)
    for key, value in values.items():
        if _is_per_layer(key, value, layers):
            values[key] = [value[layer] for layer in kept]
    values[_spelling(config, "num_hidden_layers")] = len(kept)
    if isinstance(values.get("max_window_layers"), int):
        values["max_window_layers"] = sum(layer < values["max_window_layers"] for layer in kept)
    with quiet():
        return type(config).from_dict(values)


def require_layers(kept: Sequence[int], layers: int) -> tuple[int, ...]:
    """Return `kept` as a tuple if it is a non-empty increasing sequence of layers from 0 to `layers` − 1.

    Args:
        kept: the layers to keep.
        layers: the number of layers of the model.

    Raises:
        InputError: it is not.
    """
    chosen = tuple(int(layer) for layer in kept)
    if not chosen:
        raise InputError(f"at least one of {counted(layers, 'layer')} must be kept, got none; remove fewer layers")
    if any(after <= before for before, after in pairwise(chosen)):
        raise InputError(f"the layers to keep must be in increasing order without repetition, got {list(chosen)}")
    if chosen[0] < 0 or chosen[-1] >= layers:
        raise InputError(f"the layers to keep must be from 0 to {layers - 1}, got {list(chosen)}")
    return chosen


def _is_per_layer(key: str, value: object, layers: int) -> bool:
    """Return whether a value holds one entry per layer.

    Besides the keys in `PER_LAYER` this is any list whose name speaks of layers and whose length is the number of
    layers, unless it is a list of layer indices, such as [0, 4, 8].
    """
    if not isinstance(value, list | tuple) or len(value) < layers:
        return False
    if key in PER_LAYER:
        return True
    indices = all(type(entry) is int for entry in value) and all(before < after for before, after in pairwise(value))
    return "layer" in key and len(value) == layers and not (indices and layers > 1)


def _spelling(config: Any, key: str) -> str:
    """Return the name under which a configuration stores a key, such as `n_layer` for `num_hidden_layers` in GPT-2."""
    names: Mapping[str, str] = getattr(config, "attribute_map", {})
    return names.get(key, key)
