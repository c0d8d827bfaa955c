"""The ledger is complete, its verdicts are the known ones, and errors and stories say what they should."""

import itertools
import json
import re
import time
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.papers.ledger import registry as module
from depthgauge.papers.ledger.claim import Claim, Computation, Observed, ratio_text
from depthgauge.papers.ledger.registry import registry, run, select
from depthgauge.papers.ledger.search import judge, refute


def numbers(paper, section, first, last):
    return [f"{paper}.{section}.{k}" for k in range(first, last + 1)]


PAPER_A = ["A.1.2", "A.3.2", *numbers("A", "3.3", 1, 3), "A.4.1", *numbers("A", "4.2", 1, 4), "A.5.1", "A.5.2"]
PAPER_A += [*numbers("A", "B.1", 1, 2), "A.B.2", "A.B.3", "A.B.4", *numbers("A", "C.1", 1, 2)]
PAPER_A += [*numbers("A", "C.2", 1, 3), *numbers("A", "D", 1, 5), *numbers("A", "D.6", 1, 2), "A.D.7"]
PAPER_A += numbers("A", "D.8", 1, 2)
PAPER_B = ["B.1.1", "B.1.2", "B.3.1", "B.3.6", "B.4.1", "B.4.2", *numbers("B", "5", 1, 4), "B.6.2", "B.A.1", "B.C.3"]
PAPER_B += ["B.C.5", *numbers("B", "D", 2, 17), *numbers("B", "E", 1, 4), *numbers("B", "F", 2, 17)]
OURS = ["softmax-tv", "softmax-shift", "softmax-uniform", "average-gap", "residual-lipschitz", "residual-norm"]
OURS += ["stochastic-product", "product-max", "product-inner", "residual-contraction", "softmax-linear"]
OURS += ["expansion", "mean-field-exact", "mean-field-certificate", "sign-norm", "joint-certificate", "identity"]
OURS += ["last-layer", "parallel", "corrected", "effective-depth", "row-ball", "mlp-deletion"]
OURS += ["causal-expansion", "causal-mean-field-order", "causal-mean-field"]
OURS += ["one-layer-distance", "one-layer-error", "tokens", "wide-block"]

KNOWN_A = {
    "holds": ["A.3.2", "A.3.3.1", "A.4.2.1", "A.4.2.2", "A.4.2.4", "A.B.2", "A.B.3", "A.D.3", "A.D.4"],
    "misprint": ["A.4.2.3", "A.B.1.1", "A.B.1.2", "A.D.5"],
    "fails": [
        *("A.3.3.2", "A.3.3.3", "A.4.1", "A.5.1", "A.5.2", "A.B.4", "A.C.1.1", "A.C.1.2", "A.C.2.1", "A.C.2.2"),
        *("A.C.2.3", "A.D.1", "A.D.1.displayed", "A.D.6.1", "A.D.6.2", "A.D.7", "A.D.7.restored", "A.D.8.1", "A.D.8.2"),
        *("A.1.2", "A.D.1.exists", "A.D.2"),
    ],
}


@cache
def judged(id):
    return judge(registry()[id])


def test_every_statement_is_in_the_registry():
    known = {*registry(), *(id.rpartition(".")[0] for id in registry())}
    assert {*PAPER_A, *PAPER_B, *(f"ours.{name}" for name in OURS)} <= known


def test_ids_are_unique():
    assert len({claim.id for claim in module._ALL}) == len(module._ALL) == len(registry())


@pytest.mark.docs
@pytest.mark.parametrize(("verdict", "id"), [(verdict, id) for verdict, ids in KNOWN_A.items() for id in ids])
def test_known_verdicts_of_paper_a(verdict, id):
    claim = registry()[id]
    observed = judged(id)
    assert observed.verdict == verdict
    if verdict == "holds" and claim.check.relation == "<=":
        assert 0 < observed.ratio <= 1
    if verdict == "fails":
        assert observed.witness.ratio > 1
        assert claim.corrected is not None
        assert isinstance(claim.check, Computation) or refute(claim.check, observed.witness.arrays()) is not None


@pytest.mark.docs
@pytest.mark.parametrize("id", sorted({c.corrected for c in registry().values() if c.corrected is not None}))
def test_corrected_statements_hold(id):
    assert judged(id).verdict == "holds"


def test_every_claim_of_paper_a_has_its_known_verdict():
    assert sorted(itertools.chain(*KNOWN_A.values())) == sorted(
        id for id, claim in registry().items() if claim.paper == "A" and id != "A.D.3.residual"
    )


