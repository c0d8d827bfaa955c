"""Random and structured instances, and the claims that are searched over them.

Matrices have several scales and kinds, so that extreme cases are frequent.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.random import Generator as Random

from depthgauge.papers.ledger.claim import Claim, Evaluate, Inequality, Instance, Size

SCALES = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)


def matrix(random: Random, *shape: int) -> np.ndarray:
    """Draw a matrix or vector of a random scale: Gaussian, random signs, sparse, or constant."""
    scale = random.choice(SCALES)
    kind = random.integers(4)
    normal = random.normal(size=shape)
    if kind == 1:
        normal = np.where(normal >= 0, 1.0, -1.0)
    elif kind == 2:
        normal = normal * (random.random(shape) < 0.5)
    elif kind == 3:
        normal = np.full(shape, float(normal.flat[0]))
    return np.asarray(scale * normal)


def drawing(shapes: Mapping[str, str]) -> Callable[[Random, Size], Instance]:
    """Return a function that draws instances with these shapes.

    For example, `drawing({"X": "n d", "a": "n", "c": ""})` draws a matrix, a vector and a scalar.
    """

    def draw(random: Random, size: Size) -> Instance:
        return {
            name: matrix(random, *(size[axis] for axis in shape.split())) if shape else random.choice(SCALES)
            for name, shape in shapes.items()
        }

    return draw


def corners(shapes: Mapping[str, str], most: int = 1000) -> Callable[[Size], Iterator[Instance]]:
    """Return a function that lists all instances with entries 0, 1 and −1, if there are at most `most` of them."""

    def starts(size: Size) -> Iterator[Instance]:
        lengths = {name: tuple(size[axis] for axis in shape.split()) for name, shape in shapes.items()}
        total = sum(math.prod(shape) for shape in lengths.values())
        if 3**total > most:
            return
        for entries in itertools.product((0.0, 1.0, -1.0), repeat=total):
            instance, rest = {}, np.array(entries)
            for name, shape in lengths.items():
                instance[name], rest = rest[: math.prod(shape)].reshape(shape), rest[math.prod(shape) :]
            yield instance

    return starts


def sizes(**lists: tuple[int, ...]) -> tuple[dict[str, int], ...]:
    """Zip lists of dimensions: `sizes(n=(1, 2), d=(3, 4))` is `({"n": 1, "d": 3}, {"n": 2, "d": 4})`."""
    return tuple(dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))


def searched(
    id: str,
    where: str,
    sides: tuple[str, str],
    evaluate: Evaluate,
    shapes: Mapping[str, str] | Callable[[Random, Size], Instance],
    over: Sequence[Size],
    hypothesis: str = "none",
    corrected: str | None = None,
    *,
    statement: str | None = None,
    sharp: bool = False,
    note: str = "",
    **more: Any,
) -> Claim:
    """Return the claim left ≤ right, which a search checks.

    `shapes` are those of `drawing`, or a function that draws an instance; `over` are the sizes. The statement is the
    text of the inequality unless it is given. `more` are further attributes of the `Inequality`.
    """
    draw = shapes if callable(shapes) else drawing(shapes)
    check = Inequality(*sides, evaluate, draw, over, **more)
    return Claim(id, where, statement or check.text(), check, hypothesis, corrected, sharp, note)
