"""Lower bounds over sequences of tokens: substitute one token at a time, or try every sequence if there are few.

A sequence is given by slots. If the order of the tokens matters, because of positions or a causal mask, every slot is
one position. Otherwise slot s stands for `counts[s]` equal tokens, which stay equal.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement, islice, product

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge.base.errors import require_count
from depthgauge.theory.certificates.attack import AttackOptions, Evaluate, patterns_of, prepare
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.token_set import Tokens

FEW = 10**6
"""The most sequences that are all tried."""
STARTS, SWEEPS = 8, 3
"""Random sequences to start from by default, half of them with positions, and how often every slot is substituted at
most."""
CANDIDATES = 128
"""The most tokens that are tried in a slot at a time."""
ROWS = 2**14
"""Inputs that are evaluated together, times the slots of each."""


@dataclass(frozen=True, eq=False)
class FoundSequence:
    """The sequence with the largest max|S − S'| that was found, and whether all sequences were tried."""

    x: Float[Tensor, "n d"]
    exhaustive: bool


def attack_tokens(comparison: Comparison, options: AttackOptions) -> FoundSequence:
    """Return the sequence with the largest max|S(X) − S'(X)| that was found."""
    tokens, network, is_ordered = comparison.vocabulary, comparison.network, comparison.is_ordered
    starts = STARTS // (2 if is_ordered else 1) if options.starts is None else options.starts
    require_count("starts", starts, "the number of starting points")
    device = torch.device(options.device) if options.device is not None else network.device
    pair = prepare(network, device), prepare(comparison.surrogate, device)
    measure = partial(values_of, pair, device)
    is_complete = count_sequences(tokens, is_ordered) <= FEW
    best, best_value = tokens.at_positions()[:1, 0], -1.0
    if is_complete:
        each = every_sequence(tokens, is_ordered)
        searched = ((x, torch.ones_like(chosen[0])) for x, chosen in each)
    else:
        slots = _slots(tokens, is_ordered)
        searched = (_substituted(tokens, counts, measure, starts, options.seed) for counts in slots)
    for x, counts in searched:
        values = measure(x, counts)
        top = int(values.argmax())
        if float(values[top]) > best_value:
            best, best_value = x[top].repeat_interleave(counts, dim=0), float(values[top])
    return FoundSequence(best, is_complete)


def count_sequences(tokens: Tokens, is_ordered: bool) -> float:
    """Return the number of different inputs: sequences if their order matters, multisets otherwise."""
    if tokens.length is None:
        return math.inf
    v = len(tokens.embeddings)
    if not is_ordered:
        return sum(math.comb(v + n - 1, n) for n in range(1, tokens.length + 1))
    return sum(v**n if n * math.log(v) < 50 else math.inf for n in range(1, tokens.length + 1))


def every_sequence(
    tokens: Tokens, is_ordered: bool
) -> Iterator[tuple[Float[Tensor, "some n d"], Int64[Tensor, "some n"]]]:
    """Yield all sequences in batches of equal length, and the numbers of their tokens in the vocabulary."""
    assert tokens.length is not None
    places, v = tokens.at_positions(), len(tokens.embeddings)
    for n in range(1, tokens.length + 1):
        together = max(1, ROWS // n)
        all_of_length = product(range(v), repeat=n) if is_ordered else combinations_with_replacement(range(v), n)
        while batch := list(islice(all_of_length, together)):
            chosen = torch.from_numpy(np.array(batch))
            yield _rows(places, chosen), chosen


def _rows(places: Float[Tensor, "n v d"], chosen: Int64[Tensor, "some r"]) -> Float[Tensor, "some r d"]:
    """Return the inputs of some choices of tokens."""
    if len(places) == 1:
        return places[0][chosen]
    return places[torch.arange(chosen.shape[1]), chosen]


def _substituted(
    tokens: Tokens, counts: Int64[Tensor, " r"], measure: Callable[[Tensor, Tensor], Tensor], starts: int, seed: int
) -> tuple[Float[Tensor, "starts r d"], Int64[Tensor, " r"]]:
    """Return the ends of searches from random sequences with these multiplicities."""
    generator = torch.Generator().manual_seed(seed)
    places, v, r = tokens.at_positions(), len(tokens.embeddings), len(counts)
    chosen = torch.randint(0, v, (starts, r), generator=generator)
    values = measure(_rows(places, chosen), counts)
    for _ in range(SWEEPS):
        before = values.clone()
        for slot in torch.randperm(r, generator=generator).tolist():
            tried = torch.randperm(v, generator=generator)[:CANDIDATES]
            trial = chosen[:, None, :].repeat(1, len(tried), 1)
            trial[:, :, slot] = tried
            found = measure(_rows(places, trial.flatten(0, 1)), counts).reshape(starts, -1)
            top, which = found.max(dim=1)
            better = top > values
            chosen[better, slot] = tried[which[better]]
            values = torch.where(better, top, values)
        if bool((values <= before).all()):
            break
    return _rows(places, chosen), counts


def _slots(tokens: Tokens, is_ordered: bool) -> list[Int64[Tensor, " r"]]:
    if not is_ordered:
        return patterns_of(tokens.length, causal=False)
    lengths = sorted({min(tokens.length or 16, n) for n in (2, 8, tokens.length or 16)})
    return [torch.ones(n, dtype=torch.int64) for n in lengths]


@torch.no_grad()
def values_of(
    pair: tuple[Evaluate, Evaluate],
    device: torch.device,
    x: Float[Tensor, "many r d"],
    counts: Int64[Tensor, " r"],
) -> Float[Tensor, " many"]:
    """Return max|S − S'| of every input, −1 where it is not finite."""
    found = []
    for part in torch.split(x, max(1, ROWS // x.shape[1])):
        bias = counts.to(device, part.dtype).log().expand(len(part), -1)
        size = (pair[0](part.to(device), bias) - pair[1](part.to(device), bias)).abs().flatten(1).amax(dim=1)
        found.append(torch.where(size.isfinite(), size, -1.0).cpu())
    return torch.cat(found)
