"""The data sets of Definitions D.1 and F.1 and the attention on them, as dense matrices in either arithmetic."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

import numpy as np

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value

Kind = Literal["exp", "lin"]
Symbol = Literal["a0", "a1"]
NAMES: dict[str, str] = {"a0": "a₀", "a1": "a₁"}


@dataclass(frozen=True)
class AttentionSetup:
    """The setup of a lemma: self-attention (Definition D.1) or cross-attention (Definition F.1) on D₀ or D₁.

    `kind` is softmax or linear attention, `product` is QKᵀ, `tie` is b + c = 1 or b² + c² = 1. The bound on a₁ is
    a₁ ≥ least for self-attention and a₁ > least for cross-attention.
    """

    family: Literal["self", "cross"]
    dataset: Literal[0, 1]
    kind: Kind
    product: Literal["ones", "identity"] = "identity"
    tie: Literal["sum", "squares"] = "sum"
    least: Fraction = Fraction(1)

    @property
    def symbol(self) -> Symbol:
        """The name of the special token's size: a₀ in D₀, a₁ in D₁."""
        return "a1" if self.dataset else "a0"

    @property
    def extra_columns(self) -> int:
        """The number of columns besides the repeated identity."""
        return 2 if self.family == "self" else 1


class DenseAttention:
    """One instance of a setup: n tokens, the matrices A₁ and A₂ = A₃, and u, f, c computed from them (V = I).

    There are d columns and t tokens of each class. `j3` is the special key and `j2` the special query of
    cross-attention, counted from 1; `a` holds the values of a₀ and a₁, of which `formula` is the one in the formulas.
    """

    def __init__(
        self,
        ar: Arithmetic,
        setup: AttentionSetup,
        formula: Symbol,
        *,
        d: int,
        t: int,
        j3: int,
        j2: int = 0,
        b: Value = None,
        **a: Value,
    ) -> None:
        self.ar, self.setup, self.d, self.t = ar, setup, d, t
        self.classes = d - setup.extra_columns
        self.n = self.classes * t
        self.token, self.column = np.arange(self.n), np.arange(d)
        self.token_class = self.token % self.classes
        self.log = ar.log(ar.number(self.n))
        self.root = ar.sqrt(self.log)
        self.j2, self.j3 = j2 - 1, j3 - 1
        self.a, self.special_size = a[formula], a[setup.symbol]
        self.b = b

    @cached_property
    def c_parameter(self) -> Value:
        """The parameter c of Definition D.1: 1 − b, or √(1 − b²)."""
        return 1 - self.b if self.setup.tie == "sum" else self.ar.sqrt(1 - self.b * self.b)

    def power(self, exponent: Value) -> Value:
        """n^exponent."""
        return self.ar.exp(exponent * self.log)

    def fraction(self, top: int, bottom: int) -> Value:
        """top/bottom."""
        return self.ar.number(Fraction(top, bottom))

    @cached_property
    def unscaled(self) -> tuple[Value, Value]:
        """A₁ and A₂ without their factors √(log n) (self), or log n and 1 (cross)."""
        blank = np.full((self.n, self.d), self.ar.number(0))
        keys = blank.copy()
        block = (self.token, 1 + self.token_class)
        if self.setup.family == "self":
            keys[self.j3, 0] = self.special_size
            keys[block] = self.b
            keys[:, -1] = self.c_parameter
            return keys, keys
        queries = blank.copy()
        queries[self.j2, 0] = self.special_size
        queries[:, 1:] = self.ar.number(1)
        keys[self.j3, 0] = self.ar.number(1)
        keys[block] = self.ar.number(1)
        return queries, keys

    @cached_property
    def inputs(self) -> tuple[Value, Value]:
        """A₁ and A₂ = A₃."""
        queries, keys = self.unscaled
        return (queries * self.root, keys * self.root) if self.setup.family == "self" else (queries * self.log, keys)

    @cached_property
    def u(self) -> Value:
        """u_exp = exp(A₁ QKᵀ A₂ᵀ), u_lin = A₁ QKᵀ A₂ᵀ."""
        queries, keys = self.inputs
        if self.setup.product == "ones":
            scores = queries.sum(axis=1)[:, None] * keys.sum(axis=1)[None, :]
        else:
            scores = queries @ keys.T
        return self.ar.exp(scores) if self.setup.kind == "exp" else scores

    @cached_property
    def f(self) -> Value:
        """f = u / row sums of u."""
        return self.u / self.u.sum(axis=1, keepdims=True)

    @cached_property
    def c(self) -> Value:
        """c = f·A₃."""
        return self.f @ self.inputs[1]
