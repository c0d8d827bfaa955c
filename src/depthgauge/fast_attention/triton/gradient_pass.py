"""The backward pass as launches in order: sums over queries, states that keys read, and the rows ∂q, ∂v and ∂k."""

from collections.abc import Iterator

import torch

from depthgauge.fast_attention.triton.forward_pass import Table, kept_rooms, second_moment_steps, state_count
from depthgauge.fast_attention.triton.gradient_launches import GradientLaunches, GradientSizes, RowLaunches
from depthgauge.fast_attention.triton.passes import Argument, LaunchPass, LaunchStep, Room


class GradientPass(LaunchPass):
    """One kind of backward pass.

    The forward pass kept Z′ and the states `key_big` and `key_small`. Given are q̃, k̃, v, ∂out and out. Then follow,
    where they exist: w, if keys have weights; the middle of the values, if these are centred before the sums; the
    factors of ∂q, ∂k and ∂v [N], if q̃ and k̃ are not those of the caller; the coefficients [N, 3], if heads have
    different ones. The results come last: ∂q, ∂k and ∂v, and w ∂w [N, m] and ṽ, if the weights depend on the keys.
    Numbers: `coefficients`, and `exponents`, the scale in base 2 and the scale.

    Its own tensors are ṽ (`values`) if it is not given, level and dN, the sums over queries (`first`, `second`), the
    states that keys read (`big`, `small`), turned states and, if causal, the smallest Z′ of every block (`floor`), the
    weight of all rows after it (`after`) and the exact blocks.
    """

    def __init__(self, s: GradientSizes, table: Table) -> None:
        p = self.launches = GradientLaunches(s, table)
        given = ["q", "k", "v", "grad", "out"] + ["w"] * s.has_w + ["middle"] * s.is_shifted
        given += ["query_factor", "key_factor", "value_factor"] * (not s.is_plain) + ["coefficients"] * (not s.is_alike)
        given += ["dq", "dk", "dv"] + ["dw", "values"] * s.is_weighted
        tables = {
            "programs": p.programs, "second_programs": p.second_programs, "slots": p.slots, "pairs": p.pairs,
            "turned_slots": p.turned_slots,
        }  # fmt: skip
        steps = (*_sums(p), *_query_rows(p), *_key_rows(p))
        states = state_count(s.m, s.block)
        z, big, small = kept_rooms(s.heads, s.groups, s.n, s.d, s.e, s.dtype, s.degree, states)
        kept = {"z": z, "key_big": big, "key_small": small}
        super().__init__((steps,), given, tables, _rooms(p), s.device, kept)


def _rooms(p: GradientLaunches) -> dict[str, Room]:
    """Return the own tensors of the pass."""
    s, wide = p.sizes, torch.float32
    rooms = {
        "level": Room((p.row_heads, p.n), wide), "dn": Room((p.row_heads, p.n, s.e), s.dtype),
        "first": Room(p.first_shape, wide), "big": Room((p.states, s.heads, p.big_size), s.dtype),
        "small": Room((p.states, s.heads, p.query_small_size), wide),
    }  # fmt: skip
    if not s.is_weighted:
        rooms["values"] = Room((s.heads, s.m, s.e), s.dtype)
    if p.is_second:
        rooms |= {"queries": Room(p.transposed_shape, s.dtype), "second": p.second_room}
        rooms["turned"] = Room(p.turned_shape, s.dtype)
    if p.is_causal:
        rooms |= {"floor": Room(p.floor_shape, wide), "after": Room((s.heads, p.states), wide)}
        rooms["exact_queries"] = Room((p.row_heads, p.n, s.d), wide)
        rooms |= {"exact_keys": Room((s.heads, s.m, s.d), wide), "exact_values": Room((s.heads, s.m, s.e), wide)}
    return rooms


def _sums(p: GradientLaunches) -> Iterator[LaunchStep]:
    """Return the steps that compute ṽ, level, the sums over queries and the states that keys read."""
    s = p.sizes
    shift, floor, after = "middle" if s.is_shifted else "key_small", "first", "first"
    if p.is_causal:
        floor, after = "floor", "after"
    queries, second = ("queries", "second") if p.is_second else ("first", "first")
    yield LaunchStep(p.prepare, ("q", "v", shift, queries, "values"))
    yield LaunchStep(p.moments, ("q", "grad", "out", "z", shift, floor, "dn", "level", "first"))
    if p.is_second:
        yield from second_moment_steps(p.second_sizes, "queries", "queries", "dn")
    coefficients = "key_small" if s.is_alike else "coefficients"
    yield LaunchStep(p.finish, (second, "first", coefficients, floor, "slots", "big", "small", after), "coefficients")
    if p.turn_both is not None:
        yield LaunchStep(p.turn_both, ("key_big", "big", "pairs", "turned"))


def _turned(p: GradientLaunches, part: RowLaunches, big: str) -> Iterator[LaunchStep]:
    """Return the step that turns the states of `big` which a part of the rows reads, if they are not turned yet."""
    if part.turn is not None:
        from_there: Argument = (big, part.first_state * p.sizes.heads * p.big_size) if part.first_state else big
        yield LaunchStep(part.turn, (from_there, big, "pairs", "turned"))


def _query_rows(p: GradientLaunches) -> Iterator[LaunchStep]:
    """Return the steps that compute ∂q, from the states of keys and the exact blocks."""
    s, exact = p.sizes, "z"
    if p.is_causal:
        exact, w = "exact_queries", "w" if s.has_w else "z"
        yield LaunchStep(p.exact_queries, ("q", "grad", "level", "k", "values", w, "key_small", exact), "exponents")
    turned, factor = "turned" if p.is_second else "key_big", "key_small" if s.is_plain else "query_factor"
    for part in p.queries:
        yield from _turned(p, part, "key_big")
        states = turned, "key_big", "key_small"
        yield LaunchStep(
            part.rows, ("q", "grad", *states, "level", exact, "z", factor, "z", "turned_slots", "dq", "z"), (1.0,)
        )


def _key_rows(p: GradientLaunches) -> Iterator[LaunchStep]:
    """Return the steps that compute ∂v, ∂k and, if the weights depend on the keys, w ∂w, from the states of queries."""
    s, after, exact_k, exact_v = p.sizes, "z", "z", "z"
    w, dw = "w" if s.has_w else "z", "dw" if s.is_weighted else "z"
    if p.is_causal:
        after, exact_k, exact_v = "after", "exact_keys", "exact_values"
        tensors = ("q", "grad", "level", "z", "k", "values", "floor", after, exact_k, exact_v, dw)
        yield LaunchStep(p.exact_keys, tensors, "exponents")
    weight = (1.0 if p.is_causal else float(p.n),)  # sums over queries are divided by after, or by the number of rows
    key, value = ("key_small", "key_small") if s.is_plain else ("key_factor", "value_factor")
    yield LaunchStep(
        p.values, ("k", "k", "big", "big", "small", "z", exact_v, w, value, after, "slots", "dv", dw), weight
    )
    turned = "turned" if p.is_second else "big"
    for part in p.keys:
        yield from _turned(p, part, "big")
        states = turned, "big", "small"
        yield LaunchStep(
            part.rows, ("k", "values", *states, "z", exact_k, w, key, after, "turned_slots", "dk", "z"), weight
        )
