"""From a claim to its verdict, by running its check."""

import time
from dataclasses import replace

from depthgauge._format import number
from depthgauge.ledger.arithmetic import precise, to_exact, to_float
from depthgauge.ledger.claim import Claim, Inequality, Instance, Misprint, Observed
from depthgauge.ledger.search import EVALUATIONS, StoppedError, search
from depthgauge.ledger.witness import entries, worked


def judge(claim: Claim, evaluations: int = EVALUATIONS, deadline: float | None = None) -> Observed:
    """Decide one claim; after `deadline` (of `time.monotonic`) none is begun and searches end `undecided`.

    A study, and the proof of a witness that a search has found, are finished once begun.
    """
    if deadline is not None and time.monotonic() > deadline:
        return Observed("undecided", None, 0, ("The budget was spent before this one was begun.",))
    try:
        if isinstance(claim.check, Inequality):
            return judge_inequality(claim.check, claim.id, evaluations, deadline)
        if isinstance(claim.check, Misprint):
            return _judge_misprint(claim.check, claim.id, evaluations, deadline)
        return claim.check.run()
    except StoppedError:
        return Observed("undecided", None, 0, ("The search was stopped before its end.",))


def judge_inequality(
    inequality: Inequality, name: str, evaluations: int = EVALUATIONS, deadline: float | None = None
) -> Observed:
    """`fails` with a witness, `holds` with the largest ratio seen, `undecided` if nothing meets the hypotheses."""
    outcome = search(inequality, name, evaluations, deadline)
    sizes = ", ".join("(" + ", ".join(f"{k} = {v}" for k, v in size.items()) + ")" for size in outcome.clean)
    if outcome.witness is not None:
        words = (f"No violation was found at {sizes}.",) if sizes else ()
        return Observed("fails", outcome.witness.ratio, outcome.evaluations, words, outcome.witness)
    if outcome.instance is None:
        words = ("No instance was found that satisfies the hypotheses.",)
        return Observed("undecided", None, outcome.evaluations, words)
    reached = _exact_ratio(inequality, outcome.instance)
    return Observed("holds", reached, outcome.evaluations, (f"Sizes tried: {sizes}.",))


def _judge_misprint(check: Misprint, name: str, evaluations: int, deadline: float | None) -> Observed:
    """`misprint` when the printed form fails and the proved one holds; otherwise what the printed form came to."""
    printed = judge_inequality(check.printed, name, evaluations, deadline)
    if printed.verdict != "fails":
        return printed
    proved = judge_inequality(check.proved, f"{name}/proved", evaluations, deadline)
    seen = printed.evaluations + proved.evaluations
    if proved.verdict == "holds":
        reached = "" if proved.ratio is None else f" (largest ratio seen {number(proved.ratio, 6)})"
        words = f"As its proof has it, it holds: {check.proved.text()}{reached}."
        return replace(printed, verdict="misprint", evaluations=seen, words=(*printed.words, words))
    words = f"As its proof has it, it {proved.verdict} too: {check.proved.text()}."
    return replace(printed, evaluations=seen, words=(*printed.words, words))


def _exact_ratio(inequality: Inequality, instance: Instance) -> float | None:
    """left/right at the worst instance in exact arithmetic, so that rounding shows no 1.0000000002; 1 for equations."""
    if inequality.relation == "=":
        return 1.0
    with precise():
        _, left, right = worked(inequality, {name: to_exact(value) for name, value in instance.items()})
        ratios = [to_float(x / y) for x, y in entries(left, right) if to_float(y) > 0]
    return max(ratios, default=None)
