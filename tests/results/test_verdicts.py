"""Verdicts: proved, refuted and undecided are three different sentences."""

import pytest

from depthgauge.results.gauge_record import (
    DepthRow,
    PrintedTheorem,
    Sandwich,
    ScoreTrust,
    checkpoint_verdict,
    network_verdict,
    printed_bound_text,
    violates_printed_theorem,
)


def row(tolerance: float, layers: int, status: str, *, certified: bool = True, method: str = "none") -> DepthRow:
    return DepthRow(
        tolerance=tolerance,
        certified=certified,
        layers=layers,
        kept=(),
        folded=(),
        error=tolerance / 2,
        method=method,
        status=status,
        tried=7,
    )


def test_proved() -> None:
    rows = [row(0.1, 2, "proved", method="fold"), row(0.01, 1, "proved", method="corrected"), row(1e-3, 4, "refuted")]
    assert network_verdict(4, 1.0, rows, 0.1) == (
        "4 layers; 1 is enough within 0.005 for every input up to 1 (proved, corrected)"
    )


def test_refuted() -> None:
    verdict = network_verdict(4, 0.5, [row(0.1, 4, "refuted"), row(0.01, 4, "refuted")], 0.1)
    assert verdict == (
        "4 layers; fewer are refuted: each of the 7 shallower networks tried is off by more than 0.1 on an input up to "
        "0.5"
    )
    assert "enough" not in verdict


def test_undecided_claims_nothing() -> None:
    rows = [row(0.1, 4, "undecided"), row(0.1, 1, "measured", certified=False), row(0.01, 4, "refuted")]
    verdict = network_verdict(4, 1.0, rows, 0.1)
    assert verdict.startswith("4 layers; undecided: no shallower network is proved to stay within 0.1")
    assert "can be" not in verdict


def test_one_layer_leaves_nothing_to_decide() -> None:
    verdict = network_verdict(1, 1.0, [row(0.1, 1, "proved")], 0.1)
    assert verdict == "1 layer; there is no shallower network to compare with"
    assert checkpoint_verdict(1, "loss", {}, ()) == "1 layer"
    assert checkpoint_verdict(1, "loss", {}, (), measured=False) == "1 layer; only the weights were measured"


def test_not_defined() -> None:
    assert "not defined" in network_verdict(3, 1.0, [], 0.1)


@pytest.mark.parametrize(
    ("method", "lower", "bound", "applies", "violated"),
    [
        ("last-layer", 0.3, 0.25, True, True),
        ("last-layer", 0.2, 0.25, True, False),
        ("last-layer", 0.3, 0.25, False, False),
        ("last-layer", 0.3, None, True, False),
        ("identity", 0.3, 0.25, True, False),
    ],
)
def test_the_printed_theorem_is_about_last_layer_and_its_conditions(method, lower, bound, applies, violated) -> None:
    sandwich = Sandwich(method=method, layers_after=1, lower=lower, methods=("joint",))
    printed = PrintedTheorem(printed_bound=bound, printed_log10=None, printed_applies=applies)
    assert violates_printed_theorem(sandwich, printed) == violated


def test_printed_bounds_as_text() -> None:
    texts = [
        printed_bound_text(PrintedTheorem(printed_bound=bound, printed_log10=log, printed_applies=True))
        for bound, log in ((0.25, -0.6), (None, 1679.4), (None, None))
    ]
    assert texts == ["0.25", "1e1679", "overflows"]


def test_a_score_is_only_best_if_it_predicts_anything() -> None:
    def verdict(*correlations: float | None) -> str:
        names = ("block_influence", "angular_distance")
        trust = [
            ScoreTrust(score=name, what_if="block", spearman=value, layers=3)
            for name, value in zip(names, correlations, strict=True)
        ]
        return checkpoint_verdict(3, "loss", {}, trust)

    assert verdict(0.4, -1.0) == "3 layers; the best layer score is block influence (ShortGPT) (rank correlation 0.40)"
    assert verdict(-0.5, -0.8) == (
        "3 layers; no layer score predicts the measured cost (rank correlations of at most -0.50)"
    )
    assert verdict(None, None) == "3 layers"
