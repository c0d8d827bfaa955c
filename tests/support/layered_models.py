"""Tiny models with six layers of different kinds: sliding windows, no RoPE, scales that depend on the index."""

import warnings
from collections.abc import Collection
from typing import Any

import torch
from tiny_models import DERIVED, MODELS

LAYERS = 6
_SLIDING, _FULL = "sliding_attention", "full_attention"
_COUNT = {"gpt2": "n_layer", "bloom": "n_layer", "distilbert": "n_layers", "xglm": "num_layers"}
_KINDS: dict[str, dict[str, Any]] = {
    "qwen2-window": {"max_window_layers": 3},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "smollm3": {"use_sliding_window": True, "sliding_window": 3, "no_rope_layer_interval": 2},
    "qwen3_moe": {"mlp_only_layers": [1, 2, 4]},
    "gpt_oss": {"layer_types": [_SLIDING, _FULL] * 3},
    "lfm2": {"layer_types": ["conv", "conv", _FULL, "conv", _FULL, "conv"]},
    "gemma3": {"layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING]},
}


def layered_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Return a random model in evaluation mode; its vocabulary and sizes are those of `tiny_models`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    cls, config, given = (MODELS | DERIVED)[name]
    chosen = given | {_COUNT.get(name, "num_hidden_layers"): LAYERS} | _KINDS.get(name, {}) | settings
    model = getattr(transformers, cls)(getattr(transformers, config)(**chosen)).eval().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(dtype)
            parameter.copy_(0.5 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model


def output_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits, or the final states of an encoder."""
    with torch.no_grad():
        out = model(input_ids=ids)
    return out.logits if "logits" in out else out.last_hidden_state


def skipping(model: Any, blocks: Any, removed: Collection[int], ids: torch.Tensor) -> torch.Tensor:
    """Return the output of a model whose removed blocks return their input: a plain form of removing them."""

    def passing(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        return (given, *out[1:]) if isinstance(out, tuple) else given

    handles = [blocks[layer].register_forward_hook(passing, with_kwargs=True) for layer in removed]
    try:
        return output_of(model, ids)
    finally:
        for handle in handles:
            handle.remove()
