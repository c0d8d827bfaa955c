"""Figure A7: the lower bound and the fit enclose the distance from one layer, and both obey docs/math.md 3.14."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from depthgauge.papers.reproduce.one_layer_figure import Network, OneLayerDistance, annihilated, fitted
from depthgauge.papers.reproduce.study import reproduce
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork


def proved_lower(d: int, z: float) -> float:
    """3.14 (i) for L = 2 and H = 1, the largest over the shares of the figure."""
    q, w = np.array([1 / 2, 5 / 8, 1 / 4, 1 / 8, 1 / 16, 1 / 32]), d * z * z

    def above(s: np.ndarray) -> np.ndarray:
        return q / (q + (1 - q) * np.exp(-s)) - q

    return float((z / (1 + q) * (above(w * q * z) + q * z * above(w * np.ones_like(q)))).max())


@pytest.mark.parametrize(("d", "z"), [(16, 0.04), (64, 0.3), (1024, 1.0)])
def test_the_distance_is_enclosed(d: int, z: float) -> None:
    network = Network(d, z)
    lower, inputs = annihilated(network)
    assert 2 <= inputs <= 4
    assert proved_lower(d, z) * (1 - 1e-6) <= lower <= network.upper
    upper = fitted(network, 16, 1, 0)
    assert lower * (1 - 1e-6) <= upper <= 2 * lower


def test_what_is_fitted_is_the_network() -> None:
    d, z = 5, 0.7
    weight = torch.full((1, d, d), z / d, dtype=torch.float64)
    network = SelfAttentionNetwork([Layer(weight, weight.clone(), weight.clone()) for _ in range(2)], scale=1.0)
    for x, y, many in ((0.4, -0.9, 1), (0.0, 1.0, 3), (-1.0, 0.2, 2)):
        column, q = torch.tensor([x] * (4 - many) + [y] * many, dtype=torch.float64), many / 4
        with torch.no_grad():
            out = float(network(column[:, None].expand(4, d))[0, 0])
        rest = Network(d, z).rest(*(np.array([value]) for value in (x, y, q)))
        assert rest[0] + x + ((1 + z) ** 2 - 1) * ((1 - q) * x + q * y) == pytest.approx(out, abs=1e-12)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneLayerDistance, "DIMS", [16])
    monkeypatch.setattr(OneLayerDistance, "SIZES", [0.1, 0.5])
    monkeypatch.setattr(OneLayerDistance, "HEADS", 2)
    done = reproduce("A7", tmp_path, models=1, seed=3)
    with open(tmp_path / "A7.csv", encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    assert done.points == len(rows) == 2
    assert all(float(row["lower"]) <= float(row["fitted"]) for row in rows)
    about = json.loads((tmp_path / "A7.json").read_text(encoding="utf-8"))
    assert (about["dims"], about["repetitions"], about["seed"]) == ([16], 1, 3)
    assert "1 repetitions" in (tmp_path / "A7.txt").read_text(encoding="utf-8")
