"""Random kinds of `attention` calls and adversarial tensors for them, each determined by a few integers.

A kind fixes everything but the numbers: dtype, shapes, masks, gradients, tolerance and scale. Several calls of a kind
differ in their numbers, in the memory layout, in the attack and in `force`. They therefore meet decisions that earlier
calls of the kind left behind: prepared routes, and exact calls without a decision.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTHS = (16, 32, 64, 128)
ODD_WIDTHS = (17, 24, 40, 100)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
GRID = 32
"""Polynomials are decided for B = 2^(i/GRID). Attacks at the edge choose B at these points and a hair beside them."""
FORCES = (None, None, "polynomial", "polynomial", "polynomial", "exact")


@dataclass(frozen=True)
class Limits:
    """What may be drawn: up to `largest` tokens, a few kinds with up to `long`, and attacks if `is_attacked`."""

    largest: int = 2100
    long: int = 0
    is_attacked: bool = True
    widths: tuple[int, ...] = WIDTHS
    odd_widths: tuple[int, ...] = ODD_WIDTHS
    dtypes: tuple[torch.dtype, ...] = DTYPES


@dataclass(frozen=True)
class Kind:
    """Everything but the numbers of a call. There are `heads` key heads and `groups` query heads for each."""

    dtype: torch.dtype
    batch: int
    heads: int
    groups: int
    n: int
    m: int
    d: int
    e: int
    causal: bool
    padded: bool
    gradients: bool
    tolerance: float
    scale: float | None

    @property
    def used_scale(self) -> float:
        """The factor of q·k."""
        return 1 / math.sqrt(self.d) if self.scale is None else self.scale


@dataclass(frozen=True)
class Drawn:
    """One call: its tensors, and what was done to them."""

    kind: Kind
    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None
    force: str | None
    attack: str
    layouts: tuple[str, str, str]
    return_bound: bool

    def __str__(self) -> str:
        return (
            f"{self.kind}, force={self.force!r}, attack={self.attack!r}, layouts={self.layouts}, "
            f"return_bound={self.return_bound}"
        )


def _tokens(draw: random.Random, largest: int) -> int:
    """Draw a number of tokens: 1, a multiple of 16, or any number, each up to `largest` on a logarithmic scale."""
    if draw.random() < 0.08:
        return 1
    size = round(math.exp(draw.uniform(math.log(2), math.log(largest))))
    return min(largest, max(16, size // 16 * 16)) if draw.random() < 0.4 else size


def draw_kind(seed: int, limits: Limits) -> Kind:
    """Draw a kind of call."""
    draw = random.Random(seed)
    dtype = draw.choices(limits.dtypes, [{torch.bfloat16: 4, torch.float64: 1}.get(t, 3) for t in limits.dtypes])[0]
    is_long = draw.random() < 0.06
    if limits.long and is_long:
        # So long that the polynomial is chosen without force. Routes exist for bfloat16 only.
        n = draw.randrange(limits.long // 2, limits.long)
        return Kind(
            dtype=torch.bfloat16, batch=1, heads=draw.choice((6, 8)), groups=1, n=n, m=n, d=64, e=64,
            causal=draw.random() < 0.3, padded=False, gradients=draw.random() < 0.2, tolerance=1e-2, scale=None,
        )  # fmt: skip
    d, e = draw.choice(limits.widths), draw.choice(limits.widths)
    if draw.random() < 0.15:  # the pairs that are hardest to compile
        d, e = draw.sample((min(limits.widths), max(limits.widths)), 2)
    if limits.odd_widths and draw.random() < 0.1:
        d, e = draw.choice((*limits.odd_widths, d)), draw.choice((*limits.odd_widths, e))
    # Other widths and float64 need the torch backend with up to 2¹⁷ features.
    largest = limits.largest if d in WIDTHS and e in WIDTHS and dtype != torch.float64 else min(300, limits.largest)
    n = _tokens(draw, largest)
    m = n if draw.random() < 0.5 else _tokens(draw, largest)
    return Kind(
        dtype=dtype, batch=draw.choice((1, 1, 2, 3)), heads=draw.choice((1, 2, 2, 3)), groups=draw.choice((1, 1, 2, 4)),
        n=n, m=m, d=d, e=e, causal=draw.random() < 0.5, padded=m > 1 and draw.random() < 0.2,
        gradients=draw.random() < 0.35, tolerance=draw.choice((1e-1, 1e-2, 1e-3, 1e-3, 1e-4)),
        scale=draw.choice((None, None, 1.0, -0.7)),
    )  # fmt: skip


Attack = Callable[[random.Random, Kind, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _longest(x: Tensor) -> float:
    return float(x.norm(dim=-1).max())


def _spread(x: Tensor) -> float:
    return max(1e-30, float(x.square().mean().sqrt()))


def with_bound(kind: Kind, q: Tensor, k: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Scale q and k so that |scale| max‖q‖ max‖k‖ is `bound` before rounding to the dtype."""
    product = abs(kind.used_scale) * _longest(q) * _longest(k)
    root = math.sqrt(bound / product) if product > 0 else 1.0
    return root * q, root * k


