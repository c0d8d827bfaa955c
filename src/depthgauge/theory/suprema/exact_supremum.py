"""The exact supremum over prompts: branch and bound over the shares of the tokens (docs/math.md §3.15).

Without mask and positions the outputs depend on the shares of the tokens alone, so the supremum over all prompts of any
length is a maximum over the simplex of shares. Where there are few sequences, the maximum over all of them is computed
instead, also for causal networks and with positions.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.errors import require_positive
from depthgauge.base.format import counted, number
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.attack import prepare
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.method import Bound, Method
from depthgauge.theory.certificates.token_attack import FEW, count_sequences, every_sequence, values_of
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic
from depthgauge.theory.linalg.rounding import mul_up, no_bound, sub_down
from depthgauge.theory.suprema.interpolation import Interpolated
from depthgauge.theory.suprema.network_on_shares import NetworkOnShares

ENTRIES = 2**18
"""Numbers in the largest array of one step; simplices are evaluated in batches of this size."""
MOST = 2**26
"""The same for one simplex, which is refused beyond."""
ROOM = 1 + 2.0**-20
"""A factor of the bounds, so that arb can confirm them: the radius of an arb interval has 30 bits."""
DEEPEST = 48
"""The most bisections of a simplex; all shares are then multiples of 2⁻⁴⁸, without rounding."""
LONGEST, CLOSE = 2**12, 1e-3
"""The most tokens of a witness, and how close to the best of these lengths it is."""


@dataclass(frozen=True)
class ExactLimits:
    """When the search for an exact supremum ends: upper ≤ (1 + tolerance)·lower, or after some seconds."""

    tolerance: float = 0.02
    seconds: float = 60.0

    def __post_init__(self) -> None:
        require_positive("tolerance", self.tolerance, "the largest relative width of the enclosure, for example 0.02")
        require_positive("seconds", self.seconds, "the time after which the best enclosure so far is returned")


def is_enumerable(comparison: Comparison) -> bool:
    """Return whether all sequences are tried."""
    return count_sequences(comparison.vocabulary, comparison.is_ordered) <= FEW


def exact_method(comparison: Comparison, limits: ExactLimits, progress: Step = silent) -> "Enumeration | Shares":
    """Return the proof of an exact supremum."""
    return Enumeration(comparison, progress) if is_enumerable(comparison) else Shares(comparison, limits, progress)


def exact_obstacle(comparison: Comparison) -> str | None:
    """Return why there is no exact supremum, or None."""
    tokens = comparison.inputs
    if not isinstance(tokens, Tokens):
        return f"it is for prompts, and this set is a {tokens.kind}; give the tokens: inputs=Tokens(…), --tokens FILE"
    if is_enumerable(comparison):
        return None
    if comparison.is_ordered:
        return (
            "the order of the tokens matters (a causal mask, positions or position biases), and there are more than "
            f"{FEW:,} sequences to try; limit them with Tokens(…, length=…), --length N, or use effort default"
        )
    v, network = len(tokens.embeddings), comparison.network
    if _entries(comparison) > MOST:
        return f"{v} tokens are too many to divide their shares; give fewer tokens, or use effort default"
    E, norms = tokens.embeddings, {net.norm for net in (network, comparison.surrogate) if net.norm_place == "before"}
    constant, zero = (E[:, :1] == E).all(-1), (E == 0).all(-1)
    singular = (constant & ("pre" in norms)) | (zero & bool(norms))
    if bool(singular.any()):
        return (
            f"token {int(singular.nonzero()[0])} is at the singularity of the norm ({', '.join(sorted(norms))}): its "
            "entries are all equal, so what the norm divides by is 0; remove the token, or use effort default"
        )
    return None


def _entries(comparison: Comparison) -> int:
    """Return the numbers in the largest array of one simplex: edges or symbols × heads × pairs of tokens."""
    v = len(comparison.vocabulary.embeddings)
    networks = comparison.network, comparison.surrogate
    heads, width = max(layer.heads for net in networks for layer in net), comparison.network.dim
    symbols = max(len(net) - 1 for net in networks) * v * width
    return max(v * (v - 1) // 2, symbols, 1) * heads * v * max(v, width)


def _no_parts(comparison: Comparison, A: BoundArithmetic) -> list[Any]:
    """Return parts of zero: these bounds are not sums over heads."""
    return [A.zeros(layer.heads, comparison.network.dim) for layer in comparison.network]


class _Pair:
    """S and S' in an arithmetic."""

    def __init__(self, comparison: Comparison, A: BoundArithmetic) -> None:
        self.A = A
        self.S, self.other = (NetworkOnShares(net, A) for net in (comparison.network, comparison.surrogate))

    def differences(
        self, x: Float[Tensor, "B r d"], p: Float[Tensor, "B K rows r"]
    ) -> tuple[Interpolated, Interpolated]:
        """Return S − S' and S, for tokens x and the weights p of the keys at every vertex."""
        rows = Interpolated.linear(self.A, self.A.exact(x[:, None].expand(-1, p.shape[1], -1, -1)))
        keys = Interpolated.linear(self.A, self.A.exact(p))
        S = self.S(rows, keys)
        return S - self.other(rows, keys), S

    def bounds(self, difference: Interpolated) -> Any:
        """Bound |S − S'| on every simplex, [B, r, d]."""
        top, below = difference.whole()
        return top.most(below)[:, 0]


