"""The shipped rows of trained models: what the certificate permits, and where depth pays."""

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from depthgauge.papers.sweep_tasks import TASKS

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "docs" / "figures").glob("trained-depth*.csv.gz"))
CERTAIN = 0.01
"""A model counts as proved to be one layer if no class probability can change by more."""


def cells(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as handle:
        for row in csv.DictReader(handle):
            assert (row["task"], int(row["version"])) == ("trained-depth", TASKS["trained-depth"].version)
            assert not row["error_text"]
            yield {name: _value(text) for name, text in row.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text or None


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.name)
def shipped(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return list(cells(request.param))


def plain(found: list[dict[str, Any]]) -> dict[tuple[str, int, int, Any], dict[str, Any]]:
    """Return the cells with skip connections and without LayerNorm by task, layers, heads and η."""
    kept = (cell for cell in found if cell["skip"] and cell["norm"] == "none")
    return {(cell["problem"], cell["layers"], cell["heads"], cell["eta"]): cell for cell in kept}


def test_there_are_rows() -> None:
    assert FILES
    assert all(path.stat().st_size < 2_000_000 for path in FILES)


def test_one_layer_keeps_the_accuracy_within_what_is_proved(shipped: list[dict[str, Any]]) -> None:
    proved = 0
    for cell in shipped:
        for accuracy, one, permitted in zip(cell["accuracy"], cell["one_layer"], cell["permitted"], strict=True):
            if one is not None:
                assert abs(accuracy - one) <= permitted + 1e-12
                proved += permitted < 1
    assert proved > 10


def test_where_one_layer_is_proved_more_layers_gain_nothing(shipped: list[dict[str, Any]]) -> None:
    """Compare the deepest models with trained single layers: the gain is at most `permitted` and the seed noise."""
    table, tested = plain(shipped), 0
    deepest = max(layers for _, layers, _, _ in table)
    for (problem, layers, heads, eta), cell in table.items():
        if layers != deepest or any(p is None or p > CERTAIN for p in cell["probability"]):
            continue
        wide = table[problem, 1, deepest * heads, eta]
        noise = max(cell["accuracy"]) - min(cell["accuracy"]) + max(wide["accuracy"]) - min(wide["accuracy"])
        # 0.04: two standard errors of the difference of two accuracies on 500 sequences are at most 0.063; their means
        # over seeds vary less.
        gain = mean(cell["accuracy"]) - mean(wide["accuracy"])
        assert gain <= max(cell["permitted"]) + noise + 0.04, (problem, eta)
        tested += 1
    assert tested >= 2


def test_depth_pays_at_large_weights_and_not_at_small_ones(shipped: list[dict[str, Any]]) -> None:
    table = plain(shipped)
    narrow = min(heads for _, _, heads, _ in table)
    by_task: dict[str, dict[Any, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for (problem, layers, heads, eta), cell in table.items():
        if heads == narrow:
            by_task[problem][eta][layers] = mean(cell["accuracy"])
    paid = 0
    for problem, curves in by_task.items():
        bounded = sorted(eta for eta in curves if eta != "none")
        if len(bounded) < 3:
            continue
        small, large = curves[bounded[0]], curves[bounded[-1]]
        paid += max(large.values()) - large[1] >= 0.2
        wide = mean(table[problem, 1, max(small) * narrow, bounded[0]]["accuracy"])  # as many heads in one layer
        assert max(small.values()) - max(small[1], wide) < 0.1
    assert paid >= 2


def test_the_box_is_covered_only_without_layernorm_and_no_attack_exceeds_a_proof(
    shipped: list[dict[str, Any]],
) -> None:
    attacked = 0
    for cell in shipped:
        if cell["layers"] == 1:  # one layer replaces itself
            assert set(cell["certified"]) == {0.0}
        elif cell["norm"] != "none":
            assert set(cell["box"]) == {None}
            assert cell["skip"] or set(cell["certified"]) == {None}
        for found, proved in zip(cell["attacked"], cell["margin"], strict=True):
            if proved is not None:
                assert found <= proved * (1 + 1e-9) + 1e-12
                attacked += found > 0
    assert attacked > 50
