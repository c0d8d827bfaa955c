"""Every kernel of the backward pass against plain torch, at sizes that are no multiples of the tiles."""

from typing import Any

import pytest
import torch
from kernel_settings import DEVICE
from torch import Tensor

from depthgauge.fast_attention.call import Call
from depthgauge.fast_attention.launches import GradientLaunches, KernelPass, is_supported, programs, slots

pytestmark = pytest.mark.kernels
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
COEFFICIENTS = [(1.0, 0.9, 0.4), (1.1, 0.8, 0.3)]


def launches(**sizes: Any) -> GradientLaunches:
    """Prepare a backward pass in float32 with two key heads; `sizes` are fields of Call and KernelPass."""
    call: dict[str, Any] = {
        "heads": 2, "groups": 1, "n": 70, "m": 70, "d": 16, "e": 16, "dtype": torch.float32, "device": DEVICE,
        "scale": 1.0, "causal": sizes.get("block", 0) > 0, "tolerance": 1e-3, "force": None,
    }  # fmt: skip
    usual: dict[str, Any] = {
        "degree": 2, "block": 0, "turned_bytes": 2**28, "is_shifted": False, "is_plain": True, "has_w": False,
        "is_weighted": False, "is_alike": True, "needs_z": True,
    }  # fmt: skip
    own = Call(**{name: sizes.pop(name, value) for name, value in call.items()})
    found = KernelPass(own, **{**usual, **sizes})
    assert is_supported(own.dtype, own.d, own.e, found.degree)  # others may end the process on a GPU
    return GradientLaunches(found)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


def unset(*shape: int) -> Tensor:
    """A tensor of NaN: entries that a kernel must write."""
    return torch.full(shape, torch.nan, device=DEVICE)


SHAPES = [
    {"n": 1, "m": 1, "d": 16, "e": 16},
    {"n": 129, "m": 3, "d": 32, "e": 64, "groups": 3},
    {"n": 601, "m": 3, "d": 64, "e": 64},
    {"n": 5, "m": 300, "d": 64, "e": 32, "groups": 2},
    {"n": 300, "m": 257, "d": 32, "e": 32, "groups": 2, "block": 128},
    {"n": 130, "m": 1, "d": 16, "e": 16, "block": 128},
]


