"""The largest change of the logits over all sequences that fill all positions, each of which is evaluated.

The two networks are evaluated in float64, and what rounding may have changed is added (docs/math.md §3.16, §8.1).
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.forward_rounding import ForwardPass
from depthgauge.theory.certificates.method import Bound, Method
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, total
from depthgauge.theory.linalg.rounding import gamma
from depthgauge.theory.network.network import SelfAttentionNetwork, softmax_attention

ROWS = 2**14
"""Tokens that are evaluated together."""
UNDERFLOW = 2.0**-1000
"""More than what underflow may change in a product with R."""


class EverySequence(Method):
    """A proof of |(S − S') R| ≤ `value` in the last row of every sequence with one token at each position.

    Args:
        comparison: S, S' and the tokens, evaluated in float64.
        readout: R; the columns R_c, and then their differences.
        progress: called as `progress(done, total, label)`.
    """

    lost_at = 0

    def __init__(self, comparison: Comparison, readout: Float[Tensor, "d classes"], progress: Step = silent) -> None:
        first, second = torch.triu_indices(readout.shape[1], readout.shape[1], 1)
        self.columns = torch.cat([readout, readout[:, first] - readout[:, second]], 1)
        self.progress = progress
        super().__init__(comparison)
        self.progress = silent  # a proof can be pickled

    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """As in the base class.

        Let D̂ be the computed S − S' and e a bound on the rounding errors of both outputs. Then |(S − S') R| is at most
        |D̂R| + e|R|, up to d + 2 roundings: of the subtraction, of an entry of R, and of the product.
        """
        networks = (comparison.network, comparison.surrogate)
        d, columns = self.columns.shape
        largest, reach = torch.zeros(columns, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
        assert isinstance(comparison.inputs, Tokens)
        for x in self._sequences(comparison.inputs.at_positions()):
            S, other = (last_row(network, x) for network in networks)
            apart = S - other
            largest = torch.maximum(largest, (apart @ self.columns).abs().amax(0))
            reach = torch.maximum(reach, apart.abs().amax(0))
        lost = total(*(ForwardPass(A, network, comparison).error() for network in networks))
        lost = lost * (1 + 2.0**-50) + A.upper(reach) * gamma(d + 3)
        value = A.upper(largest) + (lost[None] @ A.upper(self.columns.abs()))[0] + UNDERFLOW
        parts = [A.zeros(layer.heads, d) for layer in comparison.network]
        return Bound(value, parts, ("enumeration",), (f"the maximum over all {self._count} sequences",))

    def _sequences(self, places: Float[Tensor, "n v d"]) -> Iterator[Float[Tensor, "some n d"]]:
        """Yield all inputs, some at a time: the numbers of a sequence's tokens are the digits of its own number."""
        n, v, _ = places.shape
        self._count, at = v**n, torch.arange(n)
        for start in range(0, self._count, ROWS // n):
            number = torch.arange(start, min(start + ROWS // n, self._count))
            yield places[at, number[:, None] // v**at % v]
            self.progress(int(number[-1]) + 1, self._count, "all sequences")


@torch.no_grad()
def last_row(network: SelfAttentionNetwork, x: Float[Tensor, "some n d"]) -> Float[Tensor, "some d"]:
    """Return the last row of S(X), computed as by `network(x)`."""
    for index in range(len(network) - 1):
        x = network.step(index, x)

    def of_last(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        return softmax_attention(query[..., -1:, :], key, value, is_causal=False, scale=scale)

    # A row of attention is the last one of a causal network, too: it sees all tokens.
    return network.step(len(network) - 1, x, of_last)[:, -1]
