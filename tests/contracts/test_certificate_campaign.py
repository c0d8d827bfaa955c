"""The campaign of drawn networks: it draws every kind, finds planted violations, and can be continued."""

import sys
from dataclasses import replace
from random import Random

import certificate_campaign
import pytest
from certificate_campaign import KINDS, contradiction, rounding_violation, violation

import depthgauge as dg
from depthgauge.theory.certificates.forward_rounding import ForwardPass
from depthgauge.theory.depth.certificate import Certificate


def drawn_certificate(kind: str, seed: int = 3) -> Certificate:
    case = KINDS[kind](Random(seed))
    return dg.certify(case.network, case.surrogate, **case.request, starts=1, steps=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_that_is_too_small_is_found_by_the_search_and_by_random_inputs(kind: str) -> None:
    certificate = next(c for c in (drawn_certificate(kind, seed) for seed in range(9)) if c.upper and c.lower > 1e-12)
    assert violation(certificate, 0) is None
    assert violation(replace(certificate, upper=certificate.lower * 0.99), 0) is not None
    tried = violation(replace(certificate, lower=0.0, upper=certificate.lower * 1e-3), 0)
    assert tried is not None
    assert "an input differs" in tried


def test_a_supremum_and_a_default_certificate_that_exclude_each_other_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    certificate = next(c for c in (drawn_certificate("exact", seed) for seed in range(9)) if c.upper and c.lower > 1e-9)
    assert contradiction(certificate, 0) is None
    below = contradiction(replace(certificate, upper=certificate.lower / 2), 0)
    assert below is not None
    assert below.startswith("the supremum is at most")
    usual = replace(certificate, upper=certificate.lower / 2)
    monkeypatch.setattr(dg, "certify", lambda *_, **__: usual)
    above = contradiction(certificate, 0)
    assert above is not None
    assert above.startswith("the supremum is at least")


def test_a_network_that_rounds_by_more_than_its_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = next(c for c in (drawn_certificate("tokens", seed) for seed in range(9)) if c.tokens is not None)
    assert rounding_violation(certificate, 0) is None
    before = ForwardPass.error
    monkeypatch.setattr(ForwardPass, "error", lambda self: before(self) * 1e-3)
    found = rounding_violation(certificate, 0)
    assert found is not None
    assert found.startswith("float32 is off by")


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["certificate_campaign.py", *given])
    return certificate_campaign.main(), capsys.readouterr().out


def test_a_campaign_is_continued_and_stops_at_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(certificate_campaign, "EVERY", 2)
    status, printed = run(monkeypatch, capsys, "--networks", "3", "--verified", "1")
    assert status == 0
    assert "2 certified, 2 finite, 2 verified, 0 refused" in printed
    assert "continue with --first 3" in printed
    seen = []
    monkeypatch.setattr(certificate_campaign, "violation", lambda c, seed: seen.append(seed) or "planted")
    status, printed = run(monkeypatch, capsys, "--networks", "3", "--first", "3")
    assert status == 1
    assert seen == [3]
    assert printed == "WRONG: seed 3, no skips: planted\n"
