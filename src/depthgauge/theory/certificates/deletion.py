"""Upper bounds for networks without the exact expansion, causal or with MLPs, by deleting attention layer by layer.

This makes Remark D.2 of paper A explicit (docs/math.md §3.9). A layer is X_{ℓ+1} = f_ℓ(X_ℓ + Σ_h P_h X_ℓ V_h) and f_ℓ
maps single tokens. Let two inputs X, X' of the layer satisfy |X − X'| ≤ δ, |X| ≤ s and |X'| ≤ s' per coordinate. Then

    |P X − P' X'| ≤ δ + 2 tanh(Δθ/4)·s',     Δθ = 2(‖diag(δ) W diag(s)‖_{∞→1} + ‖diag(s') W diag(δ)‖_{∞→1}),

for every set of visible tokens. With M the average over the visible tokens, Σ_h P_h X V_h differs from M X Σ_h V_h by
at most Σ_h 2 tanh(θ_h/4) s|V_h|, which is smaller where scores are small and values cancel. An MLP with activation of
slope at most λ maps δ to at most λ·δ|W_in||W_out|.
"""

import torch

from depthgauge.base.errors import InputError
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.method import Bound, Method
from depthgauge.theory.linalg.bound_arithmetic import STEEPEST, BoundArithmetic, Upper, through, total
from depthgauge.theory.network.network import Layer, SelfAttentionNetwork
from depthgauge.theory.surrogates.expansion import match_heads


class Deletion(Method):
    """A proof on the box |X| ≤ φ, which contains the ball of radius φ.

    S' must be S with the attention of some layers deleted (values zero), or one layer with all heads of S in parallel.
    `parts` has, for each layer, the bound on the contribution of each of its heads alone.
    """

    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """As in the base class."""
        kept = _kept_layers(comparison.network, comparison.surrogate)
        layers = DeletedLayers(comparison.network, A)
        start = A.zeros(comparison.network.dim) + comparison.radius
        value, parts = layers.parallel(start) if kept is None else layers.deleted(start, kept)
        # ‖x_i‖₂ ≤ r implies |x_ic| ≤ r, so the bound on the box of radius r covers the ball.
        note = "tokens of bounded length were taken as a box of the same radius"
        return Bound(value, parts, ("deletion",), () if comparison.inputs.kind == "box" else (note,))


class DeletedLayers:
    """The bounds of the layers of S in an arithmetic; `start` is the bound on |X|."""

    def __init__(self, network: SelfAttentionNetwork, A: BoundArithmetic) -> None:
        self.network, self.A = network, A
        self.V = [A.exact(layer.value.detach()) for layer in network]
        self.W = [(A.exact(layer.query.detach()) @ layer.key.detach().mT) * network.scale for layer in network]

    def deleted(self, start: Upper, kept: set[int]) -> tuple[Upper, list[Upper]]:
        """Bound |S − S'| where S' keeps the attention of some layers."""
        network, zero = self.network, self.A.zeros(self.network.dim)
        state, other, apart, parts = start, start, zero, []
        for k, layer in enumerate(network):
            if k in kept:
                moved = self._attention_apart(k, state, other, apart)
                parts.append(self.A.zeros(layer.heads, network.dim))
            else:
                moved = self._attention_size(k, state)
                parts.append(through(state, self.V[k].size()))
            apart = self._token_map_apart(layer, (apart + moved) if network.skip else moved)
            state = self._grow(k, state)
            # Without skips and MLP the output of a deleted layer is 0; the previous bound of S' is kept, it is larger.
            if k in kept:
                other = self._grow(k, other)
            elif layer.mlp is not None:
                other = self._token_map(layer, other if network.skip else zero)
            apart = apart.least(state + other)
        return apart, parts

    def parallel(self, start: Upper) -> tuple[Upper, list[Upper]]:
        """Bound |S − S'| for S' = X + Σ attention_ℓh(X).

        Layer ℓ reads X instead of X_ℓ, and |X_ℓ − X| ≤ Σ_{k<ℓ} |attention_k(X_k)|.
        """
        zero = self.A.zeros(self.network.dim)
        state, apart, value, parts = start, zero, zero, []
        for k, layer in enumerate(self.network):
            moved = self._attention_apart(k, state, start, apart)
            value = value + moved
            parts.append(moved.expand(layer.heads, -1) / float(layer.heads))
            apart, state = apart + self._attention_size(k, state), self._grow(k, state)
        return value, parts

    def _norm(self, left: Upper, k: int, right: Upper) -> Upper:
        """Bound ‖diag(left) W_h diag(right)‖_{∞→1} for every head."""
        return self.A.sign_norm(self.W[k] * self.A.interval(left)[:, None] * self.A.interval(right))

    def _attention_size(self, k: int, state: Upper) -> Upper:
        """Bound |Σ_h P_h X V_h| ≤ min(Σ_h s|V_h|, s|Σ_h V_h| + Σ_h 2 tanh(θ_h/4) s|V_h|)."""
        V, alone = self.V[k], through(state, self.V[k].size())
        together = (state[None] @ V.sum(0).size())[0] + (self._uneven(k, state)[:, None] * alone).sum(0)
        return alone.sum(0).least(together)

    def _attention_apart(self, k: int, state: Upper, other: Upper, apart: Upper) -> Upper:
        """Bound |Σ_h (P_h X − P'_h X') V_h|, using P X − P'X' = P(X − X') + (P − P')X'.

        The term P(X − X') is bounded head by head by δ, or for all heads together about M as in `_attention_size`.
        """
        V, d_theta = self.V[k], (self._norm(apart, k, state) + self._norm(other, k, apart)) * 2.0
        turned = ((d_theta / 4.0).tanh() * 2.0)[:, None] * other
        alone = through((apart + turned).least(state + other), V.size()).sum(0)
        uneven = self._uneven(k, state)[:, None] * apart
        return alone.least((apart[None] @ V.sum(0).size())[0] + through(turned + uneven, V.size()).sum(0))

    def _uneven(self, k: int, state: Upper) -> Upper:
        """Bound 2·TV(row of P_h, row of M) ≤ 2 tanh(θ_h/4) with θ_h = 2‖diag(s) W_h diag(s)‖."""
        return (self._norm(state, k, state) * 2.0 / 4.0).tanh() * 2.0

    def _grow(self, k: int, state: Upper) -> Upper:
        """Bound |X_{ℓ+1}| from |X_ℓ| ≤ s."""
        mixed = through(state, self.V[k].size()).sum(0)
        return self._token_map(self.network[k], (state + mixed) if self.network.skip else mixed)

    def _token_map(self, layer: Layer, t: Upper) -> Upper:
        """Bound |f(y)| ≤ (t|W_in| + |b_in|)|W_out| + |b_out| for |y| ≤ t, as |act(z)| ≤ |z|; plus t with a skip."""
        if layer.mlp is None:
            return t
        w_in, b_in, w_out, b_out = (self.A.upper(w.detach().abs()) for w in layer.mlp.parameters())
        out = total((t[None] @ w_in)[0], b_in)[None] @ w_out
        return total(out[0], b_out, *([t] if self.network.mlp_skip else []))

    def _token_map_apart(self, layer: Layer, apart: Upper) -> Upper:
        """Bound |f(y) − f(y')| ≤ λ|y − y'||W_in||W_out|; plus |y − y'| with an MLP skip."""
        if layer.mlp is None:
            return apart
        w_in, _, w_out, _ = (self.A.upper(w.detach().abs()) for w in layer.mlp.parameters())
        out = ((apart[None] @ w_in * STEEPEST[self.network.activation]) @ w_out)[0]
        return out + apart if self.network.mlp_skip else out


