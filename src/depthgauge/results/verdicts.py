"""Verdicts: the sentences that state what a result shows, and the decision whether a printed theorem is violated."""

import math
from collections.abc import Mapping, Sequence

from depthgauge.base.format import counted, number
from depthgauge.results.checkpoint_subject import (
    LEAST_WINDOWS,
    CheckpointSubject,
    FirstLayerBound,
    FirstLayerHead,
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


AVERAGES = 0.693
"""A head with a smaller score range averages: e^θ < 2, so no token gets twice its uniform share of the attention."""
SELECTS = 0.9
"""A head that puts this much attention on one token can select it."""


def first_layer_verdict(head: FirstLayerHead) -> str:
    """Decide what is shown about a head of layer 0: `averages`, `can select one token` or `undecided`."""
    if head.proved is not None and head.proved <= AVERAGES:
        return "averages"
    return "can select one token" if head.weight >= SELECTS else "undecided"


def first_layer_sentences(bound: FirstLayerBound) -> tuple[str, ...]:
    """State which heads of layer 0 are proved to average, which were seen to select, and which are undecided."""
    if bound.refused is not None:
        return (f"Layer 0 is not bounded: {bound.refused}.",)
    verdicts = [first_layer_verdict(head) for head in bound.heads]
    every = f"every text of the {bound.vocabulary:,} tokens"
    selecting = [head.weight for head in bound.heads if first_layer_verdict(head) == "can select one token"]
    about = {
        "averages": f"proved to average. On {every}, no token gets more than twice its uniform share of the attention.",
        "can select one token": (
            f"can select one token. On a text of {bound.tokens} tokens that was found for each of them, one token gets "
            f"at least {percent_down(min(selecting, default=0.0))} of the attention."
        ),
        "undecided": (
            f"undecided. They are not proved to average on {every}, and on no text that was tried does one token get "
            f"{percent_down(SELECTS)} of the attention."
        ),
    }
    shown = [verdict for verdict in about if verdict in verdicts]
    return tuple(f"Layer 0, {_heads(verdicts, verdict)}: {about[verdict]}" for verdict in shown)


def percent_down(share: float) -> str:
    """Return a share in percent, rounded down.

    >>> percent_down(0.9), percent_down(0.99996)
    ('90.0 %', '99.9 %')
    """
    return f"{math.floor(1000 * share) / 10:.1f} %"


def _heads(verdicts: Sequence[str], verdict: str) -> str:
    """Return `all 9 heads`, or `2 of 9 heads (0, 5)`."""
    found = [str(index) for index, one in enumerate(verdicts) if one == verdict]
    heads = counted(len(verdicts), "head")
    return f"all {heads}" if len(found) == len(verdicts) else f"{len(found)} of {heads} ({', '.join(found)})"


FIRST_LAYER_CAPTION = (
    "For every text of the vocabulary and every position in the window. proved: no row of scores has a larger range, "
    "and no row of attention is further from averaging in total variation (TV). attained: the model's own scores on a "
    "text that was found. weight: the largest share of the attention that one token of this text gets. The proof is "
    "about exact arithmetic on the stored weights, without the rounding of the model's own number type."
)


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
