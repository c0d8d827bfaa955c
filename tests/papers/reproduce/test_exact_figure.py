"""Figure A8: the enclosure contains the largest error on prompts, and the drawn ratios are cautious."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from depthgauge.base.errors import InputError
from depthgauge.papers.reproduce.exact_figure import ExactSuprema
from depthgauge.papers.reproduce.study import reproduce
from depthgauge.papers.sweep_tasks import TASKS, exact_supremum
from depthgauge.sweeps.grid import Cell, make_cell
from depthgauge.sweeps.run import Local
from depthgauge.theory.depth.methods import collapse
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.network.random_networks import random_network, uniform_inputs
from depthgauge.theory.suprema.exact_supremum import Shares


def cell_of(method: str, eta: float, blocks: bool = False) -> Cell:
    setting = {"method": method, "eta": eta, "blocks": blocks, "vocabulary": 2, "layers": 2, "heads": 1, "dim": 3}
    return make_cell(TASKS["exact-supremum"], setting, 1)


def drawn(cell: Cell) -> tuple[SelfAttentionNetwork, torch.Tensor]:
    """The network and the tokens of a cell, whose seeds depend on the repetition alone."""
    common = replace(cell, parameters={"seed": 0})
    kind: dict[str, Any] = {"norm": "pre", "mlp": 3, "mlp_skip": True} if cell.parameters["blocks"] else {}
    network = random_network(2, 1, 3, cell.parameters["eta"], **kind, seed=common.seed("network"))
    return network, uniform_inputs(1, 2, 3, seed=common.seed("tokens"))[0]


@pytest.mark.parametrize(("method", "blocks"), [("mean-field", False), ("parallel", True)])
def test_the_enclosure_contains_the_largest_error_on_prompts(method: str, blocks: bool) -> None:
    cell = cell_of(method, 0.4, blocks)
    found, (network, tokens) = exact_supremum(cell), drawn(cell)
    small, largest = collapse(network, method), 0.0
    for many in range(1, 64):
        prompt = tokens.repeat_interleave(torch.tensor([many, 64 - many]), dim=0)
        with torch.no_grad():
            largest = max(largest, float((network(prompt) - small(prompt)).abs().max()))
    assert 0.99 * found["exact_lower"] <= largest <= found["exact_upper"] <= 1.02 * found["exact_lower"]
    assert 0 < found["lower"] <= found["exact_upper"]
    assert found["exact_lower"] <= found["upper"]


def test_all_methods_and_sizes_have_the_same_network_up_to_a_factor() -> None:
    (one, tokens), (other, same) = drawn(cell_of("parallel", 0.1)), drawn(cell_of("mean-field", 0.4))
    assert torch.equal(tokens, same)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(4 * a, b)


def test_a_method_that_does_not_apply_is_refused() -> None:
    with pytest.raises(InputError, match="mean-field does not apply to this network: it has norms"):
        cell_of("mean-field", 0.1, blocks=True)


def test_an_interrupted_search_gives_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Shares, "_report", stop)
    with pytest.raises(KeyboardInterrupt):
        exact_supremum(cell_of("mean-field", 0.4))


def test_the_ratios_are_cautious() -> None:
    study = ExactSuprema("A8", None, 0)
    row = {"lower": 0.97, "upper": 1.5, "exact_lower": 1.0, "exact_upper": 1.04}
    assert study.ratios([row]) == ([1.5], [0.97 / 1.04])
    assert study.ratios([row, {**row, "upper": None}]) == ([], [0.97 / 1.04] * 2)
    for upper in (1.06, None):
        assert study.ratios([row, {**row, "exact_upper": upper}]) == ([], [])
    better = {**row, "lower": 1.02}  # an attacked lower bound is one of the supremum, too
    assert study.ratios([better]) == ([1.5 / 1.02], [1.02 / 1.04])


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactSuprema, "SHAPES", [{"vocabulary": 2, "layers": 2, "heads": 1}])
    monkeypatch.setattr(ExactSuprema, "ETAS", [0.5])
    done = reproduce("A8", tmp_path, models=1, seed=3, engine=Local(1))
    with open(tmp_path / "A8.csv", encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert done.points == len(rows) == 6
    assert all(float(row["lower"]) <= float(row["exact_upper"]) for row in rows)
    assert all(float(row["exact_lower"]) <= float(row["upper"]) for row in rows)
    about = json.loads((tmp_path / "A8.json").read_text(encoding="utf-8"))
    assert (about["repetitions"], about["seed"], about["grids"][0]["parameters"]["eta"]) == (1, 3, [0.5])
    assert "1 repetitions" in (tmp_path / "A8.txt").read_text(encoding="utf-8")
