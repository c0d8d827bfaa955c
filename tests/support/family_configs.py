"""Tiny random models of every family that transformers can build, made from the defaults of its configuration."""

import re
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

LAYERS, HEADS, WIDTH, INNER, HEAD, VOCABULARY, CONTEXT, WINDOW = 4, 4, 32, 48, 8, 40, 64, 8
EXPERTS, CHOSEN = 4, 2
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Which sizes a number of a configuration is, by its name; the first pattern that matches counts.
_SIZES: tuple[tuple[str, Any], ...] = (
    (r"image_size", 32),
    (r"patch_size", 8),
    (r"num_channels|.*kernel.*|.*stride.*|.*conv.*", None),
    (r".*(n_group|topk_group|expert_group|groups).*", 1),
    (r".*(ngram|hash_byte).*vocab.*|codebook_size", 64),
    (r"mamba_(d_head|head_?dim|headdim)", 2 * HEAD),
    (r".*vocab.*(size|base)?", VOCABULARY),
    (r".*(position_embeddings|n_positions|max_.*positions|max_seq_len|n_ctx|max_length|context_length).*", CONTEXT),
    (r"(audio_|acoustic_tokenizer_|speech_)?chunk_(size|length)|.*right_context", None),
    (r".*(window|chunk|local_attention|block_size|local_radius).*", WINDOW),
    # As many keys as there are tokens: where a model selects fewer, it computes something else with its own cache.
    (r".*(topk_blocks|index_topk).*", CONTEXT),
    (r"rel_extent", WINDOW),
    (r".*(experts_per_tok|top_?k|moe_k).*|.*_per_token", CHOSEN),
    (r".*(experts|expert_num)", EXPERTS),
    (r".*(key_value_heads|kv_heads|query_groups|kv_n_heads).*", 2),
    (r".*(head_?dim|head_size|d_kv|d_head|dim_head|rotary_dim|kv_channels|headdim)", HEAD),
    (r".*heads?(_per_layer)?", HEADS),
    (r"(num_|n_)?((hidden|encoder|decoder|speech_encoder|t2u_encoder|t2u_decoder)_)*(layers?|blocks|depth)", LAYERS),
    (r"d_model|n_embd|dim|hidden_size|embed_dim", WIDTH),
    (r".*(size|dim|width|rank|inner|embd|features|hidden|channel|latents|buckets)", INNER),
    (r"d_ff|dff|dim_ff|.*(d_state|d_ssm)", INNER),
)  # fmt: skip


@dataclass(frozen=True)
class FamilyCase:
    """One family: what kind of model it is, its `model_type` and the name of its class."""

    kind: str
    model_type: str
    architecture: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.model_type}"


# What the general way gets wrong: settings that are added, by `model_type`.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DOUBLE = {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "bert-generation": {"is_decoder": True},
    "deepseek_v2": {"num_experts_per_tok": CHOSEN, "n_group": 1, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cpmant": {"position_bias_num_buckets": 512, "position_bias_max_distance": 2048},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": CHOSEN},
    },
    "dots1": {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": CHOSEN},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": HEAD},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "neomme": {"head_dim": 2 * HEAD, "per_layer_config": {}},
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * LAYERS, "num_hidden_layers": LAYERS},
    "swinv2": {"embed_dim": WIDTH, "num_heads": [2, 2, 2, 2]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, **_DOUBLE},
    "zamba2": {"hybrid_layer_ids": [1, 3], **_DOUBLE},
}  # fmt: skip


@cache
def family_cases() -> tuple[FamilyCase, ...]:
    """Return every family of text and image models that transformers knows, each once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.auto import modeling_auto as auto
    tables = {
        "encoder–decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "encoder": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        | {
            kind: auto.MODEL_MAPPING_NAMES[kind]
            for kind in auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
            if kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and kind not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        },
        "decoder": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "vision": auto.MODEL_FOR_IMAGE_MAPPING_NAMES,
    }
    found: dict[str, FamilyCase] = {}
    for kind, table in tables.items():
        for model_type, named in table.items():
            found.setdefault(model_type, FamilyCase(kind, model_type, named if isinstance(named, str) else named[0]))
    # Several types may have one class, such as `llama4`, which contains a `llama4_text`.
    order = sorted(found.values(), key=lambda case: (not case.model_type.endswith("_text"), len(case.model_type)))
    classes = {case.architecture: case for case in reversed(order)}
    return tuple(sorted(classes.values(), key=lambda case: (case.kind, case.model_type)))


def tiny_config(model_type: str) -> Any:
    """Return the configuration of a family with its defaults, and every size made small."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    return cls(**_tiny(cls().to_dict()) | OVERRIDES.get(model_type, {}))


_DROPPED = (
    "id2label", "label2id", "architectures", "transformers_version", "qk_head_dim", "full_attn_idxs", "out_features",
    "out_indices", "_out_features", "_out_indices", "stage_names",
)  # fmt: skip
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


def _tiny(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration with small sizes; sizes that are equal in the defaults stay equal."""
    layers, width, heads = (
        next((values[key] for key in keys if type(values.get(key)) is int), 0)
        for keys in (_LAYER_COUNTS, _WIDTHS, _HEAD_COUNTS)
    )
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in _DROPPED:
            continue
        if isinstance(value, dict) and "rope" not in key:
            if value and all(str(layer).isdigit() for layer in value):  # by layer
                value = {LAYERS - 1: _tiny(next(iter(value.values())))}
            found[key] = value if key == "per_layer_config" else _tiny(value)
        elif isinstance(value, list | tuple):
            found[key] = _small_list(key, list(value), layers)
        else:
            found[key] = _small(key, value, width, heads)
    return found


def _small_list(key: str, value: list[Any], layers: int) -> list[Any]:
    """Return a list of a configuration with few layers: entries per layer, indices of layers, or ids of tokens."""
    numbers = bool(value) and all(type(one) is int for one in value)
    if numbers and "token" in key:
        return [2]
    if numbers and value == sorted(set(value)) and any(word in key for word in ("layer", "idx", "ids")):
        return [one for one in value if one < LAYERS] or [1]
    if len(value) != layers or layers <= LAYERS:
        return value
    kinds = list(dict.fromkeys(map(repr, value)))
    few = [*value[: LAYERS - 1], value[-1]]
    if len(set(map(repr, few))) < min(LAYERS, len(kinds)):  # every kind of layer, in turn
        few = [value[list(map(repr, value)).index(kinds[layer % len(kinds)])] for layer in range(LAYERS)]
    return [_small(key, one) for one in few]


def _small(key: str, value: Any, width: int = 0, heads: int = 0) -> Any:
    """Return the value of one entry, made small, in a model with this width and number of heads."""
    if value is None and key in ("head_dim", "num_key_value_heads"):
        return {"head_dim": HEAD, "num_key_value_heads": HEADS}[key]
    if type(value) is not int:
        return value
    if key.endswith(("token_id", "token_index")):
        return min(value, _TOKENS.get(key, 3))
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), None)
    if size == INNER and value == width:
        size = WIDTH
    if size == 2 and value == heads:
        size = HEADS
    return value if size is None else min(value, size)


def tiny_family(case: FamilyCase, spread: float = 0.3) -> Any:
    """Return a tiny random model of a family, in evaluation mode, with attention that is far from uniform."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(0)
        cls, config = getattr(transformers, case.architecture), tiny_config(case.model_type)
        if not isinstance(config, cls.config_class):  # a text model that is also a part of a larger one
            config = config.get_text_config(decoder=True)
        model = cls(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * spread if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model
