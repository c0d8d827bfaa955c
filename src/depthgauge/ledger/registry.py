"""All claims, in the order of the papers, and the run that decides them."""

import difflib
import time
from collections.abc import Sequence
from functools import cache

from depthgauge.errors import InputError, require_positive, unknown_name
from depthgauge.ledger.claim import Claim, Finding, Observed
from depthgauge.ledger.judge import judge
from depthgauge.progress import Step, silent

PAPERS = ("A", "B", "ours")


@cache
def registry() -> dict[str, Claim]:
    """Every claim by its id."""
    from depthgauge.ledger.corrected import CLAIMS as CORRECTED
    from depthgauge.ledger.layer_collapse import CLAIMS as LAYER_COLLAPSE
    from depthgauge.ledger.softmax_linear import CLAIMS as SOFTMAX_LINEAR

    found: dict[str, Claim] = {}
    for claim in (*LAYER_COLLAPSE, *SOFTMAX_LINEAR, *CORRECTED):
        if claim.id in found:
            raise ValueError(f"two claims are called {claim.id}")
        found[claim.id] = claim
    return found


def select(paper: str | None = None, id: str | None = None) -> list[Claim]:
    """The claims of a paper, or the one with an id; a wrong name is an error that offers the nearest ones."""
    known = registry()
    if paper is not None and paper not in PAPERS:
        raise unknown_name("paper", paper, PAPERS)
    if id is not None:
        if id not in known:
            near = difflib.get_close_matches(id, known, n=3, cutoff=0.4)
            near += [name for name in known if name.startswith(id + ".") and name not in near][:6]
            offer = f"; the nearest are {', '.join(near)}" if near else ""
            raise InputError(f"no claim is called {id!r}{offer}; `depthgauge claims` lists them all")
        if paper is not None and known[id].paper != paper:
            raise InputError(f"claim {id} is not of paper {paper} but of {known[id].paper}; leave out one of the two")
        return [known[id]]
    return [claim for claim in known.values() if paper in (None, claim.paper)]


def run(
    chosen: Sequence[Claim], budget: float | None = None, processes: int | None = None, progress: Step = silent
) -> list[Finding]:
    """Decide the chosen claims, in their order.

    After `budget` seconds searches stop and nothing is begun; what is not done is left `undecided`, and studies and
    proofs of witnesses that have begun are finished. Without it the same findings come every time. `processes` is the
    number of processes, all cores by default.
    """
    deadline = None if budget is None else time.monotonic() + require_positive("budget", budget, "seconds to search")
    if len(chosen) == 1:
        return [Finding(chosen[0], judge(chosen[0], deadline=deadline))]
    from joblib import Parallel, delayed

    observed: dict[str, Observed] = {}
    work = Parallel(n_jobs=processes or -1, return_as="generator_unordered", batch_size=1)
    for id, found in work(delayed(_decide)(claim.id, deadline) for claim in chosen):
        observed[id] = found
        progress(len(observed), len(chosen), id)
    return [Finding(claim, observed[claim.id]) for claim in chosen]


def _decide(id: str, deadline: float | None) -> tuple[str, Observed]:
    """In a worker: claims hold functions, so only their ids travel there."""
    return id, judge(registry()[id], deadline=deadline)


def claims(
    paper: str | None = None,
    id: str | None = None,
    *,
    budget: float | None = None,
    processes: int | None = None,
    progress: Step = silent,
) -> list[Finding]:
    """Decide the claims of a paper ("A", "B", "ours"), or one of them, or all; see `run` for the other arguments.

    >>> finding, = claims(id="A.3.3.2")
    >>> finding.observed.verdict, finding.observed.witness.to_json()
    ('fails', {'A': [['1', '1']], 'B': [['1'], ['1']]})
    """
    return run(select(paper, id), budget, processes, progress)
