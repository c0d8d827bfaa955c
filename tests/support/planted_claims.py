"""False variants of sharp inequalities, which a search must refute."""

from dataclasses import replace
from fractions import Fraction

from depthgauge.papers.ledger.arithmetic import Arithmetic, Value
from depthgauge.papers.ledger.claim import Evaluation, Inequality

FACTOR = Fraction(9, 10)


def planted(inequality: Inequality) -> Inequality:
    """Return left ≤ 9/10 · right, which is false if the constant is sharp."""

    def evaluate(ar: Arithmetic, **instance: Value) -> Evaluation:
        steps, left, right = inequality.evaluate(ar, **instance)
        return steps, left, right * ar.number(FACTOR)

    return replace(inequality, evaluate=evaluate)
