"""The panels of the paper's figures: the swept parameter, its values, and the fixed parameters.

Panels have the letters of the figure captions. The text of section 7.2 swaps (d) and (f) of Figures 4 and 5. The field
`note` lists choices made here because the paper gives no value or contradicts itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from depthgauge.base.errors import unknown_name
from depthgauge.papers.separation.settings import Setting, build_setting


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