def test_smallest_widths_with_a_counterexample():
    """Lemmas 5.1 and D.6 (1) fail from d = 3, D.8 and C.2 (2, 3) from d = 2, B.4 and D.7 from d = 1."""
    width = {"A.5.1": 3, "A.D.6.1": 3, "A.D.8.1": 2, "A.C.2.2": 2, "A.C.2.3": 2, "A.B.4": 1, "A.D.7": 1}
    for id, d in width.items():
        witness = judged(id).witness.to_json()
        X = witness.get("X", witness.get("X0"))
        assert len(X[0]) == d


def test_witnesses_checked_independently():
    A, B = (np.array([[Fraction(v) for v in row] for row in judged("A.4.1").witness.to_json()[n]]) for n in "AB")

    def res(Z):
        return Z - (Z.max(axis=0) + Z.min(axis=0)) / 2

    assert np.abs(res(A) - res(B)).max() > np.abs(A - B).max()

    found = {k: np.array(v, dtype=object) for k, v in judged("A.5.1").witness.to_json().items()}
    X, Q, K, V = (np.array([[float(Fraction(v)) for v in row] for row in found[n]]) for n in "XQKV")
    S = X @ Q @ K.T @ X.T
    P = np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)
    E = res(X) @ Q @ K.T @ res(X).T
    theta = np.ptp(E, axis=1).max()
    assert np.abs(res(P @ X @ V)).max() > 1.05 * np.expm1(theta) * np.abs(V).max() * np.abs(res(X)).max()

    w = judged("A.D.1").witness.to_json()
    eta, L = float(Fraction(w["V"][0][0])), int(w["L"])
    eps = 2 * eta * (1 + eta) ** L
    delta, c = 4 * np.expm1(2 * eps), 3 * eta * (eps**2 + 1)
    assert (1 + eta) ** L - (1 + eta) > sum(c**k for k in range(L + 1)) * delta


def test_public_function():
    (finding,) = dg.papers.claims(id="A.3.3.3")
    assert finding.to_json() == {
        "id": "A.3.3.3",
        "paper": "A",
        "statement": "‖AB‖₁ ≤ ‖A‖₁ ‖B‖∞",
        "verdict": "fails",
        "ratio": 2.0,
        "witness": {"A": [["1"]], "B": [["1", "1"]]},
        "corrected": "ours.product-sum",
    }


def test_wrong_names():
    with pytest.raises(InputError, match=r"no statement has the id 'A\.4\.11'; the nearest ids are .*A\.4\.1"):
        select(id="A.4.11")
    with pytest.raises(InputError, match="paper must be one of A, B, ours, got 'C'"):
        select(paper="C")
    with pytest.raises(InputError, match="belongs to paper A, not to paper B"):
        select(paper="B", id="A.4.1")
    with pytest.raises(InputError, match="budget must be a positive number"):
        run(select(id="A.4.1"), budget=0)


def test_after_the_budget_no_study_and_no_search_starts():
    started = []

    def study():
        started.append("study")
        return Observed("holds", None, 1)

    claim = Claim("ours.x", "nowhere", "1 ≤ 1", Computation(study))
    assert judge(claim, deadline=time.monotonic() - 1).verdict == "undecided"
    assert started == []
    assert judge(claim, deadline=time.monotonic() + 60).verdict == "holds"
    assert started == ["study"]
    findings = run(select(id="ours.corrected"), budget=1e-9)
    assert [finding.verdict for finding in findings] == ["undecided"]
    assert "ran out before this check started" in findings[0].reason(80)


def test_a_deadline_leaves_claims_undecided():
    findings = run(select(paper="A"), budget=1e-9, processes=1)
    assert {f.verdict for f in findings} == {"undecided"}
    assert {f.remarks for f in findings} == {("The time budget ran out before this check started.",)}


def test_a_deadline_stops_a_running_search():
    started = time.monotonic()
    observed = judge(registry()["A.3.2"], evaluations=10**8, deadline=started + 0.2)
    assert (observed.verdict, observed.remarks) == ("undecided", ("The time budget ran out during the search.",))
    assert 0.2 <= time.monotonic() - started < 20


def test_a_story_is_complete():
    (finding,) = run(select(id="A.4.1"))
    story = finding.story
    for part in ("Lemma 4.1", "‖Res(A) − Res(B)‖∞ ≤ ε", "A = [[", "Step by step", "left ", "right ", "ours.residual"):
        assert part in story
    assert finding.reason(10).endswith("…")
    assert ratio_text(None) == "–"
    assert ratio_text(0.99999999) == "1⁻"
    assert ratio_text(1.0) == "1"


def test_json_rows_are_plain():
    rows = [finding.to_json() for finding in run(select(paper="A")[1:5], processes=1)]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    for row in rows:
        entries = re.findall(r'"(-?\d+(?:/\d+)?)"', json.dumps(row["witness"]))
        assert row["witness"] is None or entries
