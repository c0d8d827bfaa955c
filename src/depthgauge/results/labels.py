"""Names of the what-ifs and of the layer scores, with the text that tables and reports show for them.

This file is the only list of these names. Result documents, tables, charts and `--what-if` all read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Label:
    """The text shown for a what-if, a layer score or a head measure.

    - `label`: short form, for menus and column headers
    - `sentence`: the definition
    - `top`: the largest possible value where there is one, so that colours mean the same in every subject
    - `what_if`: for a layer score, the what-if whose cost it predicts
    """

    label: str
    sentence: str
    top: float = 0.0
    what_if: str = ""


WHAT_IFS: Mapping[str, Label] = {
    "block": Label("skip block", "The layer returns its input unchanged."),
    "attention": Label("skip attention", "The layer's attention adds nothing."),
    "mlp": Label("skip MLP", "The layer's MLP adds nothing."),
    "uniform": Label("uniform attention", "Every head of the layer averages all tokens it can attend to."),
    "parallel": Label("parallel with next", "The layer and the next one both read the layer's input."),
}
"""What-if name → label, in the order in which what-ifs are measured and shown."""

EXPERT = "expert"
"""The what-if that is measured for each expert of a layer. It must be asked for: it costs a pass per expert."""
EXPERT_MEASURES: Mapping[str, Label] = {
    "loss": Label("skip expert", "The expert adds nothing to its tokens; the other experts add what they did before."),
    "share": Label("share of tokens", "The share of tokens that are routed to the expert.", 1.0),
}
"""Measure of an expert → label."""

DEFAULT_WHAT_IFS: tuple[str, ...] = ("block", "attention", "mlp")
"""The what-ifs measured unless others are requested."""

SCORES: Mapping[str, Label] = {
    "block_influence": Label(
        "block influence (ShortGPT)", "1 − mean cosine of the states before and after the block.", what_if="block"
    ),
    "angular_distance": Label(
        "angular distance (UIDL)",
        "Angle between the states before and after the block, at the last token.",
        what_if="block",
    ),
    "attention_cosine": Label(
        "attention cosine (LLM-Drop)", "1 − mean cosine of the states before and after attention.", what_if="attention"
    ),
    "mlp_cosine": Label(
        "MLP cosine (LLM-Drop)", "1 − mean cosine of the states before and after the MLP.", what_if="mlp"
    ),
}
"""Score name → label, in the order in which scores are shown."""


HEAD_MEASURES: Mapping[str, Label] = {
    "tv_mean": Label(
        "distance from averaging",
        "Total variation distance between a row of attention and uniform attention, mean over rows: 0 if the head "
        "averages all tokens, near 1 if it selects one token.",
        1.0,
    ),
    "tv_max": Label(
        "distance from averaging, worst row",
        "Total variation distance between a row of attention and uniform attention, maximum over rows.",
        1.0,
    ),
    "first_mass": Label("attention on the first token", "Mean attention weight on the first token.", 1.0),
    "static_error": Label(
        "error of the best static pattern",
        "Relative error of the head's output if its attention is replaced by the best of these fixed patterns: "
        "uniform, first token, previous token, mean by distance.",
    ),
    "entropy": Label(
        "entropy", "Entropy of a row of attention in nats, mean over rows; uniform attention on n tokens has log n."
    ),
    "score_range": Label("score range θ", "The largest range (max − min) of a row of scores."),
    "balance": Label(
        "centred score range", "The largest range of a row of scores after the common part of all tokens is removed."
    ),
    "contraction": Label(
        "contraction", "‖Res(attention(X))‖max / ‖Res(X)‖max: the part of the differences between tokens that remains."
    ),
    "contraction_bound": Label(
        "bound on the contraction", "tanh(centred score range / 2) · ‖V‖col, an upper bound on the contraction."
    ),
    "eta": Label("largest weight η", "The largest |entry| of the head's query, key and value matrices."),
    "value_col": Label("size of V", "‖V‖col, the largest sum of |entries| over a column."),
    "l1": Label("sum of weights", "The largest of ‖Q‖₁, ‖K‖₁ and ‖V‖₁, each the sum of all |entries|."),
    "dong_beta": Label("Dong's β", "‖QKᵀ‖col · ‖V‖₁,∞, the product in the rate of Dong et al. (2021)."),
    "qk_norm": Label("query–key circuit", "Spectral norm of QKᵀ."),
    "qk_stable_rank": Label("stable rank of the query–key circuit", "‖QKᵀ‖F²/‖QKᵀ‖₂²."),
    "ov_norm": Label("value–output circuit", "Spectral norm of V."),
    "ov_stable_rank": Label("stable rank of the value–output circuit", "‖V‖F²/‖V‖₂²."),
}
"""Head measure → label, in the order in which measures are shown."""

CENTERS: Mapping[str, str] = {"midrange": "differences from the mid-range", "mean": "differences from the mean token"}
"""Centre of the residual → label."""

NORMS: Mapping[str, str] = {"max": "largest entry", "frobenius": "Frobenius", "composite": "√(column · row sum)"}
"""Norm of the residual → label."""


def of_stack(stack: str | None) -> str:
    """Return whose layers are counted in an encoder–decoder model; empty for other models.

    >>> of_stack("decoder"), of_stack("both"), of_stack(None)
    (' of the decoder', ' of both stacks', '')
    """
    if stack is None:
        return ""
    return " of both stacks" if stack == "both" else f" of the {stack}"


def unit(objective: str) -> str:
    """Return the unit in which a checkpoint's what-ifs are measured."""
    return {
        "loss": "loss added, nats per token",
        "labels": "loss of the labels added, nats",
        "logits": "relative change of the logits",
        "embedding": "1 − cosine of the embeddings",
    }.get(objective, "relative change of the final states")
