"""Build a model from some of the blocks of a checkpoint.

Layer j of the new model computes the same function as layer `kept[j]` of the checkpoint, and everything outside the
blocks is equal. The new model is an ordinary transformers model of the same class. It shares no memory with the
checkpoint. Everything that a configuration says about single layers follows: the number of layers, lists with one entry
per layer, and rules that compute such a list from the index.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from depthgauge.base.errors import InputError
from depthgauge.base.format import counted
from depthgauge.checkpoints.blocks.attention_calls import NAME as OBSERVED
from depthgauge.checkpoints.source.library import CheckpointError, quiet, short
from depthgauge.checkpoints.weights.families import find_blocks
from depthgauge.checkpoints.weights.load import Checkpoint, blocks_of
from depthgauge.checkpoints.weights.stored_weights import Stream, stored_tensors
from depthgauge.surgery.write_model import ALIGNED

PER_LAYER = (
    "layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "layer_rope_theta",
    "num_attention_heads_per_layer", "num_key_value_heads_per_layer",
)  # fmt: skip
"""Keys of configurations that hold one entry per layer; the list may be longer than the number of layers."""
_FIRST_LAYERS = ("max_window_layers", "first_k_dense_replace", "num_dense_layers")
"""Keys that say how many of the first layers are of another kind than the rest."""
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
"""Keys that generate `layer_types` from the layer index. The explicit list replaces them."""
_STAGES = ("stage_names", "out_features", "out_indices")
"""Keys that name a stage per layer, and those that a backbone returns, by default the last one (DINOv2)."""
_OWN_TO_A_FILE = ("quantization_config", "transformers_version", "_name_or_path")
"""Keys that describe the file that was loaded, not the model."""


def require_supported(checkpoint: Checkpoint) -> None:
    """Raise unless blocks can be removed from a checkpoint such that stock transformers loads the result.

    Raises:
        CheckpointError: the model contains a text model (as Gemma 3 with images does), its class is not part of
            transformers, its weights are quantized, or it has adapters or cross-attention. The message says which.
            Whether the model without a block computes what it should is measured by
            `student.first_removable`.
    """
    model, config, name = checkpoint.model, checkpoint.config, checkpoint.name
    if model.config is not config:
        raise CheckpointError(
            f"{name} is a {model.config.model_type} model that contains a text model; shrink needs the text model alone"
        )
    if not type(model).__module__.startswith("transformers."):
        raise CheckpointError(
            f"{name} is a {type(model).__name__}, which is not part of transformers; its result could not be loaded "
            "without custom code"
        )
    method = _quantization(config)
    if method not in (None, "gguf") or not all(tensor.is_floating_point() for tensor in model.parameters()):
        raise CheckpointError(
            f"the weights of {name} are quantized ({method or 'unknown method'}); give the checkpoint they come from"
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(f"{name} has adapters; merge them into the weights and save the model first")
    if getattr(config, "add_cross_attention", False) and not getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{name} has cross-attention; shrink supports models with self-attention only")
    if not blocks_of(checkpoint):
        raise CheckpointError(f"the blocks of {name} cannot be found: no list has {checkpoint.layers} modules")


@torch.no_grad()
def extract(checkpoint: Checkpoint, kept: Sequence[int], copies: bool = True) -> Any:
    """Return a new transformers model, in evaluation mode, that consists of the blocks `kept` of a checkpoint.

    The dtype and the device of every tensor are kept. Tensors that are shared, such as tied embeddings, stay shared.
    Without `copies`, the new model has the tensors of the checkpoint itself, where they are in memory.

    Raises:
        CheckpointError: the model is not supported; see `require_supported`.
        InputError: `kept` is empty in a stack, not increasing, or names a block that does not exist.
    """
    require_supported(checkpoint)
    model, spans = checkpoint.model, checkpoint.spans
    kept = require_layers(kept, checkpoint.layers)
    by_stack = [
        require_layers([layer - span.start for layer in kept if layer in span], len(span), f" of the {name}")
        for name, span in zip(checkpoint.roots, spans, strict=True)
    ]
    own = model.config._attn_implementation
    try:
        config = checkpoint.config
        for key, chosen in zip(checkpoint.layer_keys, by_stack, strict=True):
            config = shrunk_config(config, chosen, key)
        config._attn_implementation = None if own == OBSERVED else own
        if hasattr(config, "tie_word_embeddings"):
            config.tie_word_embeddings = _is_tied(model)
        with quiet(), torch.device("meta"):
            fresh = type(model)(config)
    except Exception as error:  # configurations check themselves: some need a layer of each kind
        raise CheckpointError(
            f"without the removed blocks, transformers does not accept the configuration of {checkpoint.name}: "
            f"{short(error)}; keep other blocks"
        ) from error
    fresh.eval()
    if len(blocks_of(replace(checkpoint, model=fresh, config=config))) != len(kept):
        raise CheckpointError(
            f"blocks cannot be removed from {checkpoint.name}: the number of blocks of a {type(model).__name__} does "
            "not follow num_hidden_layers of its configuration"
        )
    if hasattr(fresh, "pooler") and (model.pooler is None or _has_random_pooler(checkpoint)):
        fresh.pooler = None
    names = {module: name for name, module in model.named_modules()}
    lists = [names[blocks_of(checkpoint)[span.start]].rpartition(".")[0] for span in spans]
    places = {
        f"{path}.{old}": f"{path}.{new}"
        for path, chosen in zip(lists, by_stack, strict=True)
        for new, old in enumerate(chosen)
    }
    _copy_tensors(model, fresh, {f"{new}.": f"{old}." for old, new in places.items()}, copies)
    _keep_scales(fresh, config, kept)
    if getattr(model, "generation_config", None) is not None:
        fresh.generation_config = copy.deepcopy(model.generation_config)
        if "decoder" in checkpoint.roots:
            _renumber_aligned(fresh.generation_config, by_stack[-1])
    if checkpoint.stream is not None:
        Stream(blocks_of(replace(checkpoint, model=fresh, config=config)), checkpoint.stream.device)
    _distribute(model, fresh, lists, places)
    return fresh


def _renumber_aligned(config: Any, kept: Sequence[int]) -> None:
    """Leave only heads of the `kept` blocks, by their new numbers, to find the times of words, as Whisper does."""
    if heads := getattr(config, ALIGNED, None):
        left = [[kept.index(layer), head] for layer, head in heads if layer in kept]
        setattr(config, ALIGNED, left)
        if not left:
            delattr(config, ALIGNED)  # transformers then says that there are no such times


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors that a model saves to another dtype, in place, and return the model.

    `model.to(dtype)` would also round tensors that are computed and not saved, such as rotary frequencies; the model
    would then differ from the one that is loaded from its files.
    """
    saved = set(model.state_dict())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in saved and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


