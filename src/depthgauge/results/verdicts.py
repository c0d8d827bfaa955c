"""Verdicts: the sentences that state what a result shows, and the decision whether a printed theorem is violated."""

from collections.abc import Mapping, Sequence

from depthgauge.base.format import counted, number
from depthgauge.results.checkpoint_subject import (
    LEAST_WINDOWS,
    CheckpointSubject,
    Interval,
    ScoreTrust,
)
from depthgauge.results.labels import SCORES
from depthgauge.results.network_subject import DepthRow, PrintedTheorem, Sandwich

COSTS: Mapping[str, str] = {
    "loss": "of loss",
    "labels": "of loss",
    "logits": "of change in the logits",
    "embedding": "of change in the embedding",
    "states": "of change in the final states",
}
"""Objective → what skipping a layer costs."""


def unobserved_sentence(reason: str) -> str:
    """Say that the measures of heads are missing, and why."""
    return f"attention weights are not observable: {reason}"


def network_verdict(layers: int, radius: float, depths: Sequence[DepthRow], largest: float) -> str:
    """State how many layers are enough, within what error, and for which inputs: proved, refuted or undecided.

    `depths` is the effective depth per tolerance up to `largest`, for inputs with |entries| up to `radius`; it is empty
    where it is not defined.
    """
    deep, inputs = counted(layers, "layer"), f"for every input up to {number(radius, 6)}"
    if not depths:
        return f"{deep}; effective depth is not defined for this kind of network"
    if layers == 1:
        return f"{deep}; there is no shallower network to compare with"
    shallow = [depth for depth in depths if depth.certified and depth.layers < layers]
    if shallow:
        best = min(shallow, key=lambda depth: (depth.layers, depth.error or 0.0))
        enough = "1 is enough" if best.layers == 1 else f"{best.layers} are enough"
        return f"{deep}; {enough} within {number(best.error)} {inputs} (proved, {best.method})"
    widest = max((depth for depth in depths if depth.certified), key=lambda depth: depth.tolerance)
    within = number(largest, 6)
    if widest.status == "refuted":
        return (
            f"{deep}; fewer are refuted: each of the {widest.tried} shallower networks tried is off by more "
            f"than {within} on an input up to {number(radius, 6)}"
        )
    return (
        f"{deep}; undecided: no shallower network is proved to stay within {within} {inputs}, and not all of "
        "them were refuted"
    )


def checkpoint_verdict(
    layers: int,
    objective: str,
    blocks: Mapping[int, Interval],
    trust: Sequence[ScoreTrust],
    *,
    measured: bool = True,
) -> str:
    """State which layers cost least and most to skip (`blocks`), and which layer score to trust.

    `measured` tells whether the model ran on inputs.
    """
    parts = [] if measured else ["only the weights were measured"]
    unit = COSTS.get(objective, objective)
    if blocks:
        least = min(blocks, key=lambda layer: blocks[layer].loss)
        most = max(blocks, key=lambda layer: blocks[layer].loss)
        low, high = number(blocks[least].loss, 2), number(blocks[most].loss, 2)
        parts.append(f"skipping layer {least} costs least ({low} {unit}), layer {most} most ({high})")
    ranked = [(row.spearman, row.score) for row in trust if row.spearman is not None]
    if ranked:
        best, score = max(ranked, key=lambda pair: pair[0])
        label = SCORES[score].label if score in SCORES else score
        trusted = f"the best layer score is {label} (rank correlation {best:.2f})"
        none = f"no layer score predicts the measured cost (rank correlations of at most {best:.2f})"
        parts.append(trusted if best > 0 else none)
    return "; ".join([counted(layers, "layer"), *parts])


def mean_caption(subject: CheckpointSubject) -> str:
    """Say over how many windows the what-ifs are means, and whether they have intervals."""
    text = subject.text
    mean = "Mean over windows of text" if text is None else f"Mean over {text.phrase()}"
    if any(found.low is not None for layer in subject.layers for found in layer.what_if.values()):
        return f"{mean}, with its 95 % confidence interval."
    noun = "windows" if text is None or text.kind == "text" else text.kind
    return f"{mean}; an interval needs {LEAST_WINDOWS} {noun}."


def violates_printed_theorem(row: Sandwich, printed: PrintedTheorem) -> bool:
    """Decide whether a result contradicts Theorem D.1 of paper A as printed.

    The theorem bounds the error of the network that it constructs, which is the method `last-layer`. It is violated
    where its conditions hold and an input was found on which that network is further off than the printed bound.
    """
    return (
        row.method == "last-layer"
        and printed.printed_applies
        and printed.printed_bound is not None
        and row.lower is not None
        and row.lower > printed.printed_bound
    )


def printed_bound_text(printed: PrintedTheorem) -> str:
    """Return the printed bound as a number, as a power of ten where it is beyond floating point, or `overflows`."""
    if printed.printed_bound is not None:
        return number(printed.printed_bound)
    return "overflows" if printed.printed_log10 is None else f"1e{printed.printed_log10:.0f}"
