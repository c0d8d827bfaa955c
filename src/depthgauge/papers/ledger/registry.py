"""All claims, in the order of the papers, and `claims`, which checks them."""

import difflib
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType, NoneType

from depthgauge.base.errors import InputError, require_positive, require_type, unknown_name
from depthgauge.base.progress import Step, silent
from depthgauge.papers.ledger.claim import Claim, Observed
from depthgauge.papers.ledger.corrected import CLAIMS as CORRECTED
from depthgauge.papers.ledger.finding import Finding, Findings
from depthgauge.papers.ledger.layer_collapse import CLAIMS as LAYER_COLLAPSE
from depthgauge.papers.ledger.search import judge
from depthgauge.papers.ledger.softmax_linear import CLAIMS as SOFTMAX_LINEAR
from depthgauge.papers.ledger.story import explain
from depthgauge.theory.linalg.small_matrices import SMALL, threads_for

PAPERS = ("A", "B", "ours")


_REGISTRY = MappingProxyType({claim.id: claim for claim in (*LAYER_COLLAPSE, *SOFTMAX_LINEAR, *CORRECTED)})


def registry() -> Mapping[str, Claim]:
    """Return every claim by its id."""
    return _REGISTRY


def select(paper: str | None = None, id: str | None = None) -> list[Claim]:
    """Return the claims of a paper, the claim with an id, or all claims. Letter case does not matter."""
    known = registry()
    for name, given in (("paper", paper), ("id", id)):
        require_type(name, given, (str, NoneType), "a string such as A or A.4.1, or None")
    if paper is not None:
        paper = next((name for name in PAPERS if name.lower() == paper.lower()), paper)
        if paper not in PAPERS:
            raise unknown_name("paper", paper, PAPERS)
    if id is not None:
        id = next((name for name in known if name.lower() == id.lower()), id)
        if id not in known:
            near = difflib.get_close_matches(id, known, n=3, cutoff=0.4)
            near += [name for name in known if name.startswith(id + ".") and name not in near][:6]
            offer = f"; the nearest ids are {', '.join(near)}" if near else ""
            raise InputError(f"no statement has the id {id!r}{offer}; `depthgauge claims --list` lists all of them")
        if paper is not None and known[id].paper != paper:
            raise InputError(
                f"statement {id} belongs to paper {known[id].paper}, not to paper {paper}; leave out paper or id"
            )
        return [known[id]]
    return [claim for claim in known.values() if paper in (None, claim.paper)]


def run(
    chosen: Sequence[Claim], budget: float | None = None, processes: int | None = None, progress: Step = silent
) -> Findings:
    """Check the chosen claims and return their findings in the same order; see `claims` for the other arguments."""
    deadline = None if budget is None else time.monotonic() + require_positive("budget", budget, "seconds to search")
    if len(chosen) == 1:
        with threads_for(SMALL):
            return Findings([finding(chosen[0], judge(chosen[0], deadline=deadline))])
    from joblib import Parallel, delayed

    observed: dict[str, Observed] = {}
    work = Parallel(n_jobs=processes or -1, return_as="generator_unordered", batch_size=1)
    for id, found in work(delayed(_judge_by_id)(claim.id, deadline) for claim in chosen):
        observed[id] = found
        progress(len(observed), len(chosen), id)
    return Findings(finding(claim, observed[claim.id]) for claim in chosen)


def _judge_by_id(id: str, deadline: float | None) -> tuple[str, Observed]:
    """Check a claim in a worker process. Claims hold functions, which cannot be pickled, so only the id is sent."""
    with threads_for(SMALL):
        return id, judge(registry()[id], deadline=deadline)


def finding(claim: Claim, observed: Observed) -> Finding:
    """Return the record of a checked claim."""
    corrected = None if claim.corrected is None else registry()[claim.corrected]
    return Finding(
        id=claim.id,
        paper=claim.paper,
        statement=claim.statement,
        corrected=claim.corrected,
        story=explain(claim, observed, corrected),
        **vars(observed),
    )


def claims(
    paper: str | None = None,
    id: str | None = None,
    *,
    budget: float | None = None,
    processes: int | None = None,
    progress: Step = silent,
) -> Findings:
    """Check the numbered statements of the two papers by searching for counterexamples.

    Paper A is "Only Large Weights (And Not Skip Connections) Can Prevent the Perils of Rank Collapse". Paper B is
    "Superiority of Softmax: Unveiling the Performance Edge Over Linear Attention". The statements of `ours` are
    corrected forms and the bounds that this library uses.

    Each statement gets a verdict:

    - `holds`: no counterexample was found by this search. This is not a proof.
    - `fails`: there is a counterexample, and it was verified exactly.
    - `misprint`: there is a counterexample to the printed form, and none was found to the intended form, which is
      the form that the proof or the context uses.
    - `undecided`: the statement has hidden constants, or the time budget ran out.

    Statements about probabilities are not searched: their probabilities are computed for a list of sizes n, and the
    verdict is about these sizes. Searches are counted in evaluations and seeded by the id of the statement, so without
    `budget` every run gives the same verdicts.

    Args:
        paper: Check only the statements of `"A"`, `"B"` or `"ours"`.
        id: Check only the statement with this id, such as `"A.4.1"`.
        budget: Time limit in seconds. After it no check is started and searches stop; unfinished statements are
            `undecided`. Computations of probabilities and verifications of counterexamples that have started are
            finished first. Without a budget there is no limit.
        processes: The number of worker processes; by default one per CPU core. A single statement is checked in this
            process.
        progress: Called as `progress(done, total, id)` after each statement.

    Returns:
        A tuple of `Finding` records with `to_json()` and `to_frame()`.

    Raises:
        InputError: If `paper` or `id` does not exist, or `budget` is not a positive number.

    Example:
        >>> (finding,) = claims(id="A.3.3.2")
        >>> finding.verdict, finding.witness.to_json(), finding.corrected
        ('fails', {'A': [['1', '1']], 'B': [['1'], ['1']]}, 'ours.product-max')
    """
    return run(select(paper, id), budget, processes, progress)
