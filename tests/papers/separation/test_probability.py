"""The public function `separate` and its record."""

import math
import pickle

import pytest

from depthgauge.base.errors import InputError
from depthgauge.papers.separation.probability import estimate, exact, separate, separate_setting
from depthgauge.papers.separation.settings import CrossAttention, Regression


def test_separate_is_the_exact_value_and_the_estimate_of_the_setting() -> None:
    found = separate("cross", x="ones", n=60, d=11, m=4, a0=0.1, a1=2.5, models=50, seed=3)
    setting = CrossAttention(60, 11, 4, 0.1, 2.5, "ones")
    assert found.setting == setting
    assert found.exact == exact(setting)
    assert found.estimate == estimate(setting, 50, seed=3)
    assert found == separate_setting(setting, 50, seed=3)
    assert found != separate_setting(setting, 50, seed=4)
    assert pickle.loads(pickle.dumps(found)) == found


def test_separate_reports_progress_and_rejects_bad_parameters() -> None:
    steps: list[tuple[int, int]] = []
    separate("cross", models=5, progress=lambda done, total, label: steps.append((done, total)))
    assert steps == [(5, 5)]
    with pytest.raises(InputError, match="c is not used by kind cross; omit it"):
        separate("cross", c=0.5)


def test_the_frame_has_a_row_for_success_and_each_condition() -> None:
    found = separate("cross", attention="poly:4", models=40)
    table = found.to_frame()
    assert table["event"].tolist() == [
        "success", "F_poly:4(D₁) > 0", "F_lin(D₁) = 0", "F_poly:4(D₀) = 0", "F_lin(D₀) = 0",
    ]  # fmt: skip
    assert found.exact is not None
    assert table["exact"].tolist() == [found.exact.success, *found.exact.parts]
    assert table["ratio"].tolist() == [found.estimate.ratio, *found.estimate.parts]
    assert (table["low"][0], table["high"][0]) == found.estimate.interval
    assert (table["low"] <= table["ratio"]).all()
    assert (table["ratio"] <= table["high"]).all()
    regression = separate_setting(Regression(50, 4), 5).to_frame()
    assert all(math.isnan(value) for value in regression["exact"])


def test_the_repr_is_short_and_the_html_is_a_table() -> None:
    found = separate("cross", models=40)
    assert found.exact is not None
    assert f"exact probability {found.exact.success:.6f}" in repr(found)
    assert repr(found).count("\n") == 1
    assert found._repr_html_().count("<tr>") == 6
    regression = separate_setting(Regression(50, 4), 5)
    assert "exact" not in repr(regression)
    assert "<td>–</td>" in regression._repr_html_()
