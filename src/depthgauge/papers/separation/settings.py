"""Settings: the parameters of the data sets of Definitions 3.8, D.1 and F.1, and the width of the network.

A score map is the entrywise map k from scores to weights: exp (softmax), lin (linear attention), poly:g (Taylor
polynomial).

A panel of the paper's figures is a swept parameter, its values, and the fixed parameters. Panels have the letters of
the figure captions. The text of section 7.2 swaps (d) and (f) of Figures 4 and 5. The field `note` lists choices made
here because the paper gives no value or contradicts itself.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from flint import arb, fmpq

from depthgauge.base.errors import InputError, require_count, require_type, unknown_name


@dataclass(frozen=True)
class ScoreMap:
    """A kind of attention f = k(u) / Σ k(u), with k(u) = eᵘ (exp), k(u) = u (lin) or k(u) = Σ_{i≤g} uⁱ/i! (poly:g).

    As in the paper, lin is k(u) = u. It differs from poly:1, which is 1 + u.
    """

    family: Literal["exp", "lin", "poly"]
    degree: int = 0


EXP = ScoreMap("exp")
LIN = ScoreMap("lin")


def parse_attention(name: str) -> ScoreMap:
    """Return the attention kind with the given name.

    >>> parse_attention("poly:3")
    ScoreMap(family='poly', degree=3)
    """
    if name in ("exp", "lin"):
        return EXP if name == "exp" else LIN
    match = re.fullmatch(r"poly:(\d{1,4})", name)
    if match is None:
        raise unknown_name("attention", name, ["exp", "lin", "poly:G"])
    degree = int(match[1])
    if degree < 1:
        raise InputError(f"the degree of {name} must be at least 1; poly:0 gives all tokens the same weight")
    return ScoreMap("poly", degree)


def to_arb(number: Fraction | int) -> Any:
    """Convert a rational number to arb at the working precision."""
    return arb(fmpq(number.numerator, number.denominator))


def weights(kind: ScoreMap, n: int, scores: list[Fraction]) -> list[Any]:
    """Return k(q·log n) for each q in `scores` as arb, up to a common positive factor.

    For exp the factor is n^(−max q), which avoids overflow for large scores.
    """
    log_n = arb(n).log()
    if kind.family == "lin":
        return [to_arb(q) for q in scores]
    if kind.family == "exp":
        top = max(scores)
        return [(to_arb(q - top) * log_n).exp() for q in scores]
    return [_truncated_exp(to_arb(q) * log_n, kind.degree) for q in scores]


def _truncated_exp(u: Any, degree: int) -> Any:
    """Return Σ_{i≤g} uⁱ/i! by Horner's rule: 1 + u/1·(1 + u/2·(1 + …))."""
    total = arb(1)
    for i in range(degree, 0, -1):
        total = 1 + total * u / i
    return total


Dataset = Literal[0, 1]
DELTA = 0.01
"""The paper's failure probability δ. It only determines the width of the networks."""

_MEANINGS = {
    "a0": "the size of the special token in D₀",
    "a1": "the size of the special token in D₁",
    "b": "the size of the repeated identity block",
    "c": "the size of the last, constant column",
}


def decimal(value: float) -> Fraction:
    """Return the decimal number that a float was written as: 0.1 is one tenth, not the nearest binary fraction.

    >>> decimal(0.1)
    Fraction(1, 10)
    """
    return Fraction(repr(float(value)))


