"""The verdict on a claim, from running its check."""

import time
from dataclasses import replace

from depthgauge._format import number
from depthgauge.papers.ledger.arithmetic import precise, to_exact, to_float
from depthgauge.papers.ledger.claim import Claim, Inequality, Instance, Misprint, Observed
from depthgauge.papers.ledger.search import EVALUATIONS, StoppedError, search
from depthgauge.papers.ledger.witness import entries, evaluate_exactly


def judge(claim: Claim, evaluations: int = EVALUATIONS, deadline: float | None = None) -> Observed:
    """Check one claim.

    After `deadline` (a time of `time.monotonic`) no check is started and searches end as `undecided`. A study that has
    started, and the verification of a counterexample that a search has found, run to their end.
    """
    if deadline is not None and time.monotonic() > deadline:
        return Observed("undecided", None, 0, ("The time budget ran out before this check started.",))
    try:
        if isinstance(claim.check, Inequality):
            return judge_inequality(claim.check, claim.id, evaluations, deadline)
        if isinstance(claim.check, Misprint):
            return _judge_misprint(claim.check, claim.id, evaluations, deadline)
        return claim.check.run()
    except StoppedError:
        return Observed("undecided", None, 0, ("The time budget ran out during the search.",))


def judge_inequality(
    inequality: Inequality, name: str, evaluations: int = EVALUATIONS, deadline: float | None = None
) -> Observed:
    """Search for a counterexample to an inequality.

    Returns:
        `fails` with a witness, `holds` with the largest ratio found, or `undecided` if no instance that satisfies the
        hypotheses was found.
    """
    outcome = search(inequality, name, evaluations, deadline)
    sizes = ", ".join("(" + ", ".join(f"{k} = {v}" for k, v in size.items()) + ")" for size in outcome.clean_sizes)
    if outcome.witness is not None:
        remarks = (f"No counterexample was found at the smaller sizes {sizes}.",) if sizes else ()
        return Observed("fails", outcome.witness.ratio, outcome.evaluations, remarks, outcome.witness)
    if outcome.instance is None:
        remarks = ("No instance that satisfies the hypotheses was found.",)
        return Observed("undecided", None, outcome.evaluations, remarks)
    reached = _exact_ratio(inequality, outcome.instance)
    return Observed("holds", reached, outcome.evaluations, (f"Sizes searched: {sizes}.",))


def _judge_misprint(check: Misprint, name: str, evaluations: int, deadline: float | None) -> Observed:
    """Return `misprint` if the printed form fails and the proved form holds, else the verdict on the printed form."""
    printed = judge_inequality(check.printed, name, evaluations, deadline)
    if printed.verdict != "fails":
        return printed
    proved = judge_inequality(check.proved, f"{name}/proved", evaluations, deadline)
    seen = printed.evaluations + proved.evaluations
    form = f"The intended form is {check.proved.text()}"
    if proved.verdict == "holds":
        reached = "" if proved.ratio is None else f" (largest ratio seen {number(proved.ratio, 6)})"
        remark = f"{form}; the search found no counterexample to it{reached}."
        return replace(printed, verdict="misprint", evaluations=seen, remarks=(*printed.remarks, remark))
    verdict = "fails too" if proved.verdict == "fails" else "is undecided"
    return replace(printed, evaluations=seen, remarks=(*printed.remarks, f"{form}; it {verdict}."))


def _exact_ratio(inequality: Inequality, instance: Instance) -> float | None:
    """Return left/right at the worst instance in exact arithmetic, so that rounding cannot push it over 1.

    For an equation the ratio is 1.
    """
    if inequality.relation == "=":
        return 1.0
    with precise():
        _, left, right = evaluate_exactly(inequality, {name: to_exact(value) for name, value in instance.items()})
        ratios = [to_float(x / y) for x, y in entries(left, right) if to_float(y) > 0]
    return max(ratios, default=None)
