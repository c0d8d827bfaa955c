"""Names of what-ifs, layer scores, objectives and kinds of text, with what is shown for them, and the glossary.

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


GIVEN = ("text", "texts", "images", "pairs", "recordings")
"""Kinds of windows that the user gave: windows of a text, and what was given one by one."""


@dataclass(frozen=True)
class ObjectiveLabel:
    """The text shown for one objective.

    - `title`: the quantity with its unit, for tables
    - `added`: its increase with the unit, for axes
    - `change`: what happens to it; the amount replaces `#`
    - `output`: where the output is compared with the dense model's: what moves
    """

    title: str
    added: str
    change: str
    output: str = "its output moves"

    def by(self, amount: str) -> str:
        """Return what happens to the quantity: `the loss grows by 0.43 nats per token`."""
        change = self.change.replace("grows", "changes") if amount.startswith("-") else self.change
        return change.replace("#", amount, 1)


OBJECTIVE_LABELS: Mapping[str, ObjectiveLabel] = {
    "loss": ObjectiveLabel(
        "loss, nats per token", "loss added, nats per token", "the loss grows by # nats per token"
    ),
    "states": ObjectiveLabel(
        "relative change of the final states", "relative change of states",
        "the final states change by # of their size", "its final states move",
    ),
    "labels": ObjectiveLabel("loss of the labels, nats", "loss added, nats", "the loss of the labels grows by # nats"),
    "logits": ObjectiveLabel(
        "relative change of the logits", "relative change of logits",
        "the logits change by # of their size", "the logits of its head move",
    ),
    "embedding": ObjectiveLabel(
        "1 − cosine of the embeddings", "1 − cosine of embeddings",
        "the cosine of the embeddings falls by #", "its embeddings turn",
    ),
}  # fmt: skip
"""Objective → label."""

_YOURS = {kind: f"your {kind}" for kind in GIVEN}

TEXTS = _YOURS | {"sampled": "sampled from the model", "built-in": "built-in text"}
"""Kind of text → label."""

ABOUT = _YOURS | {"sampled": "text that the model writes itself", "built-in": "the built-in text"}
"""Kind of text → what a guarantee about it says."""

SHORT_TEXTS = _YOURS | {"sampled": "sampled", "built-in": "built-in"}
"""Kind of text → label next to a chart."""

BY_LOSS = ("loss", "labels")
"""Objectives that have a value before and after."""


def objective_label(objective: str) -> ObjectiveLabel:
    """Return the label of an objective; one that is not known is shown by its name."""
    return OBJECTIVE_LABELS.get(objective) or ObjectiveLabel(objective, objective, "the objective grows by #")


# --- The glossary on one screen; docs/glossary.md explains all of its terms -------------------------------------------

TERMS: Mapping[str, str] = {
    "paper A": "Only Large Weights (And Not Skip Connections) Can Prevent the Perils of Rank Collapse",
    "paper B": "Superiority of Softmax: Unveiling the Performance Edge Over Linear Attention",
    "η, φ": "largest |weight| of a network; largest |entry| of its inputs (radius)",
    "residual": "‖Res X‖/‖X‖: what remains of a state after its common row is removed; 0: all tokens equal",
    "TV to uniform": "distance of attention from plain averaging: 0 averages, 1 selects one token",
    "attained": "at least one input is off by this (attacked lower bound, evaluated rigorously)",
    "proved": "no input is off by more (upper bound; the rounding of its proof is included)",
    "Theorem D.1": "the bound that paper A prints; (…): its conditions fail; false: an input exceeds it",
    "joint, plain": "proof: all heads and layers bounded together; every head alone, and the bounds added",
    "pairs": "proof: all heads are bounded together, over pairs of tokens (--tokens)",
    "squares": "proof: the joint bound sharpened by sums of squares (--effort high)",
    "shares, enumeration": "proof: branch and bound over shares of tokens; all sequences evaluated (--effort exact)",
    "deletion": "proof: attention removed layer by layer; causal networks and networks with MLPs",
    "refuted": "for every shallower network tried, an input was found on which it exceeds the tolerance",
    "undecided": "neither proved nor refuted; for statements: no instance was found, or no time was left",
    "fold": "a run of layers replaced by one averaging layer",
    "what-if": "the loss added when a part of one layer is skipped, with its 95 % interval",
    "static error": "relative error of a head's output with the best fixed attention pattern",
    "repair": "a change of output maps, gains and biases of the kept blocks, after blocks were removed",
    "certify windows": "text that nothing was fitted or selected on; the numbers of shrink are measured on it",
    "guarantee": "bound on the increase of the loss for future windows exchangeable with the certify windows",
    "rank correlation": "Spearman's correlation of a layer score with the measured cost; 1: same order",
    "F_exp(D₁), F_lin(D₀)": "output of paper B's network on a data set, with softmax or linear attention",
    "1⁻": "the largest ratio found is below 1 and rounds to 1",
}
"""Term → meaning, one line each."""