@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_prepare_centres_values_and_transposes_queries(shape: dict[str, int], is_shifted: bool) -> None:
    p = launches(**shape, is_shifted=is_shifted)
    s = p.sizes
    q, v = normal(p.row_heads, p.n, s.call.d), normal(s.call.heads, s.call.m, s.call.e)
    small = normal(3, s.call.heads, s.config.small_size)
    middle = normal(s.call.heads, s.call.e) if is_shifted else small[0, :, s.call.d + 1 + s.call.e : -1]
    x, vt = unset(*p.transposed_shape), unset(*v.shape)
    p.prepare((q, v, middle if is_shifted else small, x, vt))
    assert torch.equal(vt, v - middle[:, None])
    assert torch.equal(x[..., : p.n], q.transpose(1, 2))
    assert not bool(x[..., p.n :].any())


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_over_queries(shape: dict[str, int]) -> None:
    p = launches(**shape)
    s = p.sizes
    q, grad, out = (
        normal(p.row_heads, p.n, s.call.d),
        normal(p.row_heads, p.n, s.call.e),
        normal(p.row_heads, p.n, s.call.e, seed=1),
    )
    z = normal(p.row_heads, p.n).abs() + 0.5
    small = normal(1, s.call.heads, s.config.small_size)
    floor, dn, level, first = unset(*p.floor_shape), unset(*grad.shape), unset(*z.shape), unset(*p.first_shape)
    p.moments((q, grad, out, z, small, floor, dn, level, first))

    mean = small[0, :, s.call.d + 1 + s.call.e : -1].repeat_interleave(p.groups, dim=0)[:, None]
    true_level = -(grad * (out - mean)).sum(-1)
    torch.testing.assert_close(level, true_level, **CLOSE)
    blocks = p.first_shape[0]
    per_block = s.block or 512
    for b in range(blocks):
        at = slice(b * per_block, (b + 1) * per_block)
        low = torch.ones(s.call.heads, device=DEVICE)
        if p.is_causal:
            low = z[:, at].reshape(s.call.heads, -1).amin(-1)
            assert torch.equal(floor[:, b], low)
        share = low.repeat_interleave(p.groups)[:, None] / z[:, at]
        own = grad[:, at] * share[..., None]
        torch.testing.assert_close(dn[:, at], own, **CLOSE)
        weight = (true_level[:, at] * share)[..., None]
        queries = q[:, at].transpose(1, 2)
        parts = [queries @ own, queries @ (q[:, at] * weight), queries @ weight, own.sum(1), weight.sum(1)]
        expected = torch.cat([x.reshape(p.row_heads, -1) for x in parts], dim=1)
        torch.testing.assert_close(first[b], expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("is_alike", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_states_of_queries_are_sums_of_later_blocks(shape: dict[str, int], is_alike: bool) -> None:
    p = launches(**shape, is_alike=is_alike)
    s = p.sizes
    assert p.second_moments is not None
    first, second = normal(*p.first_shape), normal(*p.second_moments.shape)
    floor = normal(*p.floor_shape).abs() + 0.1
    big, small = unset(*p.big_shape), unset(*p.small_shape)
    after = unset(s.call.heads, p.states)
    table = torch.tensor(COEFFICIENTS, device=DEVICE)
    p.finish((second, first, table, floor, p.slots, big, small, after), COEFFICIENTS[0])

    a = (table[:1].expand(2, 3) if is_alike else table).T[..., None]
    blocks = p.first_shape[0]
    for state in range(p.states):
        later = range(state + 1, blocks) if p.is_causal else range(blocks)
        split_later = range(state + 1, p.second_moments.shape[0]) if p.is_causal else range(p.second_moments.shape[0])
        over = 1 / floor if p.is_causal else torch.ones_like(floor)
        weight = sum(
            (over[:, b] * p.groups * min(s.block, p.n - b * s.block) for b in later), torch.zeros(2).to(DEVICE)
        )
        weight = torch.where(weight > 0, weight, 1.0) if p.is_causal else torch.full_like(weight, p.n)
        if p.is_causal:
            torch.testing.assert_close(after[:, state], weight, **CLOSE)
        by_head = torch.zeros(2, p.first_shape[2]).to(DEVICE)
        for b in later:
            by_head += first[b].view(2, p.groups, -1).sum(1) * over[:, b : b + 1]
        by_head /= weight[:, None]
        mixed, square, z1, n0, z0 = by_head.split([s.call.d * s.call.e, s.call.d**2, s.call.d, s.call.e, 1], dim=1)
        torch.testing.assert_close(small[state], torch.cat([a[1] * z1, a[0] * z0, a[0] * n0], dim=1), **CLOSE)
        sums = torch.zeros(2, len(programs(s.call.d)) * 2, 256, s.call.e).to(DEVICE)
        for b in split_later:
            sums += second[b].view(2, p.groups, -1, 256, s.call.e).sum(1) * over[:, b, None, None, None]
        doubled = torch.tensor([1.0 if x == y else 2.0 for _, x, y in slots(s.call.d)]).to(DEVICE)
        kept = sums[:, [slot for slot, _, _ in slots(s.call.d)]] * doubled[:, None, None] / weight[:, None, None, None]
        found, linear, rest = big[state].split([kept[0].numel(), 2 * s.call.d * s.call.e, s.call.d**2], dim=1)
        torch.testing.assert_close(found, (kept * a[2][..., None, None]).flatten(1), **CLOSE)
        torch.testing.assert_close(linear.view(2, 2, -1).sum(1), a[1] * mixed, **CLOSE)
        torch.testing.assert_close(rest, a[2] * square, **CLOSE)


def dense(state: Tensor, d: int, e: int) -> Tensor:
    """Return 2 S_abc [heads, d, d, e] from the slots of a state [heads, big_size]."""
    found = unset(state.shape[0], d, d, e)
    for slot, (_, first, second) in enumerate(slots(d)):
        block = state[:, slot * 256 * e : (slot + 1) * 256 * e].view(-1, 16, 16, e)
        rows, columns = slice(first * 16, first * 16 + 16), slice(second * 16, second * 16 + 16)
        found[:, rows, columns] = block * (2 if first == second else 1)
        if first != second:
            found[:, columns, rows] = block.transpose(1, 2)
    return found


@pytest.mark.parametrize(
    "shape", [{"d": 16, "e": 16}, {"d": 64, "e": 32}, {"d": 32, "e": 64, "block": 128, "n": 300, "m": 300}]
)
def test_turned_states_hold_every_product_of_tiles(shape: dict[str, int]) -> None:
    p = launches(**shape)
    s, count = p.sizes, p.states
    states, turned = normal(count, s.call.heads, s.config.big_size), unset(*p.turned_shape)
    (part,) = p.keys
    assert part.turn is not None
    part.turn((states, p.pairs, turned))
    for state in range(count):
        full = dense(states[state], s.call.d, s.call.e)  # [heads, a, b, c]
        by_c = full.view(s.call.heads, s.call.d, s.call.d // 16, 16, s.call.e // 16, 16).permute(0, 4, 2, 5, 3, 1)
        assert torch.equal(turned[state], by_c.reshape(s.call.heads, -1))


ROWS = [
    {"n": 70, "m": 33, "d": 64, "e": 32, "groups": 2},
    {"n": 300, "m": 257, "d": 32, "e": 64, "groups": 2, "block": 128},
    {"n": 300, "m": 300, "d": 16, "e": 16, "block": 128, "turned_bytes": 1},
    {"n": 300, "m": 130, "d": 64, "e": 32, "block": 128, "degree": 1},
]


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("shape", ROWS)
def test_rows_read_the_state_of_their_block(shape: dict[str, int], is_plain: bool) -> None:
    p = launches(**shape, is_plain=is_plain)
    s = p.sizes
    count = p.read_states
    big, small = normal(count, s.call.heads, s.config.big_size), normal(count, s.call.heads, s.config.small_size)
    q, grad = 0.3 * normal(p.row_heads, p.n, s.call.d), normal(p.row_heads, p.n, s.call.e)
    level, z, exact = normal(p.row_heads, p.n), normal(p.row_heads, p.n).abs() + 0.5, normal(p.row_heads, p.n, s.call.d)
    factor = small if is_plain else normal(s.call.heads)
    dq, turned = unset(*q.shape), unset(*p.turned_shape)
    for part in p.queries:
        if part.turn is not None:
            part.turn((big[part.first_state :], p.pairs, turned))
        part.rows((q, grad, turned, big, small, level, exact, z, factor, p.turned_slots, dq), (part.first_state,))

    sizes = [s.config.big_size - 2 * s.call.d * s.call.e - s.call.d**2, 2 * s.call.d * s.call.e, s.call.d**2]
    for row_head in range(p.row_heads):
        head = row_head // p.groups
        for start in range(0, p.n, s.block or p.n):
            at = slice(start, start + (s.block or p.n))
            state = min(start // s.block, count - 1) if s.block else 0
            _, linear, square = big[state, head].split(sizes)
            x, y = q[row_head, at], grad[row_head, at]
            rest = 2 * x @ square.view(s.call.d, s.call.d) if s.degree > 1 else 0 * x
            rest = (rest + small[state, head, : s.call.d]) * level[row_head, at, None]
            total = rest + y @ linear.view(2, s.call.d, s.call.e).sum(0).T
            if s.degree > 1:
                total = total + torch.einsum("abc,ib,ic->ia", dense(big[state], s.call.d, s.call.e)[head], x, y)
            if s.block:
                total = total + exact[row_head, at]
            by_head = 1.0 if is_plain else factor[head]
            expected = by_head * total / z[row_head, at, None]
            torch.testing.assert_close(dq[row_head, at], expected, rtol=1e-4, atol=1e-4)
