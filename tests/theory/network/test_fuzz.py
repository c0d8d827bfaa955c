"""Damaged network files give a `NetworkFileError` or a valid network, never another exception or a NaN."""

import collections
import random
from pathlib import Path

import pytest
import torch
from mutate import MUTATIONS, mutated
from safetensors.torch import save_file

from depthgauge import load_network, random_network, save_network
from depthgauge.base.errors import InputFileError, NetworkFileError
from depthgauge.theory.network.random_networks import load_inputs

ORIGINALS = (
    {"layers": 2, "heads": 2, "dim": 3, "eta": 0.1},
    {"layers": 1, "heads": 1, "dim": 2, "eta": 0.5, "mlp": 2, "norm": "pre", "causal": True},
    {"layers": 2, "heads": 1, "dim": 2, "eta": 0.5, "dtype": torch.float32, "key_dim": 3},
)


def damage_and_load(count: int, seed: int, folder: Path) -> collections.Counter[str]:
    """Load `count` damaged files; return how many were rejected and how many were loaded."""
    rng = random.Random(seed)
    sources = []
    for index, arguments in enumerate(ORIGINALS):
        path = folder / f"original-{index}.safetensors"
        save_network(random_network(**arguments), path)  # type: ignore[arg-type]
        sources.append(path.read_bytes())
    target = folder / "damaged.safetensors"
    seen: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        content = mutated(rng, rng.choice(sources))
        target.write_bytes(content)
        try:
            network = load_network(target)
        except NetworkFileError as error:
            message = str(error)
            assert str(target) in message
            assert "\n" not in message
            assert len(message) < 500 + len(str(target))
            seen["rejected"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}, from the file {content!r}") from error
        assert all(bool(parameter.isfinite().all()) for parameter in network.parameters())
        assert network(torch.zeros(2, network.dim, dtype=torch.float64)).shape == (2, network.dim)
        network.describe()
        save_network(network, folder / "again.safetensors")
        seen["loaded"] += 1
    return seen


def test_damaged_files_of_inputs(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.rand(2, 3, 4, dtype=torch.float64), "y": torch.ones(2)}, path, metadata={"scale": "1"})
    content = path.read_bytes()
    seen: collections.Counter[str] = collections.Counter()
    for _ in range(500):
        path.write_bytes(mutated(rng, content))
        try:
            x = load_inputs(path, 4)
        except InputFileError as error:
            seen["rejected" if str(path) in str(error) else "rejected without the path"] += 1
            continue
        assert x.ndim == 3
        assert x.shape[-1] == 4
        assert bool(x.isfinite().all())
        seen["loaded"] += 1
    assert set(seen) == {"rejected", "loaded"}
    assert seen["rejected"] > 200
    assert seen["loaded"] > 20


def test_five_hundred_damaged_files(tmp_path: Path) -> None:
    seen = damage_and_load(500, seed=0, folder=tmp_path)
    # Most damage is fatal, but a changed bit in a weight gives another valid weight. Both outcomes must occur.
    assert seen["rejected"] > 200
    assert seen["loaded"] > 20
    assert seen["rejected"] + seen["loaded"] == 500


@pytest.mark.soak
@pytest.mark.parametrize("batch", range(20))
def test_a_hundred_thousand_damaged_files(batch: int, tmp_path: Path) -> None:
    seen = damage_and_load(5000, seed=1000 + batch, folder=tmp_path)
    assert seen["rejected"] + seen["loaded"] == 5000


def test_every_kind_of_damage_happens(tmp_path: Path) -> None:
    path = tmp_path / "n.safetensors"
    save_network(random_network(2, 2, 3, 0.1), path)
    content = path.read_bytes()
    for mutation in MUTATIONS:
        results = {mutation(random.Random(seed), content) for seed in range(40)}
        assert len(results - {content}) >= 5, mutation
