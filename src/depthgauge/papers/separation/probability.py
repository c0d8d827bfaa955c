"""Compare softmax attention with linear attention at one setting: exact probabilities and a Monte Carlo estimate."""

import itertools
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from flint import arb, ctx
from jaxtyping import Bool, Int

from depthgauge.base.errors import InputError, require_count
from depthgauge.base.format import counted
from depthgauge.base.frames import frame, html_table
from depthgauge.base.progress import Step, silent
from depthgauge.papers.separation import decisions
from depthgauge.papers.separation.decisions import Table, draw_attention, draw_regression, tables
from depthgauge.papers.separation.settings import AttentionSetting, Regression, Setting, build_setting

# --- The probability of success in closed form, for self-attention and cross-attention -------------------------------
# Let κ₁ and κ₀ be the classes of j₃ in the two data sets. They coincide with probability 1/K. The sign vectors are
# independent, so conditionally on κ₁ = κ₀ or κ₁ ≠ κ₀, P(success) = gᵐ − hᵐ with
#
#     g = P(one y gives F_lin(D₁) = F(D₀) = F_lin(D₀) = 0),
#     h = P(one y gives F_lin(D₁) = F(D₀) = F_lin(D₀) = F(D₁) = 0).
#
# Both are sums over y₁, y_d, y_κ1, y_κ0 and the number p ~ Bin(r, ½) of + among the r remaining classes.

_PRECISION = 128
_ENOUGH_BITS = 60

Counts = Int[np.ndarray, " p"]
PowerTerm = tuple[Counts, Counts, int, int, Fraction]


@dataclass(frozen=True)
class ExactProbabilities:
    """The probabilities of success and of its conditions F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0, F_lin(D₀) = 0."""

    success: float
    parts: tuple[float, float, float, float]


def exact(setting: AttentionSetting) -> ExactProbabilities:
    """Compute the probabilities of success and of its four conditions."""
    strong_1, lin_1, strong_0, lin_0 = tables(setting)
    classes, m = setting.classes, setting.m
    violated = lin_1 | strong_0 | lin_0
    three_zeros, four_zeros = _count(~violated), _count(~violated & ~strong_1)
    cases: list[PowerTerm] = [(three_zeros, four_zeros, 3, m, Fraction(1, classes))]
    if classes > 1:
        cases.append((*_different_classes(setting), 4, m, Fraction(classes - 1, classes)))
    every, nothing, one = np.full(classes, 8), np.zeros(classes, dtype=np.int64), Fraction(1)
    positive = _value((every, _count(~strong_1), 3, m, one))
    q, r, s = (_value((_count(~table), nothing, 3, m, one)) for table in (lin_1, strong_0, lin_0))
    return ExactProbabilities(_value(*cases), (positive, q, r, s))


def _different_classes(setting: AttentionSetting) -> tuple[Counts, Counts]:
    """Return the counts for κ₁ ≠ κ₀. Each data set has the class κ of the other among its other classes."""
    strong_1, lin_1, strong_0, lin_0 = tables(setting)
    remaining = setting.classes - 2
    three_zeros, four_zeros = np.zeros((2, remaining + 1), dtype=np.int64)
    p = np.arange(remaining + 1)
    for own_1, own_0 in itertools.product((0, 1), repeat=2):
        plus_1, plus_0 = p + own_0, p + own_1
        violated = lin_1[:, :, own_1, plus_1] | (strong_0 | lin_0)[:, :, own_0, plus_0]
        three_zeros += (~violated).sum(axis=(0, 1))
        four_zeros += (~violated & ~strong_1[:, :, own_1, plus_1]).sum(axis=(0, 1))
    return three_zeros, four_zeros


def _count(table: Table) -> Counts:
    """Return, for each p, the number of sign patterns (y₁, y_d, y_κ) for which the table is True."""
    return np.asarray(table.sum(axis=(0, 1, 2)))


def _value(*cases: PowerTerm) -> float:
    """Return Σ share·(gᵐ − hᵐ) as a float, computed with at least 60 correct bits.

    A term has the counts for g and for h, the number of signs that they count, the exponent m and the share.
    """
    nonzero = [case for case in cases if not np.array_equal(case[0], case[1])]
    precision = _PRECISION
    while nonzero:
        with ctx.workprec(precision):
            total = sum((_powers(precision, *case) for case in nonzero), arb(0))
            if total.rel_accuracy_bits() >= _ENOUGH_BITS:
                return float(total.mid())
        precision *= 2
    return 0.0


def _powers(precision: int, three_zeros: Counts, four_zeros: Counts, signs: int, m: int, share: Fraction) -> Any:
    """Return share·(gᵐ − hᵐ) as arb, where g and h are given by counts of sign patterns for each p."""
    probabilities = _binomial(len(three_zeros) - 1, precision)
    g, h = (
        sum((int(k) * p for k, p in zip(counts, probabilities, strict=True) if k), arb(0)) / 2**signs
        for counts in (three_zeros, four_zeros)
    )
    return (g**m - h**m) * share.numerator / share.denominator


