"""Random networks with bounded weights, and random inputs in a box."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from depthgauge import SelfAttentionNetwork, random_network
from depthgauge.base.errors import InputError, InputFileError
from depthgauge.theory.network.random_networks import DISTRIBUTIONS, load_inputs, uniform_inputs

DTYPES = [torch.float64, torch.float32]


def every_weight(network: SelfAttentionNetwork) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@given(eta=st.floats(1e-30, 1e30), seed=st.integers(0, 2**63 - 1))
def test_no_weight_exceeds_the_bound(distribution: str, dtype: torch.dtype, eta: float, seed: int) -> None:
    network = random_network(1, 2, 3, eta, distribution=distribution, mlp=4, seed=seed, dtype=dtype)
    weights = every_weight(network)
    assert weights.dtype == dtype
    assert weights.double().abs().max().item() <= eta  # compare in float64, because float32 would round eta
    assert network.eta > 0


@pytest.mark.parametrize("eta", [0.1, 0.3, 1e-7, 0.7])
def test_a_bound_that_float32_would_round_up_is_kept(eta: float) -> None:
    for distribution in ("sign", "aligned"):
        held = random_network(1, 1, 2, eta, distribution=distribution, dtype=torch.float32).eta
        assert held <= eta
        assert held == pytest.approx(eta, rel=1e-7)


def test_each_distribution_has_the_right_moments() -> None:
    draw = {name: every_weight(random_network(2, 4, 32, 0.5, distribution=name, seed=1)) for name in DISTRIBUTIONS}
    assert bool((draw["aligned"] == 0.5).all())
    assert set(draw["sign"].tolist()) == {0.5, -0.5}
    assert abs(draw["sign"].mean().item()) < 0.02
    uniform = draw["uniform"]
    assert uniform.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.02)
    assert abs(uniform.mean().item()) < 0.02
    assert uniform.abs().max().item() > 0.499
    normal = draw["normal"]
    clipped = (normal.abs() == 0.5).double().mean().item()
    assert clipped == pytest.approx(math.erfc(2 / math.sqrt(2)), rel=0.15)  # the mass beyond two standard deviations
    assert normal[normal.abs() < 0.5].std().item() == pytest.approx(
        0.25 * 0.8796, rel=0.03
    )  # the truncated normal distribution


def test_the_same_seed_gives_the_same_network_and_another_seed_another() -> None:
    first, again, other = (every_weight(random_network(2, 2, 4, 0.1, seed=s)) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # Drawing does not change the state of the global generator of torch.
    state = torch.random.get_rng_state()
    random_network(1, 1, 2, 0.1, seed=0)
    uniform_inputs(1, 2, 2)
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_provenance_contains_the_arguments() -> None:
    network = random_network(2, 3, 4, 0.1, key_dim=5, seed=7, distribution="normal")
    assert network.provenance == {
        "made_by": "random_network", "layers": 2, "heads": 3, "dim": 4, "eta": 0.1, "key_dim": 5,
        "distribution": "normal", "mlp": None, "seed": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"layers": True}, "layers must be a whole number"),
        ({"heads": -1}, "heads must be"),
        ({"dim": 0}, "dim must be"),
        ({"key_dim": 0}, "key_dim must be"),
        ({"mlp": 0}, "mlp must be"),
        ({"eta": 0.0}, "eta must be a positive number, got 0.0"),
        ({"eta": -0.1}, "eta must be"),
        ({"eta": math.nan}, "eta must be"),
        ({"eta": math.inf}, "eta must be"),
        ({"eta": 1e-60, "dtype": torch.float32}, "below the smallest positive torch.float32"),
        ({"distribution": "unifrom"}, "did you mean 'uniform'"),
        ({"norm": "batch"}, "norm must be one of"),
        ({"activation": "tanh"}, "activation must be one of"),
        ({"dtype": torch.float16}, "float64 or torch.float32"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**63}, "seed must be"),
    ],
    ids=str,
)
def test_bad_arguments_are_explained(changes: dict[str, object], complaint: str) -> None:
    arguments: dict[str, object] = {"layers": 1, "heads": 1, "dim": 2, "eta": 0.1} | changes
    with pytest.raises(InputError, match=complaint):
        random_network(**arguments)  # type: ignore[arg-type]


# --- inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(radius=st.floats(1e-30, 1e30), seed=st.integers(0, 1000))
def test_inputs_stay_in_their_box(dtype: torch.dtype, radius: float, seed: int) -> None:
    x = uniform_inputs(2, 5, 3, radius=radius, seed=seed, dtype=dtype)
    assert x.shape == (2, 5, 3)
    assert x.dtype == dtype
    assert x.double().abs().max().item() <= radius


def test_inputs_fill_their_box_and_repeat_with_their_seed() -> None:
    x = uniform_inputs(4, 500, 8, radius=2.0, seed=5)
    assert x.abs().max().item() > 1.99
    assert x.std().item() == pytest.approx(2 / math.sqrt(3), rel=0.02)
    assert torch.equal(x, uniform_inputs(4, 500, 8, radius=2.0, seed=5))
    assert not torch.equal(x, uniform_inputs(4, 500, 8, radius=2.0, seed=6))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"samples": 0}, "samples must be"),
        ({"tokens": 0}, "tokens must be"),
        ({"radius": -1.0}, "radius must be a positive number, got -1.0; it is the largest"),
        ({"seed": 2**64}, "seed must be"),
    ],
)
def test_bad_draws_are_explained(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        uniform_inputs(**({"samples": 1, "tokens": 2, "dim": 3} | arguments))  # type: ignore[arg-type]


def test_inputs_are_read_from_a_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x = torch.rand(2, 5, 3, dtype=torch.float64)
    save_file({"x": x, "other": x.clone()}, tmp_path / "x.safetensors")
    assert torch.equal(load_inputs(tmp_path / "x.safetensors", 3), x)
    save_file({"x": x[0].float()}, tmp_path / "one.safetensors")
    loaded = load_inputs(tmp_path / "one.safetensors", 3)
    assert torch.equal(loaded, x[:1].float().double())


@pytest.mark.parametrize(
    ("tensors", "dtype", "complaint"),
    [
        ({"y": torch.ones(2, 3)}, torch.float64, "holds y, expected a tensor named x"),
        ({"x": torch.ones(2, 4)}, torch.float64, r"shape \[2, 4\], expected \[tokens, 3\]"),
        ({"x": torch.ones(3)}, torch.float64, r"shape \[3\]"),
        ({"x": torch.ones(0, 2, 3)}, torch.float64, r"shape \[0, 2, 3\]"),
        ({"x": torch.ones(2, 3, dtype=torch.int64)}, torch.float64, "int64, expected float32 or float64"),
        ({"x": torch.tensor([[1.0, math.nan, 0.0]])}, torch.float64, "NaN or infinity"),
        ({"x": torch.full((1, 3), 1e300, dtype=torch.float64)}, torch.float32, "overflows torch.float32"),
    ],
)
def test_input_files_that_do_not_fit_are_explained(tmp_path, tensors, dtype, complaint) -> None:  # type: ignore[no-untyped-def]
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(InputFileError, match=complaint):
        load_inputs(tmp_path / "x.safetensors", 3, dtype)


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04K\x01.", b"not a tensor in sight"])
def test_input_files_that_cannot_be_read_are_explained(tmp_path, content) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputFileError, match=r"cannot read inputs from .*x\.safetensors"):
        load_inputs(path, 3)
    with pytest.raises(InputFileError, match="cannot read inputs from"):
        load_inputs(tmp_path, 3)
