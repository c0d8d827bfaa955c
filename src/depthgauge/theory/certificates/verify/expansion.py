"""The matrices of the exact expansion in arb interval arithmetic (docs/math.md §3.1), and equality of heads."""

from collections.abc import Iterable

import torch
from flint import arb, arb_mat
from torch import Tensor

from depthgauge.base.errors import VerificationError
from depthgauge.theory.certificates.arb_values import to_arb
from depthgauge.theory.certificates.verify.arb_vectors import Vector, absolute, identity
from depthgauge.theory.certificates.verify.lead import Terms
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork
from depthgauge.theory.surrogates.expansion import LayerMatch


class ArbExpansion:
    """W_kh = β Q Kᵀ, V_kh and the matrices built from them, for a network without causal mask, MLP and LayerNorm.

    For one token a mask and position biases change nothing.
    """

    def __init__(self, network: SelfAttentionNetwork, *, one_token: bool = False) -> None:
        is_masked = (network.causal or network.length is not None) and not one_token
        if is_masked or network.norm != "none" or any(layer.mlp is not None for layer in network):
            raise VerificationError("the network is causal or has an MLP or LayerNorm; the expansion does not cover it")
        if any(one is not None for layer in network for one in (layer.query_bias, layer.output_bias)):
            raise VerificationError("the network has biases in the attention; the expansion does not cover them")
        self.skip, self.depth, self.dim = network.skip, len(network), network.dim
        self.W = [scores(network, layer) for layer in network]
        self.V = [[to_arb(value) for value in layer.value] for layer in network]
        self.V_size = [[absolute(value) for value in values] for values in self.V]
        self._drift: dict[tuple[int, int], arb_mat] = {}
        self._carried: dict[tuple[int, int], list[arb_mat]] = {}
        self._carried_size: dict[tuple[int, int], list[arb_mat]] = {}

    def heads(self, k: int) -> range:
        """Return the indices of the heads of layer k."""
        return range(len(self.V[k]))

    def drift(self, k: int, end: int) -> arb_mat:
        """Return Z_{k:ℓ} = A_k ⋯ A_{ℓ−1} − I with A = I + ΣV; without skips V_k ⋯ V_{ℓ−1}."""
        if (k, end) not in self._drift:
            product = arb_mat(self.dim, self.dim) if self.skip else identity(self.dim)
            for layer in self.V[k:end]:
                V = sum(layer[1:], layer[0])
                product = product + V + product * V if self.skip else product * V  # no 1 + η − 1, which loses digits
            self._drift[k, end] = product
        return self._drift[k, end]

    def carried(self, k: int, end: int) -> list[arb_mat]:
        """Return V_kh Z_{k+1:ℓ} for every head h of layer k."""
        if (k, end) not in self._carried:
            self._carried[k, end] = [V * self.drift(k + 1, end) for V in self.V[k]]
        return self._carried[k, end]

    def carried_size(self, k: int, end: int) -> list[arb_mat]:
        """Return |V_kh Z_{k+1:ℓ}| for every head h of layer k."""
        if (k, end) not in self._carried_size:
            self._carried_size[k, end] = [absolute(M) for M in self.carried(k, end)]
        return self._carried_size[k, end]

    def plain_terms(self, k: int, heads: Iterable[int]) -> Terms:
        """Return the terms W ⊗ V of T for the given heads of layer k."""
        return [(self.W[k][h], self.V[k][h]) for h in heads]

    def drift_terms(self, k: int, heads: Iterable[int]) -> Terms:
        """Return the terms Z_{0:k}W ⊗ V of Tᵐ for the given heads of layer k."""
        return [(self.drift(0, k) * self.W[k][h], self.V[k][h]) for h in heads]

    def output_terms(self, k: int, end: int, heads: Iterable[int]) -> Terms:
        """Return the terms N_{0:k}W ⊗ V Z_{k+1:ℓ} of Tᵐ for the given heads of layer k."""
        N = identity(self.dim) + self.drift(0, k)
        return [(N * self.W[k][h], self.carried(k, end)[h]) for h in heads]


def scores(network: SelfAttentionNetwork, layer: Layer) -> list[arb_mat]:
    """Return β Q_h K_hᵀ for every head h."""
    beta = arb(network.scale)
    pairs = zip(layer.query, layer.key, strict=True)
    return [to_arb(query) * to_arb(key).transpose() * beta for query, key in pairs]


def negated(terms: Terms) -> Terms:
    """Return the terms of the negated tensor."""
    return [(-left, right) for left, right in terms]


def same_head(mine: Layer, h: int, theirs: Layer, g: int) -> bool:
    """Whether two heads have equal W and V: equal values, and Q, K equal in the columns that contribute to Q Kᵀ."""
    return (
        torch.equal(mine.value[h], theirs.value[g])
        and torch.equal(*_common_width(mine.query[h] * _counts(mine, h), theirs.query[g] * _counts(theirs, g)))
        and torch.equal(*_common_width(mine.key[h] * _counts(mine, h), theirs.key[g] * _counts(theirs, g)))
    )


def _counts(layer: Layer, h: int) -> Tensor:
    """Return 1 for the columns in which both Q and K are nonzero, else 0; only those contribute to Q Kᵀ."""
    both = (layer.query[h] != 0).any(dim=0) & (layer.key[h] != 0).any(dim=0)
    return both.to(layer.query.dtype)


def _common_width(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both matrices without their zero columns."""
    return a[:, (a != 0).any(dim=0)], b[:, (b != 0).any(dim=0)]


def check_matches(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, matches: list[LayerMatch]) -> None:
    """Raise if a head is matched twice or two matched heads differ."""
    if matches and network.scale != surrogate.scale:
        raise VerificationError("heads were matched although the networks have different score scales")
    mine = [(m.k, h) for m in matches for h in m.heads]
    theirs = [(m.other, g) for m in matches for g in m.others]
    if len(set(mine)) < len(mine) or len(set(theirs)) < len(theirs):
        raise VerificationError("a head was matched twice")
    for m in matches:
        for h, g in zip(m.heads, m.others, strict=True):
            if not same_head(network[m.k], h, surrogate[m.other], g):
                raise VerificationError(f"head {h} of layer {m.k} is not head {g} of the surrogate's layer {m.other}")


def zeros(d: int) -> Vector:
    """Return the zero vector."""
    return [arb(0)] * d
