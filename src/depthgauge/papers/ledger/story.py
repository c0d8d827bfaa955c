"""The explanation of a finding (its *story*), and the ledger as a Markdown page."""

from collections.abc import Iterator, Mapping, Sequence

from depthgauge.base.format import number
from depthgauge.papers.ledger.claim import Claim, Computation, Inequality, Misprint, Observed
from depthgauge.papers.ledger.finding import PAPER_A, PAPER_B, Finding, Findings, Verdict, Witness

HEADINGS = {"A": f"Paper A: {PAPER_A}", "B": f"Paper B: {PAPER_B}", "ours": "Our own statements"}
MEANING: Mapping[Verdict, str] = {
    "holds": "no counterexample found by this search (not a proof)",
    "fails": "counterexample, verified exactly",
    "misprint": "counterexample to the printed form, verified exactly; none found to the intended form",
    "undecided": "hidden constants, or the time budget ran out",
}
"""What a verdict of a search means."""
STUDY_MEANING: Mapping[Verdict, str] = {
    "holds": "no violation in the cases computed (not a proof)",
    "fails": "violated in the cases computed",
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