def deletion_applies(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> bool:
    """Whether the surrogate is of a kind that `deletion_bound` covers."""
    try:
        _kept_layers(network, surrogate)
    except InputError:
        return False
    return True


def _kept_layers(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> set[int] | None:
    """Return the layers whose attention the surrogate keeps, or None if it has all heads in parallel.

    Its other layers have zero values, and all MLPs are equal. Without MLPs a deleted layer with a skip connection is
    the identity, so the surrogate may have the last layers of the network alone.
    """
    if network.has_attention_bias or surrogate.has_attention_bias:
        raise InputError("this certificate does not cover networks with biases in the attention")
    first, may_be_shorter = len(network) - len(surrogate), network.skip and not (network.has_mlp or surrogate.has_mlp)
    if len(surrogate) == 1 < len(network) and may_be_shorter and _all_heads_kept(network, surrogate):
        return None
    switches = ("skip", "causal", *(("activation", "mlp_skip") if network.has_mlp else ()))
    is_related = first == 0 or (first > 0 and may_be_shorter)
    if is_related and all(getattr(network, name) == getattr(surrogate, name) for name in switches):
        pairs = [(k, network[k], theirs) for k, theirs in enumerate(surrogate, start=first)]
        shown = [(k, mine, theirs) for k, mine, theirs in pairs if bool(theirs.value.detach().any())]
        is_same = all(_same_attention(mine, theirs) for _, mine, theirs in shown)
        is_same &= network.scale == surrogate.scale or not shown
        if is_same and all(_same_mlp(mine, theirs) for _, mine, theirs in pairs):
            return {k for k, _, _ in shown}
    raise InputError(_UNRELATED)


def _all_heads_kept(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork) -> bool:
    """Whether the one layer of the surrogate contains every head of the network once and no other head."""
    heads = sum(layer.heads for layer in network)
    matched = sum(len(match.heads) for match in match_heads(network, surrogate))
    return surrogate[0].heads == heads == matched


_UNRELATED = (
    "a network that is causal or has MLPs is certified only against itself with the attention of some layers deleted, "
    "or with all heads in parallel; make the surrogate with collapse(network, 'identity' | 'last-layer' | 'parallel'); "
    "with MLPs, 'parallel' is certified over tokens alone"
)


def _same_attention(mine: Layer, theirs: Layer) -> bool:
    return all(torch.equal(getattr(mine, name), getattr(theirs, name)) for name in ("query", "key", "value"))


def _same_mlp(mine: Layer, theirs: Layer) -> bool:
    if mine.mlp is None or theirs.mlp is None:
        return mine.mlp is theirs.mlp
    return all(torch.equal(a, b) for a, b in zip(mine.mlp.parameters(), theirs.mlp.parameters(), strict=True))
