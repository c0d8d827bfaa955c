"""Tiny random models of every family, with weights large enough that attention is far from uniform."""

import warnings
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

_SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GQA = {"num_key_value_heads": 2}
_BERT = {"type_vocab_size": 1}
_WINDOWED_FIRST = ["sliding_attention", "full_attention", "full_attention"]

# name → (model class, configuration class, settings)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _SMALL | _GQA),
    "mistral": ("MistralForCausalLM", "MistralConfig", _SMALL | _GQA | {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _SMALL | _GQA),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        _SMALL | _GQA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _SMALL | _GQA | {"head_dim": 8}),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", _SMALL | _GQA),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _SMALL | {"num_key_value_heads": 1, "head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        _SMALL | _GQA | {"head_dim": 4, "sliding_window": 4, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _SMALL | _GQA | {"head_dim": 4, "sliding_window": 4, "layer_types": _WINDOWED_FIRST},
    ),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", _SMALL | _BERT),
    "camembert": ("CamembertModel", "CamembertConfig", _SMALL | _BERT),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {
        "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 40, "bos_token_id": 1,
        "eos_token_id": 2, "scale_attn_by_inverse_layer_idx": True,
    }),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL),
    "gpt_neox-sequential": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL | {"use_parallel_residual": False}),
    "bert": ("BertModel", "BertConfig", _SMALL | _BERT),
    "roberta": ("RobertaModel", "RobertaConfig", _SMALL | _BERT),
    "electra": ("ElectraModel", "ElectraConfig", _SMALL | _BERT | {"embedding_size": 16}),
    "distilbert": ("DistilBertModel", "DistilBertConfig", {
        "dim": 16, "n_layers": 3, "n_heads": 4, "hidden_dim": 24, "vocab_size": 40, "max_position_embeddings": 64,
    }),
}  # fmt: skip
DECODERS = tuple(name for name, (cls, _, _) in MODELS.items() if cls.endswith(("ForCausalLM", "LMHeadModel")))
ENCODERS = tuple(name for name in MODELS if name not in DECODERS)
DISTINCT = ("llama", "gemma3", "gpt2", "gpt_neox", "bert", "distilbert")
"""Models of different structure: norms before sublayers, norms around them and windows, transposed maps, parallel
sublayers, norms after sublayers, other names of everything. `make test` runs what takes long on these."""
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Families without an entry in the table: their structure is derived from the model.
DERIVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "olmo": ("OlmoForCausalLM", "OlmoConfig", _SMALL | _GQA),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _SMALL | _GQA),
    "granite": ("GraniteForCausalLM", "GraniteConfig", _SMALL | _GQA | {"residual_multiplier": 0.22}),
    "phi": ("PhiForCausalLM", "PhiConfig", _SMALL),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _SMALL | _GQA),
    "cohere": ("CohereForCausalLM", "CohereConfig", _SMALL | _GQA),
    "opt": ("OPTForCausalLM", "OPTConfig", _SMALL | {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    "opt-post": (
        "OPTForCausalLM",
        "OPTConfig",
        _SMALL | {"ffn_dim": 24, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "bloom": ("BloomForCausalLM", "BloomConfig", {
        "hidden_size": 16, "n_layer": 3, "n_head": 4, "vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }),
    "falcon": ("FalconForCausalLM", "FalconConfig", _SMALL | {"alibi": False, "multi_query": True}),
    "falcon-alibi": (
        "FalconForCausalLM",
        "FalconConfig",
        _SMALL | {"alibi": True, "multi_query": False, "parallel_attn": False},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _SMALL | _GQA | _MOE),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        _SMALL | _GQA | _MOE | {"head_dim": 8, "mlp_only_layers": [1]},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        _SMALL | _GQA | _MOE | {"head_dim": 8, "sliding_window": 4, "layer_types": _WINDOWED_FIRST},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        _SMALL | _GQA | {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        _SMALL | {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 3},
    ),
    "mpnet": ("MPNetModel", "MPNetConfig", _SMALL),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", _SMALL | _GQA | _MOE),
    "xglm": ("XGLMForCausalLM", "XGLMConfig", {
        "d_model": 16, "num_layers": 3, "attention_heads": 4, "ffn_dim": 24, "vocab_size": 40,
        "max_position_embeddings": 64,
    }),
}  # fmt: skip
_LINEAR, _FULL = "linear_attention", "full_attention"
_MAMBA2 = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4,
}  # fmt: skip
_DELTA = {
    "layer_types": [_LINEAR, _FULL, _LINEAR], "linear_key_head_dim": 4, "linear_value_head_dim": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_STATE_SPACE = {
    "hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 40, "state_size": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
# Blocks of different kinds in one model, and blocks without attention.
MIXED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        _SMALL | _GQA | _MOE | {"layer_types": ["conv", _FULL, "conv"], "num_dense_layers": 1},
    ),
    "jamba": ("JambaForCausalLM", "JambaConfig", _SMALL | _GQA | _MOE | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 4, "mamba_dt_rank": 4,
    }),
    "bamba": ("BambaForCausalLM", "BambaConfig", _SMALL | _GQA | _MAMBA2 | {"attn_layer_indices": [1]}),
    "zamba2": ("Zamba2ForCausalLM", "Zamba2Config", _SMALL | {
        "layers_block_type": [_LINEAR, "hybrid", _LINEAR], "n_mamba_heads": 4, "mamba_headdim": 8, "mamba_d_state": 4,
        "mamba_ngroups": 1, "chunk_size": 4, "adapter_rank": 4, "attention_head_dim": 8,
    }),
    "falcon_h1": (
        "FalconH1ForCausalLM", "FalconH1Config", _SMALL | _GQA | _MAMBA2 | {"mamba_d_ssm": 32, "head_dim": 4},
    ),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", _SMALL | _GQA | _MOE | _MAMBA2 | {
        "layer_types": [_LINEAR, _FULL, _LINEAR], "shared_intermediate_size": 24, "residual_multiplier": 0.22,
    }),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig", _SMALL | _GQA | {
        "layers_block_type": [_LINEAR, _FULL, "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4,
        "n_groups": 1, "chunk_size": 4, "head_dim": 4,
    }),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", _SMALL | _GQA | {
        "block_types": ["recurrent", "attention"], "attention_window_size": 8, "lru_width": 16, "head_dim": 4,
    }),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", _SMALL | _GQA | _MOE | _DELTA | {
        "shared_expert_intermediate_size": 24, "mlp_only_layers": [0],
    }),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _SMALL | _GQA | _DELTA),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM", "OlmoHybridConfig", _SMALL | _GQA | _DELTA | {"linear_num_value_heads": 2},
    ),
    "minimax": (
        "MiniMaxForCausalLM", "MiniMaxConfig", _SMALL | _GQA | _MOE | {"layer_types": [_LINEAR, _FULL, _LINEAR]},
    ),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", _SMALL | _GQA | _MOE),
    "mamba": ("MambaForCausalLM", "MambaConfig", _STATE_SPACE | {"time_step_rank": 4}),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        _STATE_SPACE | {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", _STATE_SPACE | {"time_step_rank": 4}),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", {
        "hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 40, "context_length": 64, "intermediate_size": 24,
    }),
}  # fmt: skip
# ALBERT has no list of blocks, and the states of XLNet have the tokens first.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "xlnet": ("XLNetModel", "XLNetConfig", {
        "d_model": 16, "n_layer": 3, "n_head": 4, "d_inner": 24, "vocab_size": 40,
    }),
    "albert": ("AlbertModel", "AlbertConfig", _SMALL | _BERT | {"embedding_size": 16}),
}  # fmt: skip