def _quantization(config: Any) -> str | None:
    """Return the name of the quantization method, or None if the weights were never quantized."""
    entry = getattr(config, "quantization_config", None)
    if entry is None:
        return None
    method = entry.get("quant_method") if isinstance(entry, Mapping) else getattr(entry, "quant_method", None)
    return str(getattr(method, "value", method))


def _is_tied(model: Any) -> bool:
    """Return whether the output embeddings are the input embeddings, in fact and not by configuration.

    Where the class does not tie these two (LUKE ties others), the configuration says what it ties.
    """
    into, out = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is out]
    ties = any(f"{name}.weight" in (getattr(model, "_tied_weights_keys", None) or ()) for name in names)
    if not ties or into.weight.device.type == "meta":  # offloaded weights have lost their identity
        return bool(getattr(model.config, "tie_word_embeddings", False))
    return into.weight is out.weight


def _has_random_pooler(checkpoint: Checkpoint) -> bool:
    """Return whether the model has a pooler that its files do not contain, which transformers fills at random."""
    source = checkpoint.source
    if getattr(checkpoint.model.base_model, "pooler", None) is None or source is None or source.gguf is not None:
        return False
    return not any("pooler" in name for name, _, _ in stored_tensors(source))


def _copy_tensors(model: nn.Module, fresh: nn.Module, renamed: Mapping[str, str], copies: bool) -> None:
    """Give every parameter and buffer of `fresh`, which is on the device `meta`, the value it has in `model`.

    `renamed` maps prefixes of names in `fresh` to those in `model`; all other names are equal.
    """
    shared: dict[int, nn.Parameter] = {}
    sources = dict(model.named_modules(remove_duplicate=False))
    for path, module in fresh.named_modules():
        here = next((prefix for prefix in renamed if f"{path}.".startswith(prefix)), "")
        name = (renamed.get(here, "") + f"{path}."[len(here) :]).removesuffix(".")
        source = sources.get(name)
        if source is None or _shapes(source) != _shapes(module):
            raise CheckpointError(
                f"without the removed blocks, the configuration gives {path} other weights than {name} has; keep the "
                "first blocks, or other ones"
            )
        for leaf in module._parameters:
            parameter = source._parameters[leaf]
            if parameter is None:
                continue
            if id(parameter) not in shared:
                value = _value(source, leaf)
                value = value.clone() if copies else value
                shared[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[leaf] = shared[id(parameter)]
        for leaf, buffer in module._buffers.items():
            if buffer is not None:
                value = _value(source, leaf)
                module._buffers[leaf] = value.clone() if value.dtype == buffer.dtype else _uncast(module, leaf, value)


def _shapes(module: nn.Module) -> tuple[list[str], dict[str, torch.Size]]:
    """Return the names of the submodules of a module, and the shapes of its own weights."""
    own = {leaf: weight.shape for leaf, weight in module._parameters.items() if weight is not None}
    return ([] if isinstance(module, nn.ModuleList) else sorted(module._modules), own)


def _value(module: nn.Module, leaf: str) -> Tensor:
    """Return a tensor of a module; a tensor that accelerate has offloaded is read from where it is stored."""
    tensor: Tensor = getattr(module, leaf).detach()
    if tensor.device.type != "meta":
        return tensor
    from accelerate.utils import align_module_device

    with align_module_device(module, execution_device="cpu"):
        stored: Tensor = getattr(module, leaf).detach().clone()
    if stored.device.type == "meta":
        raise CheckpointError(f"the weight {leaf} of a {type(module).__name__} is not in memory; load the model first")
    return stored


def _uncast(module: nn.Module, leaf: str, value: Tensor) -> Tensor:
    """Return a buffer in the dtype that transformers gives it, where `model.half()` or the like has cast it.

    The frequencies of rotary embeddings are computed again: in half precision they are too coarse, and a model that is
    loaded from a file has them in float32.
    """
    config: Any = getattr(module, "config", None)
    if "RotaryEmbedding" in type(module).__name__ and config is not None:
        rebuilt: Tensor = getattr(type(module)(config), leaf)
        return rebuilt.to(value.device)
    return value.to(module._buffers[leaf].dtype)  # type: ignore[union-attr]


def _keep_scales(fresh: Any, config: Any, kept: Sequence[int]) -> None:
    """Fold the change of the score scale into the queries where the scale depends on the layer index.

    With `scale_attn_by_inverse_layer_idx`, layer i of GPT-2 computes softmax(q kᵀ / ((i + 1)√d)). As layer j it divides
    by (j + 1)√d instead, so q is multiplied by (j + 1)/(i + 1).
    """
    if not getattr(config, "scale_attn_by_inverse_layer_idx", False):
        return
    for new, (old, block) in enumerate(zip(kept, find_blocks(fresh, len(kept)), strict=True)):
        joint: Any = block.get_submodule("attn.c_attn")
        factor, width = (new + 1) / (old + 1), config.hidden_size
        for tensor in (joint.weight, joint.bias):
            tensor.data = torch.cat([factor * tensor[..., :width], tensor[..., width:]], dim=-1)


def _distribute(model: Any, fresh: Any, lists: Sequence[str], places: Mapping[str, str]) -> None:
    """Distribute `fresh` over the devices of `model`, if accelerate has distributed that over several."""
    placed = _places(getattr(model, "hf_device_map", None) or {}, lists, places)
    if len(set(map(str, placed.values()))) > 1:
        from accelerate import dispatch_model

        dispatch_model(fresh, placed, skip_keys=fresh._skip_keys_device_placement)


def _places(devices: Mapping[str, Any], lists: Sequence[str], places: Mapping[str, str]) -> dict[str, Any]:
    """Return where the modules of the new model go, given where those of the old one are.

    Modules that were offloaded to disk are offloaded to the CPU. `lists` are the paths of the lists of blocks, and
    `places` the new paths of the blocks that are kept.
    """
    placed: dict[str, Any] = {}
    for path, device in devices.items():
        blocks = next((one for one in lists if path.startswith(f"{one}.")), None)
        if blocks is not None:
            index, _, rest = path.removeprefix(f"{blocks}.").partition(".")
            if (old := f"{blocks}.{index}") not in places:
                continue
            path = ".".join([places[old], *([rest] if rest else [])])
        placed[path] = "cpu" if device == "disk" else device
    return placed


def shrunk_config(config: Any, kept: Sequence[int], key: str = "num_hidden_layers") -> Any:
    """Return the configuration of the model that consists of the layers `kept`, in increasing order, of another one.

    - The number of layers, which is the value of `key`, becomes `len(kept)`, and lists with one entry per layer keep
      the entries of `kept`.
    - A list of kinds that is repeated until all layers have one (`block_types` of RecurrentGemma) becomes explicit.
    - Lists of layer indices, such as `mlp_only_layers`, have the new indices of the layers that are kept. So has
      `per_layer_config`, the settings of single layers by index.
    - A number m of first layers (`_FIRST_LAYERS`) becomes #{i in kept: i < m}. In Qwen models layer i has a sliding
      window if i ≥ `max_window_layers` and `layer_types` is missing; both rules now give each layer its former
      attention.
    - `quantization_config` is removed: the weights of the new model are not quantized.

    A configuration that is saved and loaded again gives the same layers, because all lists are explicit.

    Raises:
        InputError: `kept` is empty, not increasing, or names a layer that does not exist.
    """
    layers = int(getattr(config, key))
    kept = require_layers(kept, layers)
    values: dict[str, Any] = config.to_dict()
    for name in (*_OWN_TO_A_FILE, *_PATTERNS, *_STAGES):
        values.pop(name, None)
    kinds = [getattr(config, name, None) for name in PER_LAYER]
    for name, value in values.items():
        if _is_per_layer(name, value, layers) or _is_repeated(value, kinds, layers):
            values[name] = [value[layer % len(value)] for layer in kept]
        elif _is_indices(name, value, layers):
            values[name] = [new for new, old in enumerate(kept) if old in value]
        elif name == "per_layer_config" and value:
            by_layer = {int(layer): own for layer, own in value.items()}
            values[name] = {new: by_layer[old] for new, old in enumerate(kept) if old in by_layer}
        elif name in _FIRST_LAYERS and isinstance(value, int):
            values[name] = sum(layer < value for layer in kept)
    # GPT-2, for example, stores `num_hidden_layers` as `n_layer`.
    values[getattr(config, "attribute_map", {}).get(key, key)] = len(kept)
    with quiet():
        return type(config).from_dict(values)


def has_layer_lists(config: Any) -> bool:
    """Return whether a configuration has lists with one entry per layer, or settings of single layers."""
    layers, values = int(config.num_hidden_layers), config.to_dict()
    return bool(values.get("per_layer_config")) or any(_is_per_layer(key, values[key], layers) for key in values)


def require_layers(kept: Sequence[int], layers: int, of: str = "") -> tuple[int, ...]:
    """Return `kept` as a tuple; raise unless it is a non-empty increasing sequence of layers from 0 to `layers` − 1."""
    chosen = tuple(int(layer) for layer in kept)
    if not chosen:
        raise InputError(f"at least one of {counted(layers, 'layer')}{of} must be kept, got none; remove fewer layers")
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
    return "layer" in key and len(value) == layers and not (_is_indices(key, value, layers) and layers > 1)


def _is_repeated(value: object, kinds: Sequence[object], layers: int) -> bool:
    """Return whether a value is a list of names which, repeated, gives one of the lists `kinds` of all layers."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(entry, str) for entry in value):
        return False
    return [value[layer % len(value)] for layer in range(layers)] in kinds


def _is_indices(key: str, value: object, layers: int) -> bool:
    """Return whether a value is a list of layer indices: increasing numbers below the number of layers."""
    if not isinstance(value, list | tuple) or not all(type(entry) is int for entry in value):
        return False
    in_range = all(0 <= entry < layers for entry in value) and all(before < after for before, after in pairwise(value))
    return in_range and any(word in key for word in ("layer", "idx", "indices"))