@lru_cache(maxsize=16)
def _binomial(r: int, precision: int) -> tuple[Any, ...]:
    """Return C(r, p)/2^r for p = 0, …, r as arb. `precision` is the working precision, as a key for the cache."""
    probability = arb(1) / arb(2) ** r
    probabilities = [probability]
    for p in range(r):
        probability = probability * (r - p) / (p + 1)
        probabilities.append(probability)
    return tuple(probabilities)


# --- Monte Carlo estimates: how often success occurs among randomly drawn models -------------------------------------

_ENTRIES_AT_ONCE = 2**20


@dataclass(frozen=True)
class Estimate:
    """Counts over randomly drawn models: those for which all four conditions hold, and those for which each holds.

    The conditions are F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0 and F_lin(D₀) = 0, in this order.
    """

    models: int
    successes: int
    conditions: tuple[int, int, int, int]

    def __post_init__(self) -> None:
        if self.models < 1 or not all(0 <= count <= self.models for count in (self.successes, *self.conditions)):
            counts = (self.successes, *self.conditions)
            raise InputError(f"counts must be between 0 and the number of models, got {counts} of {self.models}")

    @property
    def ratio(self) -> float:
        """The fraction of models that succeed."""
        return self.successes / self.models

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson score interval of `ratio`."""
        return wilson(self.successes, self.models)

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """The fractions of models with F(D₁) > 0, F_lin(D₁) = 0, F(D₀) = 0 and F_lin(D₀) = 0."""
        p, q, r, s = (count / self.models for count in self.conditions)
        return p, q, r, s


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a binomial proportion."""
    from scipy.stats import binomtest  # imported here because importing scipy.stats takes about a second

    interval = binomtest(successes, trials).proportion_ci(confidence_level=0.95, method="wilson")
    return float(interval.low), float(interval.high)


def estimate(setting: Setting, models: int, seed: int = 0, first: int = 0, step: Step = silent) -> Estimate:
    """Draw the models first, …, first + models − 1 of `setting` and count the successes."""
    require_count("models", models, "the number of networks to draw")
    require_count("first", first, "the index of the first network", least=0)
    at_once = _batch(setting)
    successes, counts = 0, np.zeros(4, dtype=np.int64)
    for start in range(0, models, at_once):
        size = min(at_once, models - start)
        met = conditions(setting, seed, first + start, size)
        successes, counts = successes + int(met.all(axis=1).sum()), counts + met.sum(axis=0)
        step(start + size, models, "models")
    p, q, r, s = counts.tolist()
    return Estimate(models, successes, (p, q, r, s))


def conditions(setting: Setting, seed: int, first: int, models: int) -> Bool[np.ndarray, "models 4"]:
    """Return the four conditions for each of the models first, …, first + models − 1."""
    if isinstance(setting, Regression):
        return decisions.regression_conditions(setting, draw_regression(setting, seed, first, models))
    return decisions.conditions(setting, draw_attention(setting, seed, first, models))


