"""Where things are in a block, family by family: all that is known about architectures is in this table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Separate:
    """Query, key, value and output projections as linear maps of their own."""

    query: str
    key: str
    value: str
    output: str


@dataclass(frozen=True)
class Fused:
    """One map for query, key and value: side by side (`thirds`) or head by head (`heads`)."""

    all: str
    output: str
    order: Literal["thirds", "heads"]


@dataclass(frozen=True)
class Family:
    """Paths of modules within a block.

    - `attention`, `mlp`: the modules whose output is added to the stream
    - `order`: `pre` (x + attention, then + MLP), `parallel` (both read x), `post` (a norm after each sum)
    - `between`: in a `post` family, the norm whose output the MLP reads
    - `gain`: the norm before attention, whose weight (plus `gain_offset`) belongs to the projections
    """

    attention: str
    mlp: str
    projections: Separate | Fused
    order: Literal["pre", "parallel", "post"] = "pre"
    between: str | None = None
    gain: str | None = None
    gain_offset: float = 0.0


_SELF_ATTN = Separate("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_LLAMA = Family("self_attn", "mlp", _SELF_ATTN, gain="input_layernorm")
_GEMMA = Family("self_attn", "mlp", _SELF_ATTN, gain="input_layernorm", gain_offset=1.0)
_GEMMA2 = Family(
    "post_attention_layernorm", "post_feedforward_layernorm", _SELF_ATTN, gain="input_layernorm", gain_offset=1.0
)
_BERT = Family(
    "attention.output.dense",
    "output.dense",
    Separate("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
    order="post",
    between="attention.output",
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "gpt2": Family("attn", "mlp", Fused("attn.c_attn", "attn.c_proj", "thirds"), gain="ln_1"),
    "gpt_neox": Family(
        "attention",
        "mlp",
        Fused("attention.query_key_value", "attention.dense", "heads"),
        order="parallel",
        gain="input_layernorm",
    ),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "distilbert": Family(
        "attention",
        "ffn",
        Separate("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin"),
        order="post",
        between="sa_layer_norm",
    ),
}
"""By transformers' `model_type`. A family that is not here is observed and its blocks are skipped all the same."""


def family_of(config: object) -> Family | None:
    """The family of a configuration, or None where the table has none."""
    family = FAMILIES.get(str(getattr(config, "model_type", "")))
    if family is not None and family.order == "parallel" and not getattr(config, "use_parallel_residual", True):
        return Family(**{**vars(family), "order": "pre"})
    return family