class Found(NamedTuple):
    """What is known of some simplices of shares.

    Attributes:
        vertices: [B, K, v].
        bounds: the largest |S − S'| per output coordinate, [B, d].
        edges: by how much S differs between vertices j and k, times their distance, [B, K, K].
        depth: how often a simplex was bisected, [B].
    """

    vertices: Tensor
    bounds: Tensor
    edges: Tensor
    depth: Tensor

    def part(self, index: Tensor) -> "Found":
        """Return some of the simplices."""
        return Found(*(x[index] for x in self))

    def tops(self) -> Tensor:
        """Return the bound on every simplex, [B]."""
        return self.bounds.amax(-1)


class Shares(Method):
    """The supremum over all prompts of any length, as the maximum over the simplex of token shares.

    Attributes:
        attained: the largest |S − S'| at a vertex, rounded down; a prompt comes arbitrarily close.
        cover: the vertices of simplices that cover all shares, [N, v, v].
        is_finished: whether the enclosure is as narrow as the tolerance asks.
        is_interrupted: whether the user stopped the search.
    """

    lost_at = 0

    def __init__(self, comparison: Comparison, limits: ExactLimits, progress: Step = silent) -> None:
        self.limits = limits
        self.attained, self.is_finished, self.is_interrupted = 0.0, False, False
        self._best: tuple[Tensor, int] | None = None
        super().__init__(comparison, progress)

    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """As in the base class; a second arithmetic bounds the simplices that the first one found."""
        pair, E = _Pair(comparison, A), comparison.vocabulary
        batch = max(1, ENTRIES // _entries(comparison))
        if A is self.arithmetic:
            self.cover, found, notes = self._search(pair, E.embeddings, batch)
            return Bound(A.upper(found), _no_parts(comparison, A), ("shares",), notes)
        values = [
            pair.bounds(pair.differences(E.embeddings.expand(len(V), -1, -1), V[:, :, None, :])[0]).amax((0, 1))
            for V in torch.split(self.cover, batch)
        ]
        return Bound(A.cat([x[None] for x in values]).amax(0), _no_parts(comparison, A), ("shares",))

    def _search(self, pair: _Pair, E: Tensor, batch: int) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """Return the vertices of simplices that cover all shares, the bound per coordinate, and notes.

        All simplices of an open list have a bound above the tolerance, those with the largest are bisected next. An
        interruption leaves `state` as it was before the step.
        """
        end, eye = time.monotonic() + self.limits.seconds, torch.eye(len(E), dtype=torch.float64)
        closed: list[Found] = []
        state = self._evaluated(pair, E, eye[None], torch.zeros(1, dtype=torch.int64)), closed
        why, first = "", None
        try:
            while True:
                found, closed = state
                wanted = (1 + self.limits.tolerance) * self.attained
                tops = found.tops()
                is_open = (tops > wanted) & (found.depth < DEEPEST)
                upper = float(torch.cat([tops, *(part.tops() for part in closed)]).max())
                if not bool(is_open.any()) or self.attained == upper:
                    break
                state = found, closed = found.part(is_open), [*closed, found.part(~is_open)]
                first = self._report(upper, first)
                if time.monotonic() > end:
                    why = f"stopped after {number(self.limits.seconds)} seconds"
                    break
                order = found.tops().argsort(descending=True)
                chosen, rest = found.part(order[: batch // 2 or 1]), found.part(order[batch // 2 or 1 :])
                made = self._evaluated(pair, E, *_bisected(chosen))
                state = Found(*(torch.cat(pair) for pair in zip(rest, made, strict=True))), closed
        except KeyboardInterrupt:
            why, self.is_interrupted = "stopped by the user", True
        found, closed = state
        whole = Found(*(torch.cat(parts) for parts in zip(found, *closed, strict=True)))
        value = whole.bounds.amax(0)
        upper = float(value.amax())
        self.is_finished = upper <= (1 + self.limits.tolerance) * self.attained
        if not self.is_finished and not why:
            why = f"stopped after {DEEPEST} bisections"
        self.progress(100, 100, "")
        between = f"the supremum over prompts of any length is between {number(self.attained)} and {number(upper)}"
        asked = f", wider than the tolerance {number(self.limits.tolerance)}"
        return whole.vertices, value, (between if self.is_finished else f"{why}: {between}{asked}",)

    def _report(self, upper: float, first: float | None) -> float | None:
        """Report how much of the enclosure's relative width is gone, on a logarithmic scale."""
        width = upper / self.attained - 1 if self.attained > 0 else math.inf
        first = width if first is None or not first < math.inf else first
        done = 0.0
        if width < math.inf and first > self.limits.tolerance:
            done = math.log(first / width) / math.log(first / self.limits.tolerance)
        text = f"supremum between {number(self.attained)} and {number(upper)}"
        self.progress(min(99, max(0, int(100 * done))), 100, text)
        return first

    def _evaluated(self, pair: _Pair, E: Tensor, V: Tensor, depth: Tensor) -> Found:
        """Evaluate simplices, and keep the best value at a vertex."""
        difference, S = pair.differences(E.expand(len(V), -1, -1), V[:, :, None, :])
        bounds = no_bound(mul_up(pair.bounds(difference).floats().amax(1), ROOM))
        low = sub_down(difference.at.mid.abs(), difference.at.rad).amax(-1)  # [B, K, v]
        low = torch.where(low.isfinite(), low, 0.0)
        if float(low.max()) > self.attained:
            b, k, t = (int(i) for i in torch.unravel_index(low.argmax(), low.shape))
            self.attained, self._best = float(low[b, k, t]), (V[b, k].clone(), t)
        apart = _distances(S.at.floats().flatten(2))
        largest = apart.amax((1, 2), keepdim=True)
        relative = torch.where(largest > 0, apart / largest, 0.0).nan_to_num(0.0)
        return Found(V, bounds, _distances(V) * (0.25 + relative), depth)

    def witness(self, comparison: Comparison) -> Float[Tensor, "n d"]:
        """Return a prompt with nearly the best shares that were found, of as few tokens as come close to them."""
        tokens = comparison.vocabulary
        if self._best is None:  # no difference anywhere
            return tokens.embeddings[:1]
        shares, own = self._best
        cpu = torch.device("cpu")
        pair = prepare(comparison.network, cpu), prepare(comparison.surrogate, cpu)
        most, found = min(tokens.length or LONGEST, LONGEST), []
        for n in [2**k for k in range(most.bit_length() - 1)] + [most]:
            counts = (shares * n).floor()
            counts[own] = counts[own].clamp(min=1)
            missing = n - int(counts.sum())
            if missing > 0:
                counts[(shares * n - counts).topk(min(missing, len(counts))).indices] += 1
            kept = counts > 0
            rows, many = tokens.embeddings[kept], counts[kept].to(torch.int64)
            found.append((float(values_of(pair, cpu, rows[None], many)[0]), rows.repeat_interleave(many, dim=0)))
        best = max(value for value, _ in found)
        return next(x for value, x in found if value >= (1 - CLOSE) * best)


def _distances(x: Float[Tensor, "B K n"]) -> Float[Tensor, "B K K"]:
    return (x[:, :, None] - x[:, None]).abs().amax(-1)


def _bisected(found: Found) -> tuple[Tensor, Tensor]:
    """Return the halves of simplices, divided in the middle of the edge with the largest weight, and their depth.

    An edge counts for its length and for the change of S along it.
    """
    K, each = found.vertices.shape[1], torch.arange(len(found.vertices))
    edge = found.edges.flatten(1).argmax(1)
    j, k = edge // K, edge % K
    middle = (found.vertices[each, j] + found.vertices[each, k]) / 2
    halves = []
    for replaced in (j, k):
        half = found.vertices.clone()
        half[each, replaced] = middle
        halves.append(half)
    return torch.cat(halves), torch.cat([found.depth + 1] * 2)


class Enumeration(Method):
    """The maximum over all sequences, each evaluated in the arithmetic."""

    lost_at = 0

    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """As in the base class."""
        pair, found, best = _Pair(comparison, A), [], -1.0
        whole, done = int(count_sequences(comparison.vocabulary, comparison.is_ordered)), 0
        for x, weights in _all_sequences(comparison):
            sizes = pair.bounds(pair.differences(x, weights[:, None])[0])
            # A token that does not occur has no output.
            occurs = (weights.diagonal(dim1=-2, dim2=-1) if weights.shape[1] > 1 else weights[:, 0]) > 0
            sizes = sizes * occurs[..., None].to(torch.float64)
            top = sizes.floats().amax((1, 2))
            if A is self.arithmetic and float(top.max()) > best:
                best, at = float(top.max()), int(top.argmax())
                times = (weights[at, 0] if weights.shape[1] == 1 else torch.ones(len(x[at]))).to(torch.int64)
                self._witness = x[at].repeat_interleave(times, dim=0)
            found.append(sizes.amax((0, 1))[None])
            done += len(x)
            self.progress(done, whole, "all sequences")
        return Bound(
            A.cat(found).amax(0),
            _no_parts(comparison, A),
            ("enumeration",),
            (f"the maximum over {counted(whole, 'sequence')}",),
        )

    def witness(self, comparison: Comparison) -> Float[Tensor, "n d"]:
        """Return the sequence with the largest bound."""
        return self._witness


def _all_sequences(comparison: Comparison) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens [B, r, d], and their weights as keys, [B, 1 or r, r]: counts, or the mask where order matters."""
    tokens = comparison.vocabulary
    ordered, is_causal = comparison.is_ordered, comparison.network.causal
    v = len(tokens.embeddings)
    for x, chosen in every_sequence(tokens, ordered):
        n = x.shape[1]
        if not ordered and v < n:
            yield tokens.embeddings.expand(len(x), -1, -1), F.one_hot(chosen, v).sum(1).to(torch.float64)[:, None]
        elif is_causal:
            yield x, torch.ones(n, n, dtype=torch.float64).tril().expand(len(x), -1, -1)
        else:
            yield x, torch.ones(len(x), 1, n, dtype=torch.float64)
