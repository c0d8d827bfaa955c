"""Generated tasks: sequences of tokens with one label each, which the model reads from the last token.

Every task states in `known` how many layers it is known to take. The labels are functions of the tokens that are short
enough to check by hand; the tests check them against a plain loop.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Int64
from torch import Tensor

from depthgauge.base.errors import InputError, require_count, unknown_name

Tokens = Int64[Tensor, "samples n"]
Labels = Int64[Tensor, " samples"]
Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class GeneratedTask:
    """A task whose examples, sequences of `length` tokens, are drawn at random.

    `vocabulary` is the number v of different tokens, `classes` the number C of labels, which are equally likely, or
    nearly so. `known` is what is known about the number of layers that the task takes, with the source.
    """

    name: str
    vocabulary: int
    length: int
    classes: int
    known: str
    sample: Draw = field(repr=False, compare=False)

    @property
    def chance(self) -> float:
        """The accuracy of a constant guess."""
        return 1.0 / self.classes

    def draw(self, count: int, seed: int) -> tuple[Tokens, Labels]:
        """Draw `count` sequences and their labels; the same seed gives the same examples on every device."""
        require_count("count", count, "the number of sequences")
        return self.sample(count, torch.Generator().manual_seed(seed))


def hop_labels(tokens: Tokens, hops: int) -> Labels:
    """Return hop_k of the last token of every sequence, or −1 where a hop has no target.

    find(i) is the largest j ≤ i with σ_{j−1} = σ_i: the position after the last earlier occurrence of σ_i. The label is
    σ at find applied `hops` times to the last position.
    """
    n = tokens.shape[1]
    position = torch.arange(n)
    same = tokens[:, :, None] == tokens[:, None, :]  # [samples, i, j − 1]
    earlier = same & (position[None, :] < position[:, None])
    find = torch.where(earlier, position + 1, -1).amax(dim=-1)  # [samples, i], −1 without an earlier occurrence
    at = torch.full((len(tokens), 1), n - 1)
    lost = torch.zeros(len(tokens), 1, dtype=torch.bool)
    for _ in range(hops):
        at = find.gather(1, at)
        lost |= at < 0
        at = at.clamp(min=0)
    label: Tensor = torch.where(lost, -1, tokens.gather(1, at))[:, 0]
    return label


def hop_task(length: int = 10, alphabet: int = 4, hops: int = 1) -> GeneratedTask:
    """Return the k-hop induction task of Sanford, Hsu and Telgarsky: follow the last earlier occurrence k times."""

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, labels, have = [], [], 0
        while have < count:  # sequences in which a hop has no target are drawn again
            drawn = torch.randint(alphabet, (count, length), generator=generator)
            label = hop_labels(drawn, hops)
            kept = label >= 0
            tokens.append(drawn[kept])
            labels.append(label[kept])
            have += int(kept.sum())
        return torch.cat(tokens)[:count], torch.cat(labels)[:count]

    known = (
        "One layer needs a size that grows with the length (Sanford, Hsu and Telgarsky 2024, One-layer transformers "
        "fail to solve the induction heads task). Two layers suffice for one hop, and O(log k) layers for k hops, "
        "which is optimal under a conjecture on parallel computation (Sanford, Hsu and Telgarsky 2024, Transformers, "
        "parallel computation, and logarithmic depth)."
    )
    return GeneratedTask(f"{hops}-hop", alphabet, length, alphabet, known, sample)


def recall_task(pairs: int = 2, keys: int = 3, values: int = 4) -> GeneratedTask:
    """Return associative recall: key value key value … key; the label is the value after the queried key."""
    if keys < pairs:
        raise InputError(f"keys must be at least pairs, got keys={keys} and pairs={pairs}; keys do not repeat")

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        key = torch.rand(count, keys, generator=generator).argsort(dim=1)[:, :pairs]
        value = torch.randint(values, (count, pairs), generator=generator)
        asked = torch.randint(pairs, (count, 1), generator=generator)
        listed = torch.stack([key, value + keys], dim=2).flatten(1)
        return torch.cat([listed, key.gather(1, asked)], dim=1), value.gather(1, asked)[:, 0]

    known = (
        "An attention network needs two layers: the first moves each key to its value, the second looks the key up "
        "(Elhage et al. 2021; Olsson et al. 2022; Arora et al. 2023 for recall as a benchmark). One layer of bounded "
        "size fails on long lists for the reason it fails at induction (Sanford, Hsu and Telgarsky 2024). Guessing one "
        "of the values that occur gives more than chance."
    )
    return GeneratedTask(f"recall-{pairs}", keys + values, 2 * pairs + 1, values, known, sample)


def pointer_task(points: int = 6, hops: int = 2) -> GeneratedTask:
    """Return pointer chasing: token i is f(i) for a permutation f, the last token is x, the label is f(f(…f(x)))."""

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        table = torch.rand(count, points, generator=generator).argsort(dim=1)
        start = torch.randint(points, (count, 1), generator=generator)
        at = start
        for _ in range(hops):
            at = table.gather(1, at)
        return torch.cat([table, start], dim=1), at[:, 0]

    known = (
        "One lookup takes one layer. One layer cannot compose two functions on n points unless "
        "(heads)·(width)·(precision) exceeds about n log n (Peng, Narayanan and Papadimitriou 2024). Two layers "
        "suffice for two lookups, and O(log k) for k."
    )
    return GeneratedTask(f"pointer-{hops}", points, points + 1, points, known, sample)


def word_task(group: str = "s3", length: int = 3) -> GeneratedTask:
    """Return the word problem of a permutation group.

    `s3`: the tokens are the six elements and the label is their product, read from left to right. `s5`: the tokens are
    the ten transpositions of five points, and the label is the point to which the product moves point 0.
    """
    if group == "s3":
        elements = list(itertools.permutations(range(3)))
        index = {element: i for i, element in enumerate(elements)}
        times = [[index[tuple(b[a[p]] for p in range(3))] for b in elements] for a in elements]
        step, start, classes, vocabulary = torch.tensor(times), index[0, 1, 2], 6, 6
        known = (
            "S₃ is solvable, so a constant number of layers suffices for every length (Liu et al. 2023, Transformers "
            "learn shortcuts to automata)."
        )
    elif group == "s5":
        moves = []
        for a, b in itertools.combinations(range(5), 2):
            move = list(range(5))
            move[a], move[b] = b, a
            moves.append(move)
        step, start, classes, vocabulary = torch.tensor(moves).T, 0, 5, 10
        known = (
            "The word problem of S₅ is complete for NC¹ (Barrington 1989). Transformers of constant depth and "
            "logarithmic precision are in TC⁰ (Merrill and Sabharwal 2023), so the number of layers must grow with the "
            "length unless TC⁰ = NC¹; O(log n) layers suffice (Liu et al. 2023)."
        )
    else:
        raise unknown_name("group", group, ("s3", "s5"))

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (count, length), generator=generator)
        state = torch.full((count,), start)
        for column in tokens.unbind(dim=1):
            state = step[state, column]  # state × token → state
        return tokens, state

    return GeneratedTask(group, vocabulary, length, classes, known, sample)


def bit_task(kind: str = "majority", length: int = 9) -> GeneratedTask:
    """Return majority or parity of a sequence of bits; the length of majority must be odd."""
    if kind not in ("majority", "parity"):
        raise unknown_name("kind", kind, ("majority", "parity"))
    if kind == "majority" and length % 2 == 0:
        raise InputError(f"the length of majority must be odd, got {length}; with an even length there are ties")

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        bits = torch.randint(2, (count, length), generator=generator)
        ones = bits.sum(dim=1)
        return bits, (ones > length // 2).long() if kind == "majority" else ones % 2

    known = {
        "majority": "One layer with uniform attention suffices at every length: the mean of the tokens decides.",
        "parity": (
            "A fixed attention network cannot be accurate with a margin at every length (Hahn 2020); two layers can "
            "compute it with weights chosen for the task, and training rarely finds them (Chiang and Cholak 2022)."
        ),
    }[kind]
    return GeneratedTask(kind, 2, length, 2, known, sample)


GENERATED: Mapping[str, Callable[[], GeneratedTask]] = {
    "recall-2": recall_task,
    "recall-3": lambda: recall_task(3, 4, 4),
    "1-hop": hop_task,
    "2-hop": lambda: hop_task(hops=2),
    "pointer-2": pointer_task,
    "pointer-4": lambda: pointer_task(hops=4),
    "s3": word_task,
    "s5": lambda: word_task("s5", 4),
    "majority": bit_task,
    "parity": lambda: bit_task("parity", 6),
}
"""The tasks by name, at the sizes of the experiment."""


def find_task(name: str) -> GeneratedTask:
    """Return the task with a name, at the size of the experiment.

    >>> find_task("recall-2").length
    5
    """
    if name not in GENERATED:
        raise unknown_name("task", name, GENERATED)
    return GENERATED[name]()
