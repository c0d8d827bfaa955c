"""The launches of the forward pass: everything that depends on sizes alone, prepared once."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from depthgauge.fast_attention.triton.kernels import programs, second_programs, slots
from depthgauge.fast_attention.triton.launches import (
    FinishSizes,
    FirstMomentSizes,
    RowSizes,
    SecondMomentSizes,
    SurveySizes,
    TransposeSizes,
    survey_blocks,
)
from depthgauge.fast_attention.triton.passes import LaunchPass, LaunchStep, Room
from depthgauge.fast_attention.triton.tuning import padded_length, split_length

Table = Callable[..., Tensor]
"""Returns the integers rows(*sizes) on a device: table(rows, device, *sizes)."""


class ForwardSizes(NamedTuple):
    """Everything that fixes the launches of a forward pass.

    N key heads (`heads`) with G query heads each (`groups`), n rows, m keys of width d with values of width e. `block`
    is the size of causal blocks, or 0. `is_shifted`: values are centred before the sums. `has_w`: keys have weights.
    `is_alike`: all heads have the same polynomial. `is_kept`: Z and the state are kept for a backward pass.
    `is_surveyed`: the pass starts with a survey.
    """

    heads: int
    groups: int
    n: int
    m: int
    d: int
    e: int
    dtype: torch.dtype
    degree: int
    block: int
    is_shifted: bool
    has_w: bool
    is_alike: bool
    is_kept: bool
    is_surveyed: bool
    device: torch.device


def second_moment_steps(sizes: SecondMomentSizes, x: str, y: str, v: str) -> list[LaunchStep]:
    """Return the steps that compute `second`, Σ (y ⊗ x) v of every split, by programs [splits, heads, …, 512, e].

    Narrow programs compute one pair of tiles each, so a second launch computes the other half.
    """
    launch = sizes.launch()
    steps = [LaunchStep(launch, (x, y, v, "programs", "second"))]
    if sizes.is_narrow:
        steps.append(LaunchStep(launch, (x, y, v, "second_programs", ("second", 256 * sizes.e))))
    return steps


def second_moment_room(splits: int, sizes: SecondMomentSizes, is_causal: bool) -> Room:
    """Return the room of `second`.

    There are many causal sums. For bfloat16 they are stored in bfloat16, which halves their memory and costs one
    rounding. They would overflow float16.
    """
    dtype = torch.bfloat16 if is_causal and sizes.dtype == torch.bfloat16 else torch.float32
    return Room((splits, sizes.heads, len(programs(sizes.d)), 512, sizes.e), dtype)


def kept_rooms(
    heads: int, groups: int, n: int, d: int, e: int, dtype: torch.dtype, degree: int, states: int
) -> tuple[Room, Room, Room]:
    """Return the rooms of Z, big and small, which a backward pass reads: see `ForwardPass`."""
    parts = len(slots(d)) if degree > 1 else 0
    big = states, heads, parts * 256 * e + 2 * d * e + d * d
    small = states, heads, d + 2 * e + 2
    return Room((heads, groups, n), torch.float32), Room(big, dtype), Room(small, torch.float32)


def state_count(m: int, block: int) -> int:
    """Return the number of states of m keys: one before every causal block and one after the last; or one in all."""
    return math.ceil(padded_length(m) / block) + 1 if block else 1


class ForwardPass(LaunchPass):
    """One kind of forward pass, in three parts: KEYS, SUMS and ROWS.

    KEYS transposes the keys to x [N, d, padded], and with a survey writes its numbers to `readback`. SUMS computes the
    sums of every split: `first` with Σ y vᵀ, Σ y xᵀ, Σ y, Σ w v and Σ w, and `second` with Σ (y ⊗ x) v, where y is w x.
    ROWS computes the state that rows read, and the rows.

    The state is kept in two tensors to save allocations. big [states, N, …] in the dtype of the tensors: S [slots, 256,
    e], L as a sum of two matrices [2, d, e], C [d, d]. small [states, N, …] in float32: z1 [d], z0, n0 [e], the mean of
    the values [e], 1 / total weight.

    Given are q, k and v, then `weighted` (w k) and w if keys have weights, `readback` with a survey, the coefficients
    [N, 3] if heads have different ones, and the output. Z, big and small may be kept. Numbers of ROWS: `coefficients`
    and `exponent`, the scale in base 2.
    """

    KEYS, SUMS, ROWS = range(3)

    def __init__(self, s: ForwardSizes, table: Table) -> None:
        is_second, is_causal = s.degree > 1, s.block > 0
        padded, blocks = padded_length(s.m), survey_blocks(s.groups * s.n, s.m)
        per_split = s.block or split_length(s.m, s.heads, len(programs(s.d)), s.device)
        splits = math.ceil(padded / per_split)
        states, parts = state_count(s.m, s.block), len(slots(s.d)) if is_second else 0
        z, big, small = kept_rooms(s.heads, s.groups, s.n, s.d, s.e, s.dtype, s.degree, states)

        sizes = s.heads, s.m, padded, per_split, s.d, s.e, s.dtype
        y, w = ("y", "w") if s.has_w else ("x", "v")
        transpose = TransposeSizes(s.heads, s.m, s.d, padded, blocks if s.is_surveyed else 0, True, s.device).launch()
        if s.is_surveyed:
            survey = SurveySizes(s.heads, s.groups * s.n, s.m, s.d, s.e, s.device).launch()
            keys = [
                LaunchStep(survey, ("q", "k", "v", "centres", "found")),
                LaunchStep(transpose, ("k", "found", "x", "readback")),
            ]
        else:
            keys = [LaunchStep(transpose, ("k", "k", "x", "k"))]
            if s.has_w:
                keys.append(LaunchStep(transpose, ("weighted", "weighted", "y", "weighted")))
        sums = [LaunchStep(FirstMomentSizes(*sizes, s.has_w).launch(), ("x", y, "v", w, "first"))]
        second_sizes = SecondMomentSizes(*sizes)
        if is_second:
            sums += second_moment_steps(second_sizes, "x", y, "v")
        finish = FinishSizes(s.heads, splits, s.d, s.e, is_second, is_causal, not s.is_shifted, s.is_alike).launch()
        evaluate = RowSizes(
            row_heads=s.heads * s.groups, n=s.n, heads=s.heads, states=states,
            per_state=per_split if is_causal else 1, m=s.m if is_causal else 0, padded=padded if is_causal else 0,
            parts=parts, d=s.d, e=s.e, dtype=s.dtype, is_causal=is_causal, has_w=s.has_w and is_causal,
            needs_z=s.is_kept,
        ).launch()  # fmt: skip
        second, coefficients = "second" if is_second else "first", "small" if s.is_alike else "coefficients"
        rows = [
            LaunchStep(finish, (second, "first", coefficients, "slots", "big", "small"), "coefficients"),
            LaunchStep(
                evaluate, ("q", "big", "small", "x", "v", w, "slots", "out", "z" if s.is_kept else "out"), "exponent"
            ),
        ]  # fmt: skip

        given = ["q", "k", "v", *["weighted", "w"] * s.has_w, *["readback"] * s.is_surveyed]
        given += [*["coefficients"] * (not s.is_alike), "out"]
        rooms = {"x": Room((s.heads, s.d, padded), s.dtype)}
        rooms["first"] = Room((splits, s.heads, s.d * s.e + s.d * s.d + s.d + s.e + 1), torch.float32)
        if s.has_w:
            rooms["y"] = rooms["x"]
        if is_second:
            rooms["second"] = second_moment_room(splits, second_sizes, is_causal)
        if s.is_surveyed:
            rooms["centres"] = Room((2, s.heads, s.d), torch.float32)
            rooms["found"] = Room((s.heads, blocks, 6), torch.float32)
        kept = {"z": z, "big": big, "small": small} if s.is_kept else {}
        if not s.is_kept:
            rooms |= {"big": big, "small": small}
        tables = {
            "programs": table(programs, s.device, s.d), "second_programs": table(second_programs, s.device, s.d),
            "slots": table(slots, s.device, s.d),
        }  # fmt: skip
        super().__init__((keys, sums, rows), given, tables, rooms, s.device, kept)
