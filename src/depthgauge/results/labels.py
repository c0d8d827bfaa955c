"""Names of the what-ifs and of the layer scores, with the text that tables and reports show for them.

This file is the only list of these names. Result documents, tables, charts and `--what-if` all read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WhatIfLabel:
    """The text shown for one what-if.

    - `label`: short form, for column headers and legends
    - `sentence`: what happens to the layer
    """

    label: str
    sentence: str


@dataclass(frozen=True)
class ScoreLabel:
    """The text shown for one layer score.

    - `label`: short form, with the method the score comes from
    - `what_if`: the what-if whose cost the score predicts
    - `sentence`: the definition
    """

    label: str
    what_if: str
    sentence: str


WHAT_IFS: Mapping[str, WhatIfLabel] = {
    "block": WhatIfLabel("skip block", "The layer returns its input unchanged."),
    "attention": WhatIfLabel("skip attention", "The layer's attention adds nothing."),
    "mlp": WhatIfLabel("skip MLP", "The layer's MLP adds nothing."),
    "uniform": WhatIfLabel("uniform attention", "Every head of the layer averages all tokens it can attend to."),
    "parallel": WhatIfLabel("parallel with next", "The layer and the next one both read the layer's input."),
}
"""What-if name → label, in the order in which what-ifs are measured and shown."""

DEFAULT_WHAT_IFS: tuple[str, ...] = ("block", "attention", "mlp")
"""The what-ifs measured unless others are requested."""

SCORES: Mapping[str, ScoreLabel] = {
    "block_influence": ScoreLabel(
        "block influence (ShortGPT)", "block", "1 − mean cosine of the states before and after the block."
    ),
    "angular_distance": ScoreLabel(
        "angular distance (UIDL)", "block", "Angle between the states before and after the block, at the last token."
    ),
    "attention_cosine": ScoreLabel(
        "attention cosine (LLM-Drop)", "attention", "1 − mean cosine of the states before and after attention."
    ),
    "mlp_cosine": ScoreLabel("MLP cosine (LLM-Drop)", "mlp", "1 − mean cosine of the states before and after the MLP."),
}
"""Score name → label, in the order in which scores are shown."""


@dataclass(frozen=True)
class MeasureLabel:
    """The text shown for one head measure.

    - `label`: short form, for menus and column headers
    - `sentence`: the definition
    - `top`: the largest possible value where there is one, so that colours mean the same in every subject
    """

    label: str
    sentence: str
    top: float = 0.0


HEAD_MEASURES: Mapping[str, MeasureLabel] = {
    "tv_mean": MeasureLabel(
        "distance from averaging",
        "Total variation distance between a row of attention and uniform attention, mean over rows: 0 if the head "
        "averages all tokens, near 1 if it selects one token.",
        1.0,
    ),
    "tv_max": MeasureLabel(
        "distance from averaging, worst row",
        "Total variation distance between a row of attention and uniform attention, maximum over rows.",
        1.0,
    ),
    "first_mass": MeasureLabel("attention on the first token", "Mean attention weight on the first token.", 1.0),
    "static_error": MeasureLabel(
        "error of the best static pattern",
        "Relative error of the head's output if its attention is replaced by the best of these fixed patterns: "
        "uniform, first token, previous token, mean by distance.",
    ),
    "entropy": MeasureLabel(
        "entropy", "Entropy of a row of attention in nats, mean over rows; uniform attention on n tokens has log n."
    ),
    "score_range": MeasureLabel("score range θ", "The largest range (max − min) of a row of scores."),
    "balance": MeasureLabel(
        "centred score range", "The largest range of a row of scores after the common part of all tokens is removed."
    ),
    "contraction": MeasureLabel(
        "contraction", "‖Res(attention(X))‖max / ‖Res(X)‖max: the part of the differences between tokens that remains."
    ),
    "contraction_bound": MeasureLabel(
        "bound on the contraction", "tanh(centred score range / 2) · ‖V‖col, an upper bound on the contraction."
    ),
    "eta": MeasureLabel("largest weight η", "The largest |entry| of the head's query, key and value matrices."),
    "value_col": MeasureLabel("size of V", "‖V‖col, the largest sum of |entries| over a column."),
    "l1": MeasureLabel("sum of weights", "The largest of ‖Q‖₁, ‖K‖₁ and ‖V‖₁, each the sum of all |entries|."),
    "dong_beta": MeasureLabel("Dong's β", "‖QKᵀ‖col · ‖V‖₁,∞, the product in the rate of Dong et al. (2021)."),
    "qk_norm": MeasureLabel("query–key circuit", "Spectral norm of QKᵀ."),
    "qk_stable_rank": MeasureLabel("stable rank of the query–key circuit", "‖QKᵀ‖F²/‖QKᵀ‖₂²."),
    "ov_norm": MeasureLabel("value–output circuit", "Spectral norm of V."),
    "ov_stable_rank": MeasureLabel("stable rank of the value–output circuit", "‖V‖F²/‖V‖₂²."),
}
"""Head measure → label, in the order in which measures are shown."""

CENTERS: Mapping[str, str] = {
    "midrange": "differences from the mid-range",
    "mean": "differences from the mean token",
}
"""Centre of the residual → label."""

NORMS: Mapping[str, str] = {"max": "largest entry", "frobenius": "Frobenius", "composite": "√(column · row sum)"}
"""Norm of the residual → label."""


def unit(objective: str) -> str:
    """Return the unit in which a checkpoint's what-ifs are measured."""
    return "loss added, nats per token" if objective == "loss" else "relative change of the final states"