def _batch(setting: Setting) -> int:
    """Return the number of models per batch, from a fixed memory budget. It does not affect the results."""
    per_model = (setting.m + 8) * setting.n if isinstance(setting, Regression) else setting.m * (setting.d // 8 + 16)
    return max(1, _ENTRIES_AT_ONCE // per_model)


@dataclass(frozen=True, repr=False)
class Separation:
    """The probability of success at one setting. `separate` returns it.

    Attributes:
        setting: The data sets and the network.
        exact: The exact probabilities, or None for regression, which has no closed form.
        estimate: The counts among the drawn networks.
        seed: The seed of the drawn networks.
    """

    setting: Setting
    exact: ExactProbabilities | None
    estimate: Estimate
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return the document that `depthgauge separate --json` prints."""
        return {
            "exact": None if self.exact is None else self.exact.success,
            "exact_parts": None if self.exact is None else list(self.exact.parts),
            "ratio": self.estimate.ratio,
            "interval": list(self.estimate.interval),
            "parts": list(self.estimate.parts),
            "models": self.estimate.models,
        }

    def to_frame(self) -> Any:
        """Return a `pandas.DataFrame` with five rows: success and its four conditions.

        The columns are `event`, `exact` (the exact probability, NaN for regression), `ratio` (the fraction among the
        drawn networks) and `low`, `high` (its 95 % Wilson interval).

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return frame([row | {"exact": float("nan")} if row["exact"] is None else row for row in self._rows()])

    def summary(self) -> str:
        """Return a table for the terminal: success and its four conditions, exact and sampled."""
        rows = self._rows()
        width = max(len(row["event"]) for row in rows)
        lines = [
            f"{self.setting.kind}: {self._parameters()}",
            f"{'':{width}}  exact     sampled ({counted(self.estimate.models, 'network')})",
        ]
        for row in rows:
            probability = "–".ljust(8) if row["exact"] is None else f"{row['exact']:.6f}"
            lines.append(f"{row['event']:{width}}  {probability}  {row['ratio']:.6f}")
        low, high = self.estimate.interval
        lines[2] += f"  95 % interval {low:.6f} … {high:.6f}"
        return "\n".join(lines)

    def __repr__(self) -> str:
        low, high = self.estimate.interval
        closed = "" if self.exact is None else f"exact probability {self.exact.success:.6f}, "
        return (
            f"Separation({self.setting.kind}: {self._parameters()};\n    success: {closed}"
            f"{self.estimate.ratio:.6f} of {counted(self.estimate.models, 'model')} [{low:.6f}, {high:.6f}])"
        )

    def _repr_html_(self) -> str:
        return html_table(f"{self.setting.kind}: {self._parameters()}", self._rows())

    def _parameters(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in asdict(self.setting).items())

    def _rows(self) -> list[dict[str, Any]]:
        kind = self.setting.attention
        events = ["success", f"F_{kind}(D₁) > 0", "F_lin(D₁) = 0", f"F_{kind}(D₀) = 0", "F_lin(D₀) = 0"]
        closed = [None] * 5 if self.exact is None else [self.exact.success, *self.exact.parts]
        models, counts = self.estimate.models, (self.estimate.successes, *self.estimate.conditions)
        rows = []
        for event, probability, count in zip(events, closed, counts, strict=True):
            low, high = wilson(count, models)
            rows.append({"event": event, "exact": probability, "ratio": count / models, "low": low, "high": high})
        return rows


def separate(
    kind: str = "self",
    *,
    attention: str = "exp",
    x: str | None = None,
    n: int | None = None,
    d: int | None = None,
    m: int | None = None,
    a0: float | None = None,
    a1: float | None = None,
    b: float | str | None = None,
    c: float | None = None,
    models: int = 1000,
    seed: int = 0,
    progress: Step = silent,
) -> Separation:
    """Compute the probability that softmax attention separates D₁ from D₀ where linear attention does not.

    A network with random sign vectors y_l computes F = φ(Σ_{j,l} φ_τ(⟨c_j, y_l⟩)) from the attention output c, where
    φ_τ(z) = max(z − τ, 0). *Success* means F(D₁) > 0 and F(D₀) = 0 with softmax, and F(D₁) = F(D₀) = 0 with linear
    attention, all with the same sign vectors. Omitted parameters take the values of the paper (Deng, Song and Zhou,
    2023).

    Args:
        kind: The data sets and the network: `"self"` (Definition D.1), `"cross"` (Definition F.1) or `"regression"`
            (Definition 3.8).
        attention: The attention that is compared with linear attention: `"exp"` for softmax, or `"poly:G"` for the
            Taylor polynomial of exp of degree G.
        x: QKᵀ: `"identity"` (the default) or `"ones"`. For self and cross.
        n: The number of tokens. A multiple of d − 2 (self) or d − 1 (cross). The default is 200 (self, cross) or 1000
            (regression).
        d: The width of a token. For self (default 22) and cross (default 11).
        m: The number of sign vectors. The default is max(⌈log(n/0.01)⌉, 15) (self), ⌈log(n/0.01)⌉ (cross) or ⌈log n⌉
            (regression).
        a0: a₀, the size of the special token in D₀. For self and cross; the default is 0.01.
        a1: a₁, the size of the special token in D₁. For self (default 1.2) and cross (default 3).
        b: The factor of the repeated identity, or `"tied"` for b = 1 − c. For self; the default is 0.2.
        c: The entries of the last column. For self; the default is 0.8.
        models: The number of networks to draw for the Monte Carlo estimate.
        seed: The seed. The same seed and parameters give the same networks.
        progress: A callback `(done, total, label)`.

    Returns:
        The exact probabilities (`exact`, None for regression) and the counts among the drawn networks (`estimate`).

    Raises:
        InputError: A parameter is out of range, or `kind` does not use it.

    >>> found = separate("self", models=100)
    >>> round(found.exact.success, 4), found.estimate.models
    (0.7633, 100)
    """
    setting = build_setting(kind, attention=attention, x=x, n=n, d=d, m=m, a0=a0, a1=a1, b=b, c=c)
    return separate_setting(setting, models, seed, progress)


def separate_setting(setting: Setting, models: int, seed: int = 0, progress: Step = silent) -> Separation:
    """Compute the record of one setting. `separate` builds the setting from its parameters."""
    closed = None if isinstance(setting, Regression) else exact(setting)
    return Separation(setting, closed, estimate(setting, models, seed, step=progress), seed)