def _edge(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put B at a point of the grid, or slightly above or below it."""
    bound = 2.0 ** (draw.randrange(-8 * GRID, GRID, 4) / GRID) * (1 + draw.choice((-1e-6, 0.0, 1e-6)))
    return *with_bound(kind, q, k, bound), v


def _aligned(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fill [−B, B] with scores of one direction, and let the values depend on them: the worst case for a polynomial."""
    direction = torch.sign(k[..., :1, :]) + (k[..., :1, :] == 0)
    rows, keys = q[..., :1].sign(), (k[..., :1] / max(1e-30, float(k[..., :1].abs().max()))).clamp(-1, 1)
    q = rows * direction.repeat_interleave(kind.groups, dim=1)
    k = keys * direction
    v = torch.cat([keys.sign(), keys, v], dim=-1)[..., : kind.e]
    return *with_bound(kind, q, k, 2.0 ** draw.uniform(-8, 0.5)), v


def _outlier_rows(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q[..., draw.randrange(kind.n) :: draw.choice((1, 10, 50)), :] *= draw.choice((3.0, 30.0))
    return q, k, v


def _outlier_key(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k[..., draw.randrange(kind.m), :] *= 30
    return q, k, v


def _one_sided(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k.abs(), v.abs()


def _huge_means(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shift = 30.0 if kind.dtype == torch.float16 else 1e3
    which = draw.choice(("q", "k", "v", "qk", "qkv"))
    return q + shift * ("q" in which), k - shift * ("k" in which), v + shift * ("v" in which)


def _tiny_range(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, 100 + 1e-3 * v


def _value_size(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (1e-4, 300.0) if kind.dtype == torch.float16 else (1e-30, 1e-5, 400.0, 1e8)
    return q, k, v * draw.choice(sizes)


def _lopsided(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    power = 2.0 ** (draw.choice((-4, 4)) if kind.dtype == torch.float16 else draw.choice((-40, -12, 12, 40)))
    return q * power, k / power, v


def _zero(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    which = draw.choice(("q", "k", "v", "qkv"))
    return q * ("q" not in which), k * ("k" not in which), v * ("v" not in which)


def _duplicates(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q[..., :1, :].expand_as(q).clone(), k[..., :1, :].expand_as(k).clone(), v


def _trained(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with a standard deviation of 2 and a first key that stands out."""
    q = q * (2 / (abs(kind.used_scale) * math.sqrt(kind.d)) / _spread(q))
    k = k / _spread(k)
    k[..., 0, :] *= 4
    return q, k, v


def _poisoned(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put a NaN or an infinity into one row of one head."""
    x = draw.choice((q, k, v))
    at = tuple(draw.randrange(size) for size in x.shape)
    x[at] = draw.choice((math.nan, math.inf, -math.inf))
    return q, k, v


def _none(draw: random.Random, kind: Kind, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v


ATTACKS: dict[str, Attack] = {
    "none": _none, "edge": _edge, "aligned": _aligned, "outlier rows": _outlier_rows, "outlier key": _outlier_key,
    "one-sided": _one_sided, "huge means": _huge_means, "tiny range": _tiny_range, "value size": _value_size,
    "lopsided": _lopsided, "zero": _zero, "duplicates": _duplicates, "trained": _trained, "poisoned": _poisoned,
}  # fmt: skip
EXTREME = ("huge means", "value size", "lopsided", "poisoned")
"""Attacks under which gradients are computed but not compared: their rounding has no bound."""
LAYOUTS = ("plain", "plain", "transposed", "sliced", "surrounded", "shifted", "reversed strides")


def arranged(layout: str, x: Tensor) -> Tensor:
    """Return a tensor with the numbers of x [b, h, n, d] in another memory layout.

    Memory beside the tensor is NaN where the layout leaves any: a kernel that reads it spoils its result.
    """
    b, h, n, d = x.shape
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "reversed strides":
        return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    if layout == "sliced":
        whole = x.new_full((b, h + 1, n + 3, d + 16), math.nan)
        whole[:, 1:, 2 : n + 2, 8 : d + 8] = x
        return whole[:, 1:, 2 : n + 2, 8 : d + 8]
    if layout in ("surrounded", "shifted"):  # contiguous, aligned to 16 bytes or not
        before = 64 if layout == "surrounded" else 1
        memory = x.new_full((before + x.numel() + 64,), math.nan)
        memory[before : before + x.numel()] = x.flatten()
        return memory[before : before + x.numel()].view(b, h, n, d)
    return x.contiguous()


def draw_call(kind: Kind, seed: int, limits: Limits, device: torch.device) -> Drawn:
    """Draw the numbers of a call. Score sizes differ by up to 30 % from call to call, and sometimes by far more."""
    draw = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float64)

    b, h, n, m = kind.batch, kind.heads, kind.n, kind.m
    q, k, v = normal(b, h * kind.groups, n, kind.d), normal(b, h, m, kind.d), normal(b, h, m, kind.e)
    usual = {1e-1: 0.5, 1e-2: 0.2, 1e-3: 0.08}.get(kind.tolerance, 0.03) * (0.2 if kind.gradients else 1.0)
    size = usual * draw.uniform(0.7, 1.3) * (draw.choice((1e-3, 0.1, 3.0)) if draw.random() < 0.2 else 1.0)
    q, k = with_bound(kind, q, k, size)
    attack = draw.choice(list(ATTACKS)) if limits.is_attacked and draw.random() < 0.75 else "none"
    q, k, v = ATTACKS[attack](draw, kind, q, k, v)
    padding = None
    if kind.padded:
        padding = torch.rand(b, m, generator=generator, device=device) < 0.4
        padding[:, 0] = False
    force = draw.choice(FORCES)
    layouts = tuple(draw.choice(LAYOUTS) for _ in range(3))
    if force != "polynomial" or attack in EXTREME:  # torch's own kernels need tensors that are aligned to 16 bytes
        layouts = tuple("surrounded" if layout == "shifted" else layout for layout in layouts)
    q, k, v = (arranged(layout, x.to(kind.dtype)) for layout, x in zip(layouts, (q, k, v), strict=True))
    return_bound = not kind.gradients and draw.random() < 0.15
    return Drawn(kind, q, k, v, padding, force, attack, layouts, return_bound)  # type: ignore[arg-type]
