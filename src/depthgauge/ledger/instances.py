"""Random instances: matrices at several scales, dense, of signs, sparse or constant, so that corners are met often."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.random import Generator as Random

from depthgauge.ledger.claim import Instance, Size

SCALES = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)


def matrix(random: Random, *shape: int) -> np.ndarray:
    """A matrix or vector at a random scale: normal, of signs, with few entries, or all entries equal."""
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
    """`drawing({"X": "n d", "a": "n"})`: how instances with these shapes are drawn; an empty shape is a scalar."""

    def draw(random: Random, size: Size) -> Instance:
        instance: dict[str, object] = {}
        for name, shape in shapes.items():
            entries = matrix(random, *(size[axis] for axis in shape.split())) if shape else random.choice(SCALES)
            instance[name] = entries
        return instance

    return draw


def corners(shapes: Mapping[str, str], most: int = 1000) -> Callable[[Size], Iterator[Instance]]:
    """Every instance with entries 0, 1 and −1, where there are at most `most` of them: the simplest places to look."""

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
    """`sizes(n=(1, 2), d=(1, 2))`: ((n=1, d=1), (n=2, d=2)), the lists side by side."""
    return tuple(dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))