def some_families(names: Iterable[str], tested: Collection[str] = DISTINCT) -> list[Any]:
    """Return the names as parameters of a test that takes long; `make test-families` has those not in `tested`."""
    return [pytest.param(name, marks=() if name in tested else pytest.mark.families) for name in names]


def tiny_model(name: str, seed: int = 0, spread: float = 0.5, layers: int | None = None) -> Any:
    """Return a model in evaluation mode, by default with three layers.

    Matrices have normal entries with standard deviation `spread`. Vectors have their default plus 0.1 × normal noise.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    cls, config, settings = (MODELS | DERIVED | MIXED | OTHERS)[name]
    if layers is not None:
        count = next(key for key in ("num_hidden_layers", "num_layers", "n_layer", "n_layers") if key in settings)
        settings = settings | {count: layers}
        for key in ("layer_types", "layers_block_type"):
            if key in settings:
                settings[key] = (settings[key] * layers)[:layers]
    with torch.random.fork_rng(devices=[]):  # some classes draw vectors, such as the steps of Mamba 2
        torch.manual_seed(seed)
        model = getattr(transformers, cls)(getattr(transformers, config)(**settings)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * spread if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model


def tokens(count: int = 11, batch: int = 2, seed: int = 0) -> torch.Tensor:
    """Draw token ids that are not special tokens."""
    return torch.randint(3, 40, (batch, count), generator=torch.Generator().manual_seed(seed))


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Return the mean over tokens of −log p(next token), in nats, of one window."""
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:]))
