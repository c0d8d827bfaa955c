"""The verdict on a claim, from running its check."""

import time
from dataclasses import replace

from depthgauge._format import number
from depthgauge.papers.ledger.claim import Claim, Inequality, Misprint, Observed
from depthgauge.papers.ledger.search import EVALUATIONS, StoppedError, search


def judge(claim: Claim, evaluations: int = EVALUATIONS, deadline: float | None = None) -> Observed:
    """Check one claim.

    After `deadline` (a time of `time.monotonic`) no check is started and searches end as `undecided`. A study that has
    started, and the verification of a counterexample that a search has found, run to their end.
    """
    if deadline is not None and time.monotonic() > deadline:
        return Observed("undecided", None, 0, ("The time budget ran out before this check started.",))
    try:
        if isinstance(claim.check, Inequality):
            return search(claim.check, claim.id, evaluations, deadline)
        if isinstance(claim.check, Misprint):
            return _judge_misprint(claim.check, claim.id, evaluations, deadline)
        return claim.check.run()
    except StoppedError:
        return Observed("undecided", None, 0, ("The time budget ran out during the search.",))


def _judge_misprint(check: Misprint, name: str, evaluations: int, deadline: float | None) -> Observed:
    """Return `misprint` if the printed form fails and the proved form holds, else the verdict on the printed form."""
    printed = search(check.printed, name, evaluations, deadline)
    if printed.verdict != "fails":
        return printed
    proved = search(check.proved, f"{name}/proved", evaluations, deadline)
    seen = printed.evaluations + proved.evaluations
    form = f"The intended form is {check.proved.text()}"
    if proved.verdict == "holds":
        reached = "" if proved.ratio is None else f" (largest ratio seen {number(proved.ratio, 6)})"
        remark = f"{form}; the search found no counterexample to it{reached}."
        return replace(printed, verdict="misprint", evaluations=seen, remarks=(*printed.remarks, remark))
    verdict = "fails too" if proved.verdict == "fails" else "is undecided"
    return replace(printed, evaluations=seen, remarks=(*printed.remarks, f"{form}; it {verdict}."))
