"""A finding told to a reader: the statement, the witness line by line, and what holds instead."""

from collections.abc import Iterator, Sequence
from typing import Any

from depthgauge._format import number
from depthgauge.ledger.claim import Claim, Finding, Inequality, Misprint, Witness
from depthgauge.ledger.registry import PAPERS, registry

PAPER_NAMES = {
    "A": "paper A, Only Large Weights (And Not Skip Connections) Can Prevent the Perils of Rank Collapse",
    "B": "paper B, Superiority of Softmax",
    "ours": "our own statements",
}
_MEANING = {
    "holds": "no violation in the search",
    "fails": "a witness, proved in exact or ball arithmetic",
    "misprint": "fails as printed, holds as its proof has it",
    "undecided": "the search was stopped, or the statement hides its constants",
}


def story(finding: Finding) -> str:
    """Everything about one claim, in lines that a person can follow with a pencil."""
    claim, observed = finding.claim, finding.observed
    lines = [f"{claim.id} · {claim.where} · {observed.verdict}: {_MEANING[observed.verdict]}", ""]
    lines += [f"Statement   {claim.statement}", f"Hypothesis  {claim.hypothesis}"]
    tested = _tested(claim)
    if tested:
        lines.append(f"Tested as   {tested}")
    if claim.note:
        lines.append(f"Note        {claim.note}")
    ratio = "" if observed.ratio is None else f"; {_ratio_name(finding)} {number(observed.ratio, 6)}"
    lines.append(f"Search      {observed.evaluations} evaluations{ratio}")
    lines += [f"            {sentence}" for sentence in observed.words]
    if observed.witness is not None:
        lines += ["", "Witness", *_witness_lines(observed.witness)]
        lines += ["", "Worked through", *_worked_lines(claim, observed.witness)]
    if claim.corrected is not None:
        instead = registry()[claim.corrected]
        lines += ["", f"What holds instead: {instead.id}: {instead.statement}"]
        if instead.hypothesis != "none":
            lines.append(f"  where {instead.hypothesis}")
    return "\n".join(lines)


def _tested(claim: Claim) -> str:
    if isinstance(claim.check, Inequality):
        return claim.check.text()
    return claim.check.printed.text() if isinstance(claim.check, Misprint) else ""


def _ratio_name(finding: Finding) -> str:
    return "left/right at the witness" if finding.observed.witness is not None else "largest left/right seen"


def _witness_lines(witness: Witness) -> list[str]:
    """`Q = K = 0`: equal values share a line."""
    groups: dict[str, list[str]] = {}
    for name, value in witness.to_json().items():
        groups.setdefault(compact(value), []).append(name)
    return [f"  {' = '.join(names)} = {value}" for value, names in groups.items()]


def _worked_lines(claim: Claim, witness: Witness) -> Iterator[str]:
    yield from (f"  {name} = {value}" for name, value in witness.steps)
    check = claim.check.printed if isinstance(claim.check, Misprint) else claim.check
    left, right = (f"{check.left} = ", f"{check.right} = ") if isinstance(check, Inequality) else ("", "")
    relation = check.relation if isinstance(check, Inequality) else "<="
    yield f"  left   {left}{witness.left}"
    yield f"  right  {right}{witness.right}"
    broken = {"<=": "is larger than the right side", "<": "is not smaller than the right side", "=": "differs from it"}
    yield f"  The left side {broken[relation]}."


def compact(value: Any) -> str:
    """Fractions in brackets; a matrix of equal entries in a word, such as `all 1/100 (8 × 8)`, or `0`."""
    if not isinstance(value, list):
        return str(value)
    if value and isinstance(value[0], list) and not isinstance(value[0][0], list):
        entries = {entry for row in value for entry in row}
        if entries == {"0"}:
            return "0"
        if len(entries) == 1 and len(value) * len(value[0]) > 2:
            return f"all {entries.pop()} ({len(value)} × {len(value[0])})"
    return "[" + ", ".join(compact(v) for v in value) + "]"


def short(finding: Finding, length: int = 70) -> str:
    """The witness or the reason in a few words, for a table."""
    observed = finding.observed
    if observed.witness is not None:
        text = ", ".join(line.strip() for line in _witness_lines(observed.witness))
    else:
        text = observed.words[0] if observed.verdict == "undecided" and observed.words else ""
    return text if len(text) <= length else text[: length - 1] + "…"


def ratio_text(ratio: float | None) -> str:
    """Four digits; a ratio below 1 never shows as 1."""
    if ratio is None:
        return "–"
    shown = number(ratio, 4)
    return "1⁻" if ratio < 1 and float(shown) >= 1 else shown


def page(findings: Sequence[Finding]) -> str:
    """The ledger as a Markdown page: a table a paper, then the story of everything that does not simply hold."""
    lines = [
        "# The ledger of claims",
        "",
        "Every numbered statement of the two papers and our corrected ones, each decided by running its own search.",
        "This page is what `depthgauge claims --out docs/ledger.md` writes; `depthgauge claims --id A.4.1` tells one",
        "story alone.",
        "",
        *(f"- **{verdict}**: {meaning}." for verdict, meaning in _MEANING.items()),
        "",
        "The ratio is left side over right side: the largest seen where a claim holds (1 means that its constant is",
        "attained, 1⁻ that it is approached), the witness's own where it does not. The papers were read as text",
        "extractions, in which a ≤ may have become a <; the verdicts are about the statements as transcribed.",
    ]
    for paper in PAPERS:
        chosen = [finding for finding in findings if finding.claim.paper == paper]
        if not chosen:
            continue
        counts = {v: sum(f.observed.verdict == v for f in chosen) for v in _MEANING}
        summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        lines += ["", f"## {PAPER_NAMES[paper][0].upper()}{PAPER_NAMES[paper][1:]}", "", f"{summary}.", ""]
        lines += ["| id | statement | verdict | ratio | holds instead |", "| --- | --- | --- | --- | --- |"]
        for f in chosen:
            cells = (f.claim.id, f.claim.statement, f.observed.verdict, ratio_text(f.observed.ratio))
            lines.append("| " + " | ".join(map(_cell, (*cells, f.claim.corrected or ""))) + " |")
    told = [finding for finding in findings if finding.observed.verdict != "holds"]
    lines += ["", "## The stories"]
    for finding in told:
        lines += ["", f"### {finding.claim.id}", "", "```text", story(finding), "```"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
