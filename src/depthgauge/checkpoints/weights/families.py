"""Module paths inside a transformer block, by architecture family.

Most of what is known about a model is derived:

- the number of layers, heads and key–value heads, the width and the context length come from the configuration
- the blocks are the outermost `nn.ModuleList` with one entry per layer (`find_blocks`)
- sublayers, their last maps, their order and the norms after them are found in a model whose family has no entry here,
  and verified numerically on every block (`blocks/probe.py`). For the families below, the derivation gives what is
  declared (`tests/checkpoints/test_derive_family.py`)
- queries, keys, values, mask, scale and softcap are read at transformers' attention interface (`attention_calls.py`).
  Where a model bypasses it, the measures of heads are missing
- the weight layout (`nn.Linear` or GPT-2's `Conv1D`) and the score scale are read from the modules (`circuits.py`)
- whether the result is right is measured: `probe.py` compares the observed model with stock attention before any long
  computation

Two exceptions need no entry here but know particular models: `context_length` subtracts the positions up to
the padding index, which RoBERTa models never use, and `family_of` reads GPT-NeoX's `use_parallel_residual`.

`FAMILIES` is the only place that names modules of particular architectures. An entry adds what is not derived: the
projections of queries, keys and values, and the gain of the norm before them. The sizes of the weights
(`--data none`) need it. An entry can also declare sublayers where their derivation fails, and `Monitor` uses it for
models that are sharded.

To add a family:

1. Print one block: `print(model.model.layers[0])`, or wherever the model keeps its list of blocks.
2. Find the modules whose *outputs* the block adds to the residual stream; these are `attention` and `mlp`. If a norm or
   projection follows the sublayer before the addition (Gemma 2), name that module instead.
3. Read the block's `forward` and choose `order`: `pre` (x ← x + attention(norm(x)), then x ← x + mlp(norm(x))),
   `parallel` (x ← x + attention(norm(x)) + mlp(norm(x))), or `post` (x ← norm(x + attention(x)), then
   x ← norm(x + mlp(x))).
4. Name the last linear maps of attention and MLP in `out` and `down`, and the projections: `Separate` for three linear
   maps, `Fused` if one map computes query, key and value.
5. If a norm precedes attention, name it in `gain`. Set `gain_offset=1.0` if it multiplies by 1 + weight (Gemma).
6. If a norm follows the output projection and `down` before the next sublayer reads the residual stream, name the two
   norms in `attention_norm` and `mlp_norm`.
7. Add the entry to `FAMILIES` under the configuration's `model_type`.
8. Add a tiny model to `MODELS` in `tests/support/tiny_models.py`, and its sublayers to `SUBLAYERS` in
   `tests/checkpoints/test_what_if.py` unless they are `self_attn` and `mlp`. Then `pytest tests/checkpoints -k NAME`
   compares every what-if, score and circuit with the model's own computation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn


def find_blocks(model: nn.Module, layers: int) -> list[nn.Module]:
    """Return a model's blocks: the outermost `ModuleList` with one distinct entry per layer, or an empty list.

    In a model with parts that have their own configurations, such as an encoder of images, the blocks are those of the
    text model.
    """
    config: Any = getattr(model, "config", None)
    text = type(config.get_text_config()) if hasattr(config, "get_text_config") else object
    own = next((part for part in model.modules() if isinstance(getattr(part, "config", None), text)), model)
    others = {
        inner
        for part in own.modules()
        if hasattr(getattr(part, "config", None), "get_text_config") and not isinstance(part.config, text)
        for inner in part.modules()
    }
    for module in own.modules():
        if module in others or not isinstance(module, nn.ModuleList):
            continue
        if len(module) == layers and len(set(map(id, module))) == layers:
            return list(module)
    return []


@dataclass(frozen=True)
class Separate:
    """Paths of the linear maps to queries, keys and values."""

    query: str
    key: str
    value: str


@dataclass(frozen=True)
class Fused:
    """Path of one linear map for query, key and value.

    - `all`: the map whose output columns hold query, key and value
    - `order`: column order, q|k|v (`thirds`) or q|k|v of head 0, q|k|v of head 1, … (`heads`)
    """

    all: str
    order: Literal["thirds", "heads"]


@dataclass(frozen=True)
class Sublayer:
    """A part of a block that writes into the residual stream: paths relative to the block.

    - `path`: the module whose output is added
    - `last`: its last linear map, or None
    - `norm`: the norm applied to the output of `last` before the next sublayer reads it, or None
    """

    path: str
    last: str | None
    norm: str | None = None


@dataclass(frozen=True)
class Family:
    """Paths of modules, relative to a block.

    - `attention`, `mlp`: the modules whose outputs are added to the residual stream: the one that mixes tokens, by
      attention, a convolution or a state space, and the one that does not. None if the block has only the other
    - `out`, `down`: the last linear maps of attention and MLP; a norm may follow before the addition (Gemma 2). None
      where there is no such map, as in a mixture of experts
    - `between`: the sublayers between `attention` and `mlp`, such as attention to the states of an encoder
    - `projections`: query, key and value projections, or None if they are not known
    - `order`: `pre` (norm before each sublayer), `parallel` (attention and MLP read the same x), `post` (norm after
      each sum)
    - `multiplier`: the number by which the outputs of all sublayers are multiplied before they are added (Granite)
    - `gain`: the norm before attention, or None; its weight plus `gain_offset` scales the input of the projections
    - `attention_norm`, `mlp_norm`: the norms applied to the outputs of `out` and of `down`, before (Gemma 2) or after
      (BERT) they are added to the residual stream; None if there are none
    """

    attention: str | None
    mlp: str | None
    out: str | None
    down: str | None
    projections: Separate | Fused | None = None
    order: Literal["pre", "parallel", "post"] = "pre"
    multiplier: float = 1.0
    gain: str | None = None
    gain_offset: float = 0.0
    attention_norm: str | None = None
    mlp_norm: str | None = None
    between: tuple[Sublayer, ...] = ()

    @property
    def parts(self) -> tuple[Sublayer, ...]:
        """All sublayers that the block has, in order."""
        attention = () if self.attention is None else (Sublayer(self.attention, self.out, self.attention_norm),)
        mlp = () if self.mlp is None else (Sublayer(self.mlp, self.down, self.mlp_norm),)
        return (*attention, *self.between, *mlp)

    @property
    def sublayers(self) -> tuple[str, ...]:
        """The paths of all sublayers."""
        return tuple(part.path for part in self.parts)


_SELF_ATTN = Separate("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_LLAMA = Family("self_attn", "mlp", "self_attn.o_proj", "mlp.down_proj", _SELF_ATTN, gain="input_layernorm")
_GEMMA = replace(_LLAMA, gain_offset=1.0)
_GEMMA2 = replace(
    _GEMMA,
    attention="post_attention_layernorm",
    mlp="post_feedforward_layernorm",
    attention_norm="post_attention_layernorm",
    mlp_norm="post_feedforward_layernorm",
)
_BERT = Family(
    "attention.output.dense",
    "output.dense",
    "attention.output.dense",
    "output.dense",
    Separate("attention.self.query", "attention.self.key", "attention.self.value"),
    order="post",
    attention_norm="attention.output.LayerNorm",
    mlp_norm="output.LayerNorm",
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
    "gpt2": Family(
        "attn",
        "mlp",
        "attn.c_proj",
        "mlp.c_proj",
        Fused("attn.c_attn", "thirds"),
        gain="ln_1",
    ),
    "gpt_neox": Family(
        "attention",
        "mlp",
        "attention.dense",
        "mlp.dense_4h_to_h",
        Fused("attention.query_key_value", "heads"),
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
        "attention.out_lin",
        "ffn.lin2",
        Separate("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        order="post",
        attention_norm="sa_layer_norm",
        mlp_norm="output_layer_norm",
    ),
}
"""`model_type` of the configuration → family."""


def family_of(config: object) -> Family | None:
    """Return the family of a configuration, or None if `FAMILIES` has no entry for it."""
    family = FAMILIES.get(str(getattr(config, "model_type", "")))
    if family is not None and family.order == "parallel" and not getattr(config, "use_parallel_residual", True):
        return replace(family, order="pre")
    return family