class _CheckedSetting:
    """The checks that the settings share."""

    kind: ClassVar[str]
    spare: ClassVar[int]
    """The number of columns besides the repeated identity."""
    n: int
    m: int
    attention: str

    def __post_init__(self) -> None:
        require_count("n", self.n, "the number of tokens", least=2)
        require_count("m", self.m, "the number of sign vectors y, which is the width of the network")
        parse_attention(self.attention)

    def _require_data_sets(self, d: int, columns: str, x: str) -> None:
        """Check the parameters of self-attention and cross-attention."""
        require_count("d", d, f"the width of a token: {columns}", least=self.spare + 1)
        if self.n % (d - self.spare):
            raise InputError(
                f"n must be a multiple of d − {self.spare} = {d - self.spare}, got n = {self.n}; "
                f"the data sets contain n/(d − {self.spare}) copies of an identity matrix of that size"
            )
        if x not in ("identity", "ones"):
            raise unknown_name("x", x, ["identity", "ones"])
        for name, meaning in _MEANINGS.items():
            value = getattr(self, name, 0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise InputError(f"{name} must be a finite number of at least 0, got {value!r}; it is {meaning}")


@dataclass(frozen=True)
class SelfAttention(_CheckedSetting):
    """Definition D.1: A₁ = A₂ = A₃ = √(log n) · [ a·e_{j₃} | b·I_{d−2} repeated t times | c·1 ], n = (d−2)·t.

    The threshold is τ = (c + 0.1)·√(log n).

    n is the number of tokens, d their width, m the number of sign vectors, which is the width of the network. a is `a0`
    in D₀ and `a1` in D₁. `x` is QKᵀ: `"identity"`, or `"ones"` for the matrix of ones. `attention` is the kind that is
    compared with linear attention.
    """

    n: int
    d: int
    m: int
    a0: float
    a1: float
    b: float
    c: float
    x: str = "identity"
    attention: str = "exp"
    kind, spare = "self", 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_data_sets(self.d, "one column for a, d − 2 for b, one for c", self.x)
        if self.b == 0 and self.c == 0:
            raise InputError("b and c must not both be 0; linear attention would divide by zero")

    @property
    def classes(self) -> int:
        """K, the number of classes. Tokens with the same row of the repeated identity form a class."""
        return self.d - 2

    @property
    def threshold(self) -> Fraction:
        """τ / √(log n) = c + 1/10."""
        return decimal(self.c) + Fraction(1, 10)


@dataclass(frozen=True)
class CrossAttention(_CheckedSetting):
    """Definition F.1: A₁ = log n · [ a·e_{j₂} | 1 ], A₂ = A₃ = [ e_{j₃} | I_{d−1} repeated t times ], n = (d−1)·t.

    The threshold is τ = 0.9. The attributes are those of `SelfAttention` without `b` and `c`; n is a multiple of d − 1.
    """

    n: int
    d: int
    m: int
    a0: float
    a1: float
    x: str = "identity"
    attention: str = "exp"
    kind, spare = "cross", 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_data_sets(self.d, "one column for a and d − 1 for the identity", self.x)

    @property
    def classes(self) -> int:
        """K, the number of classes. Tokens with the same row of the repeated identity form a class."""
        return self.d - 1

    @property
    def threshold(self) -> Fraction:
        """τ = 9/10."""
        return Fraction(9, 10)


@dataclass(frozen=True)
class Regression(_CheckedSetting):
    """Definition 3.8: (Ax)ᵢ is in [log n, 1.4·log n] for all i, except for one i of D₁, where it is 4·log n.

    Here (Ax)ᵢ is uniform in the interval, and sign vectors have length n. The threshold is τ = 1/4 (Lemma 5.2).
    """

    n: int
    m: int
    attention: str = "exp"
    kind = "regression"

    @property
    def threshold(self) -> Fraction:
        """τ = 1/4."""
        return Fraction(1, 4)


AttentionSetting = SelfAttention | CrossAttention
Setting = SelfAttention | CrossAttention | Regression


def strong(setting: Setting) -> ScoreMap:
    """Return the attention kind that is compared with linear attention."""
    return parse_attention(setting.attention)


def special(setting: AttentionSetting, dataset: Dataset) -> Fraction:
    """Return the parameter a of a data set: a₀ for D₀, a₁ for D₁."""
    return decimal(setting.a1 if dataset == 1 else setting.a0)


_DEFAULTS: dict[str, dict[str, Any]] = {
    "self": {"x": "identity", "n": 200, "d": 22, "m": None, "a0": 0.01, "a1": 1.2, "b": 0.2, "c": 0.8},
    "cross": {"x": "identity", "n": 200, "d": 11, "m": None, "a0": 0.01, "a1": 3.0},
    "regression": {"n": 1000, "m": None},
}
"""The paper's parameters of each kind. The default of m depends on n; see `_width`."""
_CLASSES: dict[str, Callable[..., Setting]] = {"self": SelfAttention, "cross": CrossAttention, "regression": Regression}


def _width(kind: str, n: int) -> int:
    """Return the paper's width m: ⌈log n⌉ (regression), max(⌈log(n/δ)⌉, 15) (self) or ⌈log(n/δ)⌉ (cross)."""
    if kind == "regression":
        return math.ceil(math.log(n))
    return max(math.ceil(math.log(n / DELTA)), 15 if kind == "self" else 0)


def build_setting(kind: str, *, attention: str = "exp", **given: Any) -> Setting:
    """Build a setting from user input. Omitted parameters and those that are None take the paper's values.

    `b="tied"` means b = 1 − c, as in Definition D.1. A parameter that `kind` does not use raises `InputError`.

    >>> build_setting("cross", d=21).m
    10
    """
    require_type("kind", kind, str, f"one of {', '.join(_DEFAULTS)}")
    require_type("attention", attention, str, "exp, or poly:G with a degree G")
    if kind not in _DEFAULTS:
        raise unknown_name("kind", kind, _DEFAULTS)
    chosen = {name: value for name, value in given.items() if value is not None}
    unused = [name for name in chosen if name not in _DEFAULTS[kind]]
    if unused:
        raise InputError(f"{unused[0]} is not used by kind {kind}; omit it (used: {', '.join(_DEFAULTS[kind])})")
    values = _DEFAULTS[kind] | chosen
    require_count("n", values["n"], "the number of tokens", least=2)
    if values["m"] is None:
        values["m"] = _width(kind, values["n"])
    if "b" in chosen:
        values["b"] = _block_size(values["b"], values["c"])
    return _CLASSES[kind](**values, attention=attention)


def _block_size(b: float | str, c: float) -> float:
    if b == "tied":
        if not (isinstance(c, int | float) and math.isfinite(c) and 0 <= c <= 1):
            raise InputError(f"c must be between 0 and 1 when b is tied, got {c!r}; tied means b = 1 − c")
        return float(1 - decimal(c))
    try:
        return float(b)
    except (TypeError, ValueError) as error:
        raise InputError(f"b must be a number or the word tied, got {b!r}; tied means b = 1 − c") from error


@dataclass(frozen=True)
class Panel:
    """One panel of a figure. `variable` is swept over `values`, and `models` networks are drawn per point.

    `curves` are functions from the swept value to a setting, by the name of the curve, which is "" if there is one
    curve. `note` states choices that the paper does not determine.
    """

    id: str
    title: str
    variable: str
    values: tuple[float, ...]
    models: int
    curves: dict[str, Callable[[Any], Setting]]
    note: str = ""

    def settings(self) -> Iterator[tuple[str, float, Setting]]:
        """Yield curve name, swept value and setting for each point."""
        for name, build in self.curves.items():
            for value in self.values:
                yield name, value, build(value)


@dataclass(frozen=True)
class Sheet:
    """A figure with its panels, arranged as in the paper."""

    id: str
    title: str
    panels: tuple[Panel, ...]
    columns: int


Sweep = tuple[str, tuple[float, ...], dict[str, int], str]
"""The swept parameter, its values, other parameters, and a note."""


def grid(first: str, last: str, step: str) -> tuple[float, ...]:
    """Return first, first + step, … up to last, computed in exact decimals.

    >>> grid("0.1", "0.2", "0.036")
    (0.1, 0.136, 0.172)
    """
    start, stop, stride = Fraction(first), Fraction(last), Fraction(step)
    points = (stop - start) // stride + 1
    values = (start + k * stride for k in range(points))
    return tuple(int(value) if value.denominator == 1 else float(value) for value in values)


def _sweep(variable: str, kind: str, **fixed: Any) -> dict[str, Callable[[Any], Setting]]:
    """Return the single curve of a panel that sweeps `variable`; the other parameters are `fixed` or the paper's."""
    return {"": lambda value: build_setting(kind, **fixed, **{variable: value})}


_NOTE_A0 = "The paper gives no a₀ for this sweep; a₀ = 0.01, as in its other panels."
_NOTE_C = f"{_NOTE_A0} The paper's b = 0.2 is kept, so b + c = 1 holds only at c = 0.8."
_NOTE_D = "The paper gives d = 12, but n = 200 is not a multiple of d − 1 = 11; d = 11, as in panels (a) to (c)."
_NOTE_ONES_D = "The values of d are those of the text; the axis in the paper ends near 35, before d = 66."


_TOKEN_COUNTS, _WIDTHS, _SIZES = grid("200", "1000", "10"), grid("1", "80", "1"), grid("0.1", "3", "0.036")


def _panels(figure: str, title: str, kind: str, sweeps: Sequence[Sweep], **fixed: Any) -> tuple[Panel, ...]:
    return tuple(
        Panel(f"{figure}{letter}", title, name, values, 100, _sweep(name, kind, **fixed, **own), note)
        for letter, (name, values, own, note) in zip("abcdef", sweeps, strict=False)
    )


def _self_panels(figure: str, title: str, x: str) -> tuple[Panel, ...]:
    """Return panels (a) to (f) of Figure 4 or 5. The figures differ only in X."""
    sweeps: list[Sweep] = [
        ("n", _TOKEN_COUNTS, {"d": 12}, ""),
        ("d", (4, 6, 10, 18, 34, 66), {"n": 256}, _NOTE_ONES_D if x == "ones" else ""),
        ("m", _WIDTHS, {}, ""),
        ("c", grid("0.5", "0.9", "0.005"), {}, _NOTE_C),
        ("a0", grid("0.01", "0.8", "0.01"), {}, ""),
        ("a1", _SIZES, {}, ""),
    ]
    return _panels(figure, title, "self", sweeps, x=x)


_CROSS_SWEEPS: tuple[Sweep, ...] = (
    ("n", _TOKEN_COUNTS, {}, ""),
    ("d", (2, 3, 5, 6, 9, 11, 21, 26, 41, 51), {}, ""),
    ("m", _WIDTHS, {}, ""),
    ("a1", _SIZES, {}, _NOTE_D),
    ("a0", grid("0.01", "0.9", "0.01"), {}, _NOTE_D),
)
_REGRESSION_PANELS = (
    Panel(
        "B3a", "Softmax regression", "n", grid("100", "2000", "10"), 1000, _sweep("n", "regression"),
        "The paper gives no distribution in the interval and no threshold; uniform, and τ = 1/4 as in Lemma 5.2.",
    ),
    Panel("B3b", "Softmax regression", "m", grid("1", "100", "1"), 1000, _sweep("m", "regression")),
)  # fmt: skip


def _degree_panel(letter: str, title: str, models: int, tokens: tuple[int, ...], kind: str, **fixed: str) -> Panel:
    """Return the panel of success against the degree, with one curve per number of tokens."""

    def curve(n: int) -> Callable[[Any], Setting]:
        return lambda degree: build_setting(kind, n=n, attention=f"poly:{degree}", **fixed)

    curves = {f"n = {n:,}": curve(n) for n in tokens}
    note = "Not in the paper: exp is replaced by its Taylor polynomial of degree g."
    return Panel(f"B-degree-{letter}", title, "g", grid("1", "16", "1"), models, curves, note)


_TOKENS = (200, 2_000, 20_000, 200_000)
_DEGREE_PANELS = (
    _degree_panel("a", "Self-attention, X = I", 1000, _TOKENS, "self"),
    _degree_panel("b", "Self-attention, X = 1", 1000, _TOKENS, "self", x="ones"),
    _degree_panel("c", "Cross-attention, X = I", 1000, _TOKENS, "cross"),
    _degree_panel("d", "Regression", 300, (100, 1_000, 10_000), "regression"),
)

SHEETS: dict[str, Sheet] = {
    sheet.id: sheet
    for sheet in (
        Sheet("B3", "Softmax regression", _REGRESSION_PANELS, 2),
        Sheet("B4", "Self-attention, X = I", _self_panels("B4", "Self-attention, X = I", "identity"), 3),
        Sheet("B5", "Self-attention, X = 1", _self_panels("B5", "Self-attention, X = 1", "ones"), 3),
        Sheet("B7", "Cross-attention, X = I", _panels("B7", "Cross-attention, X = I", "cross", _CROSS_SWEEPS), 3),
        Sheet("B-degree", "Which polynomial degree separates the data sets?", _DEGREE_PANELS, 2),
    )
}
PANELS: dict[str, Panel] = {panel.id: panel for sheet in SHEETS.values() for panel in sheet.panels}


def sheet(figure: str) -> Sheet:
    """Return the sheet with the given id. The id of a single panel gives a sheet with that panel."""
    if figure in SHEETS:
        return SHEETS[figure]
    if figure not in PANELS:
        raise unknown_name("figure", figure, [*SHEETS, *PANELS])
    panel = PANELS[figure]
    return Sheet(panel.id, panel.title, (panel,), 1)
