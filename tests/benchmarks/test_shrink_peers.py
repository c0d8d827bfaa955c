"""The peers of the shrink benchmark: each choice and repair equals its formula, computed with plain forward passes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from benchmark_files import benchmark
from layered_models import LAYERS, layered_model
from torch import Tensor

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.weights.load import wrap

pytestmark = pytest.mark.soak
peers = benchmark("shrink_peers")
REMOVED = [(2,), (1, 2, 3), (1, 4), (3, 4, 5)]


def windows(count: int, seed: int, length: int = 11) -> Tensor:
    return torch.randint(3, 40, (count, length), generator=torch.Generator().manual_seed(seed))


class Plain:
    """A model with hooks: states of the dense model, and losses with some blocks skipped and others changed."""

    def __init__(self, seed: int = 0) -> None:
        self.model = layered_model("llama", seed)
        self.blocks = self.model.model.layers

    def states(self, ids: Tensor) -> list[Tensor]:
        """X_0 … X_L, recorded before every block and after the last."""
        found: list[Tensor] = []
        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.register_forward_pre_hook(lambda _, args: found.append(args[0])).remove)
            stack.callback(self.blocks[-1].register_forward_hook(lambda _, args, out: found.append(out)).remove)
            self.logits(ids)
        return found

    def mlp(self, ids: Tensor, layer: int) -> Tensor:
        found: list[Tensor] = []
        handle = self.blocks[layer].mlp.register_forward_hook(lambda _, args, out: found.append(out))
        self.logits(ids)
        handle.remove()
        return found[0]

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model(input_ids=ids, use_cache=False).logits

    @contextmanager
    def without(self, removed: Sequence[int]) -> Iterator[None]:
        with ExitStack() as stack:
            for layer in removed:
                stack.callback(self.blocks[layer].register_forward_hook(lambda _, args, out: args[0]).remove)
            yield

    @contextmanager
    def changing(self, module: Any, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
        handle = module.register_forward_hook(lambda _, args, out: change(out))
        try:
            yield
        finally:
            handle.remove()

    def losses(self, ids: Tensor) -> Tensor:
        log_p = self.logits(ids).log_softmax(-1)[:, :-1]
        return -log_p.gather(-1, ids[:, 1:, None])[..., 0].mean(1)


@pytest.fixture
def plain() -> Plain:
    return Plain()


def observed(plain: Plain, ids: Tensor, batch: int = 3) -> Any:
    runner = BlockRunner(wrap(plain.model, "tiny"), ids[:1])
    runner.batches.size = batch
    return peers.observe(runner, ids)


def close(made: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(made.double(), expected.double(), rtol=tolerance, atol=tolerance)


# --- choices ----------------------------------------------------------------------------------------------------------


def test_the_states_are_those_of_the_model(plain: Plain) -> None:
    ids = windows(7, 0)
    dense = observed(plain, ids)
    assert len(dense.states) == LAYERS + 1
    assert all(close(made, own, 1e-10) for made, own in zip(dense.states, plain.states(ids), strict=True))
    assert close(dense.dense_losses, plain.losses(ids))


def test_shortgpt_removes_the_blocks_that_turn_tokens_least(plain: Plain) -> None:
    ids = windows(5, 1)
    states = [state.numpy() for state in plain.states(ids)]
    influence = []
    for before, after in pairwise(states):
        x, y = before.reshape(-1, before.shape[-1]), after.reshape(-1, after.shape[-1])
        norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
        influence.append(np.mean([1 - a @ b / norm for a, b, norm in zip(x, y, norms, strict=True)]))
    dense = observed(plain, ids)
    assert np.allclose(peers.block_influence(dense).numpy(), influence)
    for count, chosen in peers.shortgpt(dense, (1, 3)).items():
        assert set(chosen) == set(np.argsort(influence)[:count])


@pytest.mark.parametrize("seed", range(3))
def test_uidl_removes_the_run_with_the_smallest_angle(seed: int) -> None:
    plain, ids = Plain(seed), windows(5, seed)
    last = [state[:, -1].numpy() for state in plain.states(ids)]

    def distance(start: int, stop: int) -> float:
        pairs = zip(last[start], last[stop], strict=True)
        return float(np.mean([np.arccos(a @ b / np.sqrt((a @ a) * (b @ b))) / np.pi for a, b in pairs]))

    chosen = peers.uidl(observed(plain, ids), (1, 2, 4))
    for count, removed in chosen.items():
        runs = [range(start, start + count) for start in range(LAYERS) if start + count < LAYERS]
        best = min(runs, key=lambda run: distance(run[0], run[-1] + 1))
        assert removed == tuple(best)
        assert LAYERS - 1 not in removed


@pytest.mark.parametrize("seed", range(3))
def test_sleb_equals_a_greedy_search_with_complete_passes(seed: int) -> None:
    plain, ids = Plain(seed), windows(4, seed)
    gone: list[int] = []
    for _ in range(4):
        losses = {}
        for layer in set(range(1, LAYERS - 1)) - set(gone):
            with plain.without([*gone, layer]):
                losses[layer] = float(plain.losses(ids).mean())
        gone.append(min(losses, key=losses.__getitem__))
    dense = observed(plain, ids)
    assert peers.sleb_order(dense, 4) == gone
    assert peers.sleb(dense, (1, 3)) == {1: (gone[0],), 3: tuple(sorted(gone[:3]))}


def test_sleb_measures_windows_from_all_parts_of_the_calibration(plain: Plain) -> None:
    dense = observed(plain, windows(40, 0))
    some = dense.some(16)
    places = [int((dense.ids == ids).all(1).nonzero()[0]) for ids in some.ids]
    assert len(set(places)) == 16
    assert min(places) == 0
    assert max(places) == 39
    assert max(b - a for a, b in pairwise(places)) <= 3
    assert all(close(some.states[layer], dense.states[layer][places], 0) for layer in range(LAYERS + 1))
    assert len(dense.some(100).ids) == 40


# --- repairs ----------------------------------------------------------------------------------------------------------


def test_interfaces_are_the_maximal_runs() -> None:
    assert peers.interfaces([4, 1, 2, 5]) == [(1, 3), (4, 6)]
    assert peers.interfaces([0]) == [(0, 1)]


@pytest.mark.parametrize("removed", [*REMOVED, (0,), (0, 1, 3)])
def test_without_repair_the_blocks_are_skipped(plain: Plain, removed: tuple[int, ...]) -> None:
    ids = windows(4, 2)
    made = peers.shrunk_losses(observed(plain, ids), removed, peers.Repair())
    with plain.without(removed):
        assert close(made, plain.losses(ids))


@pytest.mark.parametrize("removed", REMOVED)
def test_replaceme_is_the_least_squares_map_of_the_mlp(plain: Plain, removed: tuple[int, ...]) -> None:
    fitted, evaluated = windows(8, 3), windows(4, 4)
    before = {name: value.clone() for name, value in plain.model.state_dict().items()}
    repair = peers.replaceme(observed(plain, fitted), removed)
    made = peers.shrunk_losses(observed(plain, evaluated), removed, repair)
    states, maps = plain.states(fitted), {}
    for start, stop in peers.interfaces(removed):
        mlp = plain.mlp(fitted, start - 1)
        attention_path = states[start] - mlp
        rows = [part.reshape(-1, part.shape[-1]).numpy() for part in (mlp, states[stop] - attention_path)]
        maps[start - 1] = torch.from_numpy(scipy.linalg.lstsq(*rows)[0])
    assert maps.keys() == repair.mlps.keys()
    assert all(close(repair.mlps[layer], maps[layer], 1e-6) for layer in maps)
    with plain.without(removed), ExitStack() as stack:
        for layer, turn in maps.items():
            stack.enter_context(plain.changing(plain.blocks[layer].mlp, lambda out, turn=turn: out @ turn))
        assert close(made, plain.losses(evaluated))
    assert all(torch.equal(value, before[name]) for name, value in plain.model.state_dict().items())


def test_replaceme_leaves_a_cut_before_the_first_block_alone(plain: Plain) -> None:
    repair = peers.replaceme(observed(plain, windows(8, 3)), (0, 3))
    assert list(repair.mlps) == [2]


def test_replaceme_restores_the_weights_after_an_error(plain: Plain) -> None:
    dense = observed(plain, windows(8, 3))
    weight = plain.blocks[1].mlp.down_proj.weight.clone()
    bad = peers.Repair(mlps={1: torch.eye(16, dtype=torch.float64) * 2}, matrices={2: torch.ones(3, 3)})
    with pytest.raises(RuntimeError):
        peers.shrunk_losses(dense, (2,), bad)
    assert torch.equal(plain.blocks[1].mlp.down_proj.weight, weight)


@pytest.mark.parametrize("removed", REMOVED)
def test_prune_and_comp_scales_by_the_mean_ratio(plain: Plain, removed: tuple[int, ...]) -> None:
    fitted, evaluated = windows(5, 5), windows(4, 6)
    repair = peers.prune_and_comp(observed(plain, fitted), removed)
    states, factors = plain.states(fitted), {}
    for start, stop in peers.interfaces(removed):
        ratios = [
            float(states[stop][w, :, c].abs().sum() / states[start][w, :, c].abs().sum())
            for w in range(5)
            for c in range(16)
        ]
        factors[start] = sum(ratios) / len(ratios)
    assert {start: pytest.approx(float(value)) for start, value in repair.scales.items()} == factors
    made = peers.shrunk_losses(observed(plain, evaluated), removed, repair)
    with plain.without(removed), ExitStack() as stack:
        for start, factor in factors.items():
            block = plain.blocks[start - 1]
            stack.enter_context(plain.changing(block, lambda out, factor=factor: out * factor))
        assert close(made, plain.losses(evaluated))


def test_prune_and_comp_equals_the_published_merge_into_the_weights() -> None:
    plain, ids, removed = Plain(1), windows(4, 7), (2, 3)
    dense = observed(plain, ids)
    repair = peers.prune_and_comp(dense, removed)
    made = peers.shrunk_losses(dense, removed, repair)
    assert plain.model.lm_head.weight is not plain.model.model.embed_tokens.weight
    with torch.no_grad():
        factor = repair.scales[2]
        plain.model.model.embed_tokens.weight *= factor
        for block in plain.blocks[:2]:
            block.self_attn.o_proj.weight *= factor
            block.mlp.down_proj.weight *= factor
    with plain.without(removed):
        assert close(made, plain.losses(ids), 1e-4)  # the norms' ε is not scaled


@pytest.mark.parametrize("removed", REMOVED)
def test_linear_patch_scales_rotated_channels(plain: Plain, removed: tuple[int, ...]) -> None:
    fitted, evaluated = windows(5, 8), windows(4, 9)
    turn = scipy.linalg.hadamard(16) / 4
    states, patches = [state.numpy() for state in plain.states(fitted)], {}
    for start, stop in peers.interfaces(removed):
        sizes = [np.abs(states[layer] @ turn).mean(axis=1) for layer in (start, stop)]
        patches[start] = torch.from_numpy(turn @ np.diag((sizes[1] / sizes[0]).mean(axis=0)) @ turn.T)
    repair = peers.linear_patch(observed(plain, fitted), removed)
    assert repair.matrices.keys() == patches.keys()
    assert all(close(repair.matrices[start], patches[start]) for start in patches)
    made = peers.shrunk_losses(observed(plain, evaluated), removed, repair)
    with plain.without(removed), ExitStack() as stack:
        for start, patch in patches.items():
            stack.enter_context(plain.changing(plain.blocks[start - 1], lambda out, patch=patch: out @ patch))
        assert close(made, plain.losses(evaluated), 1e-4)


@pytest.mark.parametrize("removed", REMOVED)
def test_the_diagonal_is_optimal(plain: Plain, removed: tuple[int, ...]) -> None:
    ids = windows(5, 10)
    repair, states = peers.diagonal(observed(plain, ids), removed), plain.states(ids)
    for start, stop in peers.interfaces(removed):
        for c in range(16):
            x, y = (states[layer][..., c].reshape(-1, 1).numpy() for layer in (start, stop))
            assert float(repair.scales[start][c]) == pytest.approx(scipy.linalg.lstsq(x, y)[0].item())
    made = peers.shrunk_losses(observed(plain, ids), removed, repair)
    with plain.without(removed), ExitStack() as stack:
        for start, scale in repair.scales.items():
            stack.enter_context(plain.changing(plain.blocks[start - 1], lambda out, scale=scale: out * scale))
        assert close(made, plain.losses(ids))


@pytest.mark.parametrize("order", [1, 2, 4, 12, 16, 20, 24, 72, 384, 576, 768])
def test_hadamard_matrices_are_orthogonal_with_equal_entries(order: int) -> None:
    made = peers.hadamard_matrix(order).double()
    assert torch.allclose(made @ made.T, torch.eye(order, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(made.abs(), torch.full_like(made, order**-0.5))


@pytest.mark.parametrize("order", [3, 6, 10, 18])
def test_a_width_without_a_hadamard_matrix_is_refused(order: int) -> None:
    with pytest.raises(InputError, match=f"none is known for {order}"):
        peers.hadamard_matrix(order)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt_neox"])
def test_replaceme_refuses_models_it_cannot_be_merged_into(name: str) -> None:
    model = layered_model(name)
    dense = peers.observe(BlockRunner(wrap(model, name), windows(1, 0)), windows(2, 0))
    with pytest.raises(InputError, match="the peers need"):
        peers.replaceme(dense, (2,))
