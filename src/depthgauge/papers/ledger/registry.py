"""All claims, in the order of the papers; `claims`, which checks them; and what it found as text and as a page.

The *story* of a finding is its explanation.
"""

import difflib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType, NoneType

from depthgauge.base.errors import InputError, require_positive, require_type, unknown_name
from depthgauge.base.format import number
from depthgauge.base.progress import Step, silent
from depthgauge.papers.ledger.attention_lemmas import ALL_ONES, CROSS, IDENTITY
from depthgauge.papers.ledger.claim import (
    PAPER_A,
    PAPER_B,
    Claim,
    Computation,
    Finding,
    Findings,
    Inequality,
    Misprint,
    Observed,
    Verdict,
    Witness,
)
from depthgauge.papers.ledger.corrected import CLAIMS as CORRECTED
from depthgauge.papers.ledger.layer_collapse import CLAIMS as LAYER_COLLAPSE
from depthgauge.papers.ledger.one_layer import CLAIMS as ONE_LAYER
from depthgauge.papers.ledger.random_signs import CLAIMS as SIGNS
from depthgauge.papers.ledger.regression_lemmas import DEFINITIONS, REGRESSION
from depthgauge.papers.ledger.search import judge
from depthgauge.theory.linalg.small_matrices import SMALL, threads_for

HEADINGS = {"A": f"Paper A: {PAPER_A}", "B": f"Paper B: {PAPER_B}", "ours": "Our own statements"}
MEANING: Mapping[Verdict, str] = {
    "holds": "no counterexample found by this search (not a proof)",
    "fails": "counterexample, verified exactly",
    "misprint": "counterexample to the printed form, verified exactly; none found to the intended form",
    "undecided": "no instance was found that satisfies the hypotheses, or the time budget ran out",
}
"""What a verdict of a search means."""
STUDY_MEANING: Mapping[Verdict, str] = {
    "holds": "no violation in the cases computed (not a proof)",
    "fails": "violated, as the cases computed show",
    "misprint": "violated as printed, no violation as intended, in the cases computed",
    "undecided": "not decided by the cases computed",
}
"""What a verdict of a study means: probabilities or certificates were computed for finitely many cases."""
_VIOLATION = {
    "<=": "is larger than the right side",
    "<": "is not smaller than the right side",
    "=": "differs from the right side",
}


def explain(claim: Claim, observed: Observed, corrected: Claim | None = None) -> str:
    """Return the story of a finding: statement, hypotheses, witness with intermediate values, corrected statement."""
    meaning = (STUDY_MEANING if isinstance(claim.check, Computation) else MEANING)[observed.verdict]
    lines = [f"{claim.id} · {claim.where} · {observed.verdict}: {meaning}", ""]
    lines += [f"Statement   {claim.statement}", f"Hypothesis  {claim.hypothesis}"]
    check = claim.check.printed if isinstance(claim.check, Misprint) else claim.check
    tested = check if isinstance(check, Inequality) else None
    if tested is not None:
        lines.append(f"Tested as   {tested.text()}")
    if claim.note:
        lines.append(f"Note        {claim.note}")
    name = "left/right at the witness" if observed.witness is not None else "largest left/right found"
    ratio = "" if observed.ratio is None else f"; {name} {number(observed.ratio, 6)}"
    count = f"{observed.evaluations} evaluation{'' if observed.evaluations == 1 else 's'}"
    lines.append(f"Search      {count}{ratio}")
    lines += [f"            {sentence}" for sentence in observed.remarks]
    if observed.witness is not None:
        lines += ["", "Witness", *(f"  {line}" for line in observed.witness.lines())]
        lines += ["", "Step by step", *_steps(tested, observed.witness)]
    if corrected is not None:
        lines += ["", f"Corrected statement: {corrected.id}: {corrected.statement}"]
        if corrected.hypothesis != "none":
            lines.append(f"  where {corrected.hypothesis}")
    return "\n".join(lines)


def _steps(check: Inequality | None, witness: Witness) -> Iterator[str]:
    yield from (f"  {name} = {value}" for name, value in witness.steps)
    left, right = ("", "") if check is None else (f"{check.left} = ", f"{check.right} = ")
    yield f"  left   {left}{witness.left}"
    yield f"  right  {right}{witness.right}"
    yield f"  The left side {_VIOLATION['<=' if check is None else check.relation]}."


def page(findings: Sequence[Finding]) -> str:
    """Return the ledger as a Markdown page: one table per paper, then the stories of all verdicts except `holds`."""
    lines = [
        "# The ledger of claims",
        "",
        "This page lists every numbered statement of two papers, and our corrected statements, with the verdict of",
        f"a check. Paper A is *{PAPER_A}*.",
        f"Paper B is *{PAPER_B}*.",
        "`depthgauge claims --out docs/ledger.md` writes this page; `depthgauge claims --id A.4.1` prints one story.",
        "",
        "| verdict | statements that are searched | statements that are computed, such as probabilities |",
        "| --- | --- | --- |",
        *(f"| **{verdict}** | {MEANING[verdict]} | {STUDY_MEANING[verdict]} |" for verdict in MEANING),
        "",
        "The ratio is the left side divided by the right side. Where a statement holds, it is the largest ratio found:",
        "1 means that the constant is attained, 1⁻ that it is approached. Otherwise it is the ratio at the witness.",
        "",
        "The witness of a search is a counterexample. It is verified in rational arithmetic or, where exponentials",
        "occur, in interval arithmetic with 256 bits (python-flint's arb), and so are its hypotheses. The witness of a",
        "computed probability gives the sizes and parameters at which the probability was computed.",
        "",
        "The papers were read as text extractions, in which a ≤ may have become a <. The verdicts are about the",
        "statements as transcribed. The intended form of a misprint is the form that the proof or the context uses.",
        "[math.md](math.md) proves our own statements, except those whose id starts with `ours.b-`.",
    ]
    for paper, heading in HEADINGS.items():
        chosen = Findings(finding for finding in findings if finding.paper == paper)
        if not chosen:
            continue
        lines += ["", f"## {heading}", "", f"{chosen.summary()}.", ""]
        lines += ["| id | statement | verdict | ratio | corrected statement |", "| --- | --- | --- | --- | --- |"]
        for finding in chosen:
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in finding.cells()) + " |")
    lines += ["", "## Stories", "", "The explanation of every finding whose verdict is not `holds`."]
    for finding in findings:
        if finding.verdict != "holds":
            lines += ["", f"### {finding.id}", "", "```text", finding.story, "```"]
    return "\n".join(lines) + "\n"


PAPERS = ("A", "B", "ours")


def _place(claim: Claim) -> tuple[int, list[tuple[int, str]]]:
    """Return the sort key: numbered sections before the appendices A to F, and numbers in numerical order."""
    pieces = re.findall(r"\d+|[A-Za-z]+", claim.id.partition(".")[2])
    return PAPERS.index(claim.paper), [(int(piece) if piece.isdigit() else 1000, piece) for piece in pieces]


_PAPER_B = (*DEFINITIONS, *REGRESSION, *SIGNS, *ALL_ONES, *IDENTITY, *CROSS)
_ALL = (*sorted((*LAYER_COLLAPSE, *ONE_LAYER, *_PAPER_B), key=_place), *CORRECTED)
_REGISTRY = MappingProxyType({claim.id: claim for claim in _ALL})


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
    - `undecided`: no instance was found that satisfies the hypotheses, or the time budget ran out.

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
