"""The formulas of the certificates, derived again in plain NumPy from docs/math.md, and changed constants.

The two arithmetics of a certificate share its formulas. Here they are written a second time, in the simplest way, and
compared. A constant that is wrong in the code, or a term that is missing, gives another number.
"""

import math
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import erf

import depthgauge as dg
from depthgauge.base.errors import VerificationError
from depthgauge.theory.certificates import causal_proof, deletion, lead, parallel_blocks
from depthgauge.theory.certificates.compared_networks import Comparison, InputSet
from depthgauge.theory.certificates.difference import MatchedHeads
from depthgauge.theory.certificates.expansion_layers import ExpansionLayers
from depthgauge.theory.certificates.expansion_proof import ExpansionProof, layers_of
from depthgauge.theory.certificates.method import Method
from depthgauge.theory.certificates.regions import BallRegion, BoxRegion, PointRegion
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.depth.certificate import method_of
from depthgauge.theory.linalg.bound_arithmetic import Outward
from depthgauge.theory.linalg.enclosures import OutwardUpper
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.surrogates.closed_forms import fold
from depthgauge.theory.surrogates.expansion import match_heads

Array = NDArray[np.float64]
Moves = tuple[Array, Array, Array]
"""The distance of every state from its token, and the parts of it towards 0 and away from 0."""


def arrays(network: SelfAttentionNetwork) -> tuple[list[list[Array]], list[list[Array]]]:
    """Return β Q Kᵀ and V of every head of every layer."""
    W, V = [], []
    for layer in network:
        q, k, v = (w.detach().double().numpy() for w in (layer.query, layer.key, layer.value))
        W.append([network.scale * q[h] @ k[h].T for h in range(len(q))])
        V.append(list(v))
    return W, V


def sign_norm(M: Array) -> float:
    """Return ‖M‖_{∞→1} by enumeration."""
    M = M if len(M) <= len(M.T) else M.T
    return max(float(np.abs(np.array(x) @ M).sum()) for x in product((-1, 1), repeat=len(M)))


def spectral(M: Array) -> float:
    return float(np.linalg.norm(M, 2))


def lengths(M: Array) -> Array:
    return np.sqrt((M * M).sum(0))


class Box:
    """|x_c| ≤ φ; a length has one entry per coordinate."""

    def __init__(self, radius: float, d: int) -> None:
        self.start, self.radius = np.full(d, radius), radius

    def largest(self, M: Array) -> Array:
        return self.radius * np.abs(M).sum(0)

    length = largest

    def through(self, g: Array, M: Array) -> Array:
        return g @ np.abs(M)

    read = through

    def pair(self, u: Array, W: Array, v: Array) -> float:
        return sign_norm(u[:, None] * W * v)

    def query_pair(self, W: Array, ZW: Array, v: Array) -> float:
        return sign_norm(self.radius * np.vstack([W, ZW]) * v)


class Ball:
    """‖x‖ ≤ r; a length is one number."""

    def __init__(self, radius: float, d: int) -> None:
        self.start, self.radius = np.array([radius]), radius

    def largest(self, M: Array) -> Array:
        return self.radius * lengths(M)

    def length(self, M: Array) -> Array:
        return np.array([self.radius * spectral(M)])

    def through(self, g: Array, M: Array) -> Array:
        return g * spectral(M)

    def read(self, g: Array, M: Array) -> Array:
        return g * lengths(M)

    def pair(self, u: Array, W: Array, v: Array) -> float:
        return float((u * spectral(W) * v)[0])

    def query_pair(self, W: Array, ZW: Array, v: Array) -> float:
        return float(self.radius * (spectral(W) + spectral(ZW)) * v[0])


def drift_of(network: SelfAttentionNetwork, k: int, end: int) -> Array:
    """Return Z_{k:ℓ}, or N_{k:ℓ} without skips (§3.1)."""
    N = eye = np.eye(network.dim)
    for values in arrays(network)[1][k:end]:
        N = N @ (eye * network.skip + sum(values))
    return N - eye * network.skip


def recursion(
    network: SelfAttentionNetwork, region: Any, points: Array | None, *, joint: bool = True
) -> SimpleNamespace:
    """Return the bounds of all heads on the output, alone and beyond the leading terms (§3.2, §3.3, §3.8, §3.11).

    `states`, `spreads`, `owns`, `errs` and `theta` are those of the layers. Without `joint`, θ is that of §3.2.
    """
    (W, V), d, L, skip = arrays(network), network.dim, len(network), network.skip
    rho = 1 / (12 * math.sqrt(3))

    def drift(k: int, end: int) -> Array:
        return drift_of(network, k, end)

    def ranges(M: Array) -> Array:
        return 2 * region.largest(M) if points is None else np.ptp(points @ M, axis=0)

    def widest(M: Array) -> float:
        assert points is not None
        return float(np.ptp(points @ M @ points.T, axis=1).max())

    theta: list[list[float]] = []
    moved: list[list[float]] = []
    owns: list[Array] = []
    errs: list[Array] = []
    spreads: list[Array] = []
    states: list[Array] = []
    state = region.start

    def spread_of(k: int, M: Array, read: Callable[[Array, Array], Array]) -> Array:
        return 2 * read(spreads[k], M) if points is None else ranges(M) + 2 * read(owns[k], M)

    def query_moved(j: int, k: int, M: Array) -> float:
        """Bound the range of e M yᵀ over points y, e the part of err_k of layer j, by products V M (§3.11)."""
        assert points is not None
        apart, found = points - (points.max(0) + points.min(0)) / 2, 0.0
        for h, v in enumerate(V[j]):
            for N in (v @ M, v @ drift(j + 1, k) @ M):
                reach = np.ptp(apart @ N.T @ points.T, axis=1).max() + owns[j] @ ranges(N.T)
                found += 2 * math.tanh(theta[j][h] / 4) * float(reach)
        return found

    def key_moved(j: int, Z: Array, M: Array, query: Array) -> float:
        """Bound |(x + m Z) M oᵀ|, o the part of own_k of layer j, in the same way."""
        found = 0.0
        for h, v in enumerate(V[j]):
            reach = widest(M @ v.T) + widest(Z @ M @ v.T) + 2 * float(query @ (owns[j] @ np.abs(v)))
            found += math.tanh(theta[j][h] / 4) * reach
        return found

    def own_read(k: int, M: Array) -> Array:
        read = region.read(owns[k], M)
        if points is None or not k:
            return read  # type: ignore[no-any-return]
        by_products = [
            math.tanh(theta[j][h] / 4) * (ranges(v @ M) + 2 * region.read(owns[j], v @ M))
            for j in range(k)
            for h, v in enumerate(V[j])
        ]
        return np.minimum(read, sum(by_products))

    for k in range(L):
        own, common = 0 * region.start, 0 * region.start
        for j in range(k):
            for h in range(len(V[j])):
                uneven = math.tanh(theta[j][h] / 4)
                if skip or j == k - 1:
                    own = own + uneven * spread_of(j, V[j][h], region.through)
                if skip or j < k - 1:
                    common = common + uneven * spread_of(j, V[j][h] @ drift(j + 1, k), region.through)
        err, Z = own + common, drift(0, k)
        if k:
            grown = skip * state + sum(region.through(state, v) for v in V[k - 1])
            state = np.minimum(skip * region.start + region.length(Z) + err, grown)
        owns.append(own)
        errs.append(err)
        states.append(state)
        spreads.append(np.minimum(region.start * (skip or k == 0) + own, state))
        theta.append([])
        moved.append([])
        for M in W[k]:
            if points is None:
                by_error = region.pair(err, M, spreads[k])
                most = 2 * (region.query_pair(M, Z @ M, spreads[k]) + by_error)
                theta[k].append(min(2 * region.pair(state, M, spreads[k]), most if joint else math.inf))
                moved[k].append(2 * (region.query_pair(M, Z @ M, own) + by_error))
            else:
                query = np.abs(points @ M).max(0) + np.abs(points @ Z @ M).max(0)
                by_query, by_key, late = float(err @ ranges(M.T)), 2 * float(query @ own), err @ np.abs(M)
                if k:
                    by_query = min(by_query, sum(query_moved(j, k, M) for j in range(k)))
                    by_key = min(by_key, 2 * sum(key_moved(j, Z, M, query) for j in range(k)))
                moved[k].append(by_query + by_key + 2 * float(late @ own))
                theta[k].append(widest(M) + widest(Z @ M) + moved[k][-1])
    alone, rest = np.zeros(d), np.zeros(d)
    for k in range(L):
        for h in range(len(V[k])):
            t = theta[k][h]
            for M in (V[k][h], V[k][h] @ drift(k + 1, L)) if skip else (V[k][h] @ drift(k + 1, L),):
                alone = alone + math.tanh(t / 4) * spread_of(k, M, region.read)
                curved = (rho * t**2 + moved[k][h] / 4) * ranges(M)
                rest = rest + curved + 2 * math.tanh(t / 4) * own_read(k, M)
    return SimpleNamespace(alone=alone, rest=rest, states=states, spreads=spreads, owns=owns, errs=errs, theta=theta)


POINTS = torch.randn(5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
SETS: dict[str, InputSet | Tokens] = {
    "box": InputSet("box", 0.9),
    "ball": InputSet("ball", 1.3),
    "tokens": Tokens(POINTS),
}


def plain_region(name: str) -> tuple[Any, Array | None]:
    if name == "tokens":
        region = Box(1.0, 3)
        region.start = POINTS.numpy().__abs__().max(0)
        region.length = lambda M: np.abs(POINTS.numpy() @ M).max(0)  # type: ignore[method-assign]
        return region, POINTS.numpy()
    return {"box": Box(0.9, 3), "ball": Ball(1.3, 3)}[name], None


def expansion_differs(name: str, eta: float = 0.2) -> float:
    """Return the largest relative difference of the code from the derivation."""
    network = dg.random_network(layers=3, heads=2, dim=3, eta=eta, seed=5)
    layers = layers_of(Comparison(network, network, SETS[name]), Outward())
    found = [sum(part.sum(0).floats().numpy() for part in parts) for parts in (layers.added(), layers.beyond())]
    expected = recursion(network, *plain_region(name))
    return max(float(np.abs(a / b - 1).max()) for a, b in zip(found, (expected.alone, expected.rest), strict=True))


def without_skips_differs() -> float:
    network = dg.random_network(layers=3, heads=2, dim=3, eta=0.4, seed=5, skip=False)
    layers = layers_of(Comparison(network, network, SETS["box"]), Outward(), joint=False)
    found = sum(part.sum(0).floats().numpy() for part in layers.added())
    return float(np.abs(found / recursion(network, *plain_region("box"), joint=False).alone - 1).max())


def test_the_recursion_without_skips_is_that_of_the_derivation() -> None:
    assert without_skips_differs() < 1e-10


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("eta", [0.02, 0.2, 0.7])
def test_the_recursion_is_that_of_the_derivation(name: str, eta: float) -> None:
    assert expansion_differs(name, eta) < 1e-10


# --- other methods ----------------------------------------------------------------------------------------------------


def causal_alone(network: SelfAttentionNetwork, points: Array) -> Array:
    """Return the bound of all heads of a causal network over points, each alone (§3.12)."""
    (W, V), d, L = arrays(network), network.dim, len(network)
    sums = [sum(v) for v in V]

    def orders(k: int, end: int) -> list[Array]:
        found = [np.eye(d)]
        for ell in range(k, end):
            longer = [np.zeros((d, d)), *(e @ sums[ell] for e in found)]
            found = [a + b for a, b in zip([*found, np.zeros((d, d))], longer, strict=True)]
        return found

    def ranges(M: Array) -> Array:
        return np.asarray(np.ptp(points @ M, axis=0))

    def largest(M: Array) -> Array:
        return np.asarray(np.abs(points @ M).max(0))

    def widest(M: Array) -> float:
        return float(np.ptp(points @ M @ points.T, axis=1).max())

    thetas: list[list[float]] = []
    errs: list[Array] = []
    drifts: list[Array] = []

    def gap(k: int, h: int, M: Array) -> Array:
        errors = 2 * errs[k] @ np.abs(M)
        return math.tanh(thetas[k][h] / 4) * (ranges(M) + ranges(drifts[k] @ M) + errors)

    for k in range(L):
        e = orders(0, k)
        drifts.append(e[1] if k else np.zeros((d, d)))
        err = sum((largest(M) for M in e[2:]), np.zeros(d))
        for j in range(k):
            for after in orders(j + 1, k):
                err = err + sum(gap(j, h, M @ after) for h, M in enumerate(V[j]))
        errs.append(err)
        thetas.append([])
        for M in W[k]:
            D = drifts[k]
            query = largest(M) + largest(D @ M) + err @ np.abs(M)
            key = ranges(M.T) + ranges(D @ M.T) + 2 * query
            loose = widest(M @ D.T) + widest(D @ M @ D.T) + float((err * key).sum())
            thetas[k].append(widest(M) + widest(D @ M) + loose)
    return sum(
        (gap(k, h, M @ after) for k in range(L) for after in orders(k + 1, L) for h, M in enumerate(V[k])),
        np.zeros(d),
    )


def causal_differs() -> float:
    network = dg.random_network(layers=3, heads=2, dim=3, eta=0.2, seed=5, causal=True)
    A = Outward()
    layers = causal_proof.CausalLayers(causal_proof.CausalExpansion(network, A), PointRegion(A, Tokens(POINTS)))
    found = sum(layers.added(k).sum(0).floats().numpy() for k in range(3))
    return float(np.abs(found / causal_alone(network, POINTS.numpy()) - 1).max())


def test_the_causal_recursion_is_that_of_the_derivation() -> None:
    assert causal_differs() < 1e-10


def deleted(network: SelfAttentionNetwork, radius: float, kept: set[int]) -> Array:
    """Return the bound for S' without the attention of the other layers, with MLPs of GELU that have skips (§3.9)."""
    (W, V), d = arrays(network), network.dim
    state = other = np.full(d, radius)
    apart = np.zeros(d)
    for k, layer in enumerate(network):
        assert layer.mlp is not None
        w_in, b_in, w_out, b_out = (np.abs(w.detach().numpy()) for w in layer.mlp.parameters())
        whole = np.abs(sum(V[k]))
        uneven = [2 * math.tanh(sign_norm(state[:, None] * w * state) / 2) for w in W[k]]
        heads = list(zip(W[k], V[k], uneven, strict=True))
        if k in kept:
            ranges = [sign_norm(apart[:, None] * w * state) + sign_norm(other[:, None] * w * apart) for w in W[k]]
            turned = [2 * math.tanh(r / 2) * other for r in ranges]
            pairs = list(zip(heads, turned, strict=True))
            alone = sum(np.minimum(apart + t, state + other) @ np.abs(v) for (_, v, _), t in pairs)
            together = apart @ whole + sum((t + u * apart) @ np.abs(v) for (_, v, u), t in pairs)
        else:
            alone = sum(state @ np.abs(v) for _, v, _ in heads)
            together = state @ whole + sum(u * state @ np.abs(v) for _, v, u in heads)
        moved = apart + np.minimum(alone, together)
        apart = moved + 1.13 * moved @ w_in @ w_out
        grown = [x + sum(x @ np.abs(v) for v in V[k]) for x in (state, other)]
        grown[1] = grown[1] if k in kept else other
        state, other = (x + (x @ w_in + b_in) @ w_out + b_out for x in grown)
        apart = np.minimum(apart, state + other)
    return apart


def deletion_differs() -> float:
    network = dg.random_network(layers=3, heads=2, dim=3, eta=0.4, seed=5, mlp=4, mlp_skip=True, activation="gelu")
    small = dg.collapse(network, method="last-layer")
    found = deletion.Deletion(Comparison(network, small, InputSet("box", 0.9))).value.numpy()
    return float(np.abs(found / deleted(network, 0.9, {2}) - 1).max())


def test_the_deletion_bound_is_that_of_the_derivation() -> None:
    assert deletion_differs() < 1e-10


def wide_block(network: SelfAttentionNetwork, points: Array, *, jacobians: bool = True) -> Array:
    """Return the bound of the wide block for LayerNorm with gain 1, without biases, with MLPs of GELU (§3.13)."""
    (W, V), (v, d), L = arrays(network), points.shape, len(network)
    c = points - points.mean(1, keepdims=True)
    sigma = np.sqrt((c * c).mean(1) + 1e-5)
    u, J = c / sigma[:, None], np.full((d, d), 1 / d)
    mlps = [[w.detach().numpy() for w in layer.mlp.parameters()] for layer in network if layer.mlp is not None]
    hidden = [u @ w_in + b_in for w_in, b_in, _, _ in mlps]
    Phi = [(1 + erf(z / math.sqrt(2))) / 2 for z in hidden]
    slope = [P + z * np.exp(-z * z / 2) / math.sqrt(2 * math.pi) for P, z in zip(Phi, hidden, strict=True)]
    m = [z * P @ mlp[2] + mlp[3] for z, P, mlp in zip(hidden, Phi, mlps, strict=True)]
    sums = [sum(one) for one in V]

    def norm(x: Array) -> Array:
        return np.sqrt((x * x).sum(-1))

    def diameter(x: Array) -> float:
        return float(2 * norm(x - x.mean(0)).max())

    def before(parts: list[Array], k: int, like: Array) -> Array:
        return sum(parts[:k], np.zeros_like(like))

    def relative(rho: Array) -> Array:
        return rho / (math.sqrt(d) * sigma)

    def tangent(state: Moves) -> Array:
        s, a = relative(state[0]), relative(state[1])
        q = s / np.where(a < 1, 1 - a, 1.0)
        return np.asarray(np.where(a < 1, 1 - 1 / np.sqrt(1 + q * q), 2.0))

    def lowered(state: Moves) -> Array:
        s = relative(state[0])
        return np.minimum(np.where(s < 1, 1 - np.sqrt(1 - np.minimum(s, 1) ** 2), 2.0), tangent(state))

    def shift(state: Moves) -> Array:
        return np.asarray(math.sqrt(d) * np.sqrt(2 * lowered(state)))

    def between(apart: Array, one: Moves, two: Moves) -> Array:
        a = relative(np.maximum(one[1], two[1]))
        near = apart / sigma / np.where(a < 1, 1 - a, np.nan)
        return np.fmin(near, shift(one) + shift(two))

    def bend(apart: Array, one: Moves, two: Moves) -> Array:
        a = relative(np.maximum(one[1], two[1]))
        curved = apart / sigma * relative(one[0] + two[0]) / np.where(a < 1, 1 - a, np.nan) / math.sqrt(3)
        return np.fmin(curved, between(apart, one, two) + apart / sigma)

    def lead(value: Array, own: Array) -> Array:
        """The lead of every t and u, [t, u, d]."""
        return np.asarray((u @ value)[None] + own[:, None])

    def moved(leads: Array, late: Array) -> Moves:
        far = norm(leads).max(1) + late
        along = np.einsum("td,tud->tu", u, leads) / math.sqrt(d)
        both = (np.minimum(far, np.maximum(0.0, (sign * along).max(1)) + late) for sign in (-1, 1))
        return far, *both

    def led(leads: Array, matrices: list[Array]) -> Array:
        return np.stack([norm(leads[t] @ D[t] @ matrices[t]).max() for t in range(v)])

    def stretched(state: Moves) -> Array:
        a, b, s = relative(state[1]), relative(state[2]), relative(state[0])
        return np.maximum(np.where(a < 1, a / np.where(a < 1, 1 - a, 1.0), np.inf), b + s * s / 2)

    def apart_from(state: Moves, late: Array, leads: Array, matrices: list[Array]) -> Array:
        along = np.stack([norm(u[t] @ matrices[t]) for t in range(v)])
        own = led(leads, matrices) + late / sigma * np.stack([spectral(M) for M in matrices])
        return lowered(state) * along + (1 + stretched(state)) * own

    def changes(state: Moves, late: Array, leads: Array, Y: Array) -> Array:
        whole = shift(state)[:, None] * lengths(Y)
        products = np.stack([np.abs(leads[t] @ D[t] @ Y).max(0) for t in range(v)])
        own = (1 + stretched(state))[:, None] * (products + (late / sigma)[:, None] * lengths(Y))
        return np.minimum(whole, lowered(state)[:, None] * np.abs(u @ Y) + own) if jacobians else whole

    D = [(np.eye(d) - J - np.outer(u[t], u[t]) / d) / sigma[t] for t in range(v)]
    none, tau = np.zeros(v), [[np.tanh(norm(u @ w) * diameter(u) / 4) for w in W[k]] for k in range(L)]
    spread = [[diameter(u @ one) for one in V[k]] for k in range(L)]
    E = [np.asarray(sum(t * s for t, s in zip(tau[k], spread[k], strict=True))) for k in range(L)]
    G: list[Array] = []
    F: list[Array] = []
    R_A, R_M, still = np.zeros((2, v, d)), np.zeros((v, d)), (none, none, none)
    other = moved(lead(before(sums, L, J), 0 * m[0]), sum(E, none))
    for k in range(L):
        own = before(m, k, m[0])
        late = sum(E[:k], none) + sum(G, none) + sum(F, none)
        leads = lead(before(sums, k, J), own)
        state = moved(leads, late)
        kappa = shift(state).max()
        by_norm = shift(state) * spectral(sums[k])
        each = np.minimum(by_norm, apart_from(state, late, leads, [sums[k]] * v)) if jacobians else by_norm
        total = np.full(v, each.max())
        for h, (w, one) in enumerate(zip(W[k], V[k], strict=True)):
            turns = shift(state) * (diameter(u @ w.T) + 2 * kappa * spectral(w)) + 2 * kappa * norm(u @ w)
            turned = np.tanh(turns / 4)
            both = 2 * np.minimum(1.0, tau[k][h] + turned)
            R_M += turned[:, None] * np.ptp(u @ one, axis=0) + both[:, None] * changes(state, late, leads, one).max(0)
            total += turned * spread[k][h] + kappa * both * spectral(one)
        G.append(total)
        rest = (bend(state[0], state, still) + late / sigma)[:, None] * lengths(sums[k])
        stretch, products = stretched(state)[:, None], np.stack([leads[t] @ D[t] @ sums[k] for t in range(v)])
        common = stretch * np.abs(products).max(1) + (1 + stretch) * (late / sigma)[:, None] * lengths(sums[k])
        for side, sign in enumerate((1, -1)):
            signed = common + lowered(state)[:, None] * np.maximum(0.0, -sign * u @ sums[k])
            R_A[side] += np.minimum(rest, signed) if jacobians else rest
        late_y = sum(E[: k + 1], none) + sum(G, none) + sum(F, none)
        leads = lead(before(sums, k + 1, J), own)
        state = moved(leads, late_y)
        lag = sum(E[k + 1 :], none) + sum(G, none) + sum(F, none)
        apart = norm(lead(-sum(sums[k + 1 :], np.zeros((d, d))), own)).max(1) + lag
        w_in, _, w_out, _ = mlps[k]
        slopes = [w_in * slope[k][t] @ w_out for t in range(v)]
        loose = bend(apart, state, other) + lag / sigma
        far = shift(state)
        moves = changes(state, late_y, leads, w_in)
        others = changes(other, sum(E, none), lead(before(sums, L, J), 0 * m[0]), w_in)
        pair = (moves + others) * between(apart, state, other)[:, None]
        R_M += loose[:, None] * np.stack([lengths(M) for M in slopes])
        R_M += 0.798 / 2 * (pair * lengths(w_in)) @ np.abs(w_out)
        kinked = 0.798 / 2 * moves**2
        jacobian = apart_from(state, late_y, leads, slopes) + norm(kinked) * spectral(w_out)
        by_norm = 1.13 * spectral(w_in) * spectral(w_out) * far
        F.append(np.minimum(by_norm, jacobian) if jacobians else by_norm)
    sides = np.full((2, 2, d), -np.inf)
    for t in range(v):
        psi = np.zeros((2, v, d))
        for k in range(L):
            own = before(m, k, m[0])[t]
            later = sum(sums[k + 1 :], np.zeros((d, d)))
            psi[0] += (u @ before(sums, k, J) + own) @ D[t] @ sums[k]
            psi[1] += (own - u @ later) @ D[t] @ (mlps[k][0] * slope[k][t] @ mlps[k][2])
        for part, rests in enumerate((R_A[:, t], R_M[None, t].repeat(2, 0))):
            for side, sign in enumerate((1, -1)):
                sides[part, side] = np.maximum(sides[part, side], (sign * psi[part]).max(0) + rests[side])
    return np.asarray((sides[0] + sides[1]).max(0))


def wide_block_differs(*, jacobians: bool = True) -> float:
    kind: dict[str, Any] = {"mlp": 5, "mlp_skip": True, "norm": "pre", "activation": "gelu"}
    network = dg.random_network(layers=3, heads=2, dim=4, eta=0.05, seed=5, **kind)
    points = torch.randn(5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    comparison = Comparison(network, dg.collapse(network, method="parallel"), Tokens(points))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_blocks, "PAIRED", 1e9 if jacobians else 0.0)
        found = parallel_blocks.WideBlock(comparison).value.numpy()
    return float(np.abs(found / wide_block(network, points.numpy(), jacobians=jacobians) - 1).max())


def test_the_wide_block_is_that_of_the_derivation() -> None:
    for jacobians in (True, False):
        assert wide_block_differs(jacobians=jacobians) < 1e-6  # the slope of GELU is known to 1e-7


def leads_differ(name: str) -> float:
    """Return how far the leading terms are from the derivation: scalings of 1 on the ball, all pairs of points."""
    network = dg.random_network(layers=2, heads=2, dim=3, eta=0.1, seed=5)
    (W, V), d = arrays(network), 3
    S = layers_of(Comparison(network, network, SETS[name]), Outward())
    proof = ExpansionProof(Comparison(network, dg.collapse(network), SETS[name]), S)
    assert proof.T is not None
    found = S.region.lead(proof.T)[0].value.floats().numpy()
    T = sum(np.einsum("bc,ea->abce", w, v) for k in range(2) for w, v in zip(W[k], V[k], strict=True))
    T = (T + T.swapaxes(-1, -2)) / 2
    if name == "ball":
        expected = np.array([np.linalg.norm(T[a].reshape(d, d * d), 2) * 1.3**3 for a in range(d)])
    else:
        x = POINTS.numpy()
        delta = x[:, None] - x
        form = np.einsum("xb,abce,tuc,tue->axtu", x, T, delta, delta)
        expected = np.abs(form).max((1, 2, 3)) / 2
    return float(np.abs(found / expected - 1).max())


@pytest.mark.parametrize("name", ["ball", "tokens"])
def test_the_leading_terms_are_those_of_the_derivation(name: str) -> None:
    assert leads_differ(name) < 1e-10


# --- two networks -----------------------------------------------------------------------------------------------------


def largest_product(p: float, q: float, radius: float) -> float:
    """Return max (p + qμ)(φ² − μ²) over 0 ≤ μ ≤ φ, at the root of the derivative."""
    mu = (-p + math.sqrt(p * p + 3 * q * q * radius**2)) / (3 * q) if q > 0 else 0.0
    return (p + q * mu) * (radius**2 - mu**2)


def tensors(network: SelfAttentionNetwork) -> tuple[Array, Array]:
    """Return T and Tᵐ of §3.3, [a, b, c, e], symmetric in (c, e)."""
    (W, V), d, L = arrays(network), network.dim, len(network)
    T, Tm = np.zeros((d,) * 4), np.zeros((d,) * 4)
    for k in range(L):
        Z, after = drift_of(network, 0, k), drift_of(network, k + 1, L)
        for w, v in zip(W[k], V[k], strict=True):
            T += np.einsum("bc,ea->abce", w, v)
            Tm += np.einsum("bc,ea->abce", Z @ w, v) + np.einsum("bc,ea->abce", (np.eye(d) + Z) @ w, v @ after)
    return (T + T.swapaxes(-1, -2)) / 2, (Tm + Tm.swapaxes(-1, -2)) / 2


def largest_square(T: Array, alpha: float, nu: float) -> float:
    """Return the largest eigenvalue of the form of §3.5, on an orthonormal basis of the symmetric matrices."""
    d = len(T)
    basis = []
    for j, k in product(range(d), repeat=2):
        if j <= k:
            E = np.zeros((d, d))
            E[j, k] = E[k, j] = 1.0 if j == k else math.sqrt(0.5)
            basis.append(E)

    def form(Y: Array, X: Array) -> float:
        inner = sum(float((t * Y).sum() * (t * X).sum()) for t in T)
        crossed = sum(float(np.trace(t @ Y @ t @ X)) for t in T)
        return alpha * inner + (1 - alpha) * crossed - nu * float(np.trace(Y) * np.trace(X) - (Y * X).sum())

    return float(np.linalg.eigvalsh(np.array([[form(Y, X) for Y in basis] for X in basis])).max())


def joint_differs(name: str, method: str, effort: str = "default") -> float:
    """Return how far the whole joint bound is from §3.3, §3.5 and §3.6, with the scalings and multipliers it chose."""
    network = dg.random_network(layers=3, heads=2, dim=3, eta=0.03, seed=5)
    small, radius, d = dg.collapse(network, method=method), SETS[name].radius, 3
    comparison = Comparison(network, small, SETS[name])
    proof = ExpansionProof(comparison, layers_of(comparison, Outward()), effort=effort)
    assert proof.names[0] == "joint"
    (T, Tm), (T_, Tm_) = tensors(network), tensors(small)
    T, Tm = T - T_, Tm - Tm_
    record = proof.arithmetic.record
    scalings = [found for what, found in record if what == "scalings of a lead"][-1]
    rows, columns = (x.numpy() for x in scalings)

    def assemble(a: int, sigma: float, row: Array, column: Array) -> float:
        wide = (Tm[a] * column[:, None, None] * column[None, :, None] * column).reshape(d, d * d)
        if name == "ball":
            return largest_product(sigma * radius, spectral(Tm[a].reshape(d, d * d)), radius)
        u, w = (row**-2).sum(), (column**-2).sum()
        return float(largest_product(sigma * radius * math.sqrt(u), spectral(wide) * math.sqrt(w), radius) * w)

    def scaled_tensor(a: int, row: Array, column: Array) -> Array:
        ones = np.ones(d)
        row, column = (ones, ones) if name == "ball" else (row, column)
        return np.asarray(T[a] * row[:, None, None] * column[None, :, None] * column)

    leading = []
    for a in range(d):
        value = assemble(a, spectral(scaled_tensor(a, rows[a], columns[a]).reshape(d, d * d)), rows[a], columns[a])
        leading.append(min(value, radius**3 * (np.abs(T[a]).sum() + np.abs(Tm[a]).sum())) if name == "box" else value)
    chosen = [found for what, found in record if what == "a coordinate to sharpen" and found is not None]
    used = [found for what, found in record if what == "multipliers"]
    for a, choice in zip(chosen, used, strict=True):
        row, column = choice.row_scale.numpy(), choice.column_scale.numpy()
        top = largest_square(scaled_tensor(a, row, column), choice.alpha, choice.nu)
        leading[a] = min(leading[a], assemble(a, math.sqrt(top), row, column))
    mine, theirs = (recursion(net, *plain_region(name)) for net in (network, small))
    drift = drift_of(network, 0, len(network)) - drift_of(small, 0, 1)
    expected = plain_region(name)[0].largest(drift) + np.array(leading) + mine.rest + theirs.rest
    assert effort == "default" or chosen
    return float(np.abs(proof.value.numpy() / expected - 1).max())


@pytest.mark.parametrize(
    ("name", "effort"), [("box", "default"), ("ball", "default"), ("box", "high"), ("ball", "high")]
)
@pytest.mark.parametrize("method", ["mean-field", "corrected", "last-layer"])
def test_the_joint_bound_is_that_of_the_derivation(name: str, method: str, effort: str) -> None:
    assert joint_differs(name, method, effort) < 1e-7


def matched(network: SelfAttentionNetwork, small: SelfAttentionNetwork, pairs: list[tuple[int, int]]) -> Array:
    """Return the bound on the difference of whole layers that occur in both networks, on the box (§3.6)."""
    (W, V), (_, V_) = arrays(network), arrays(small)
    X, Y = recursion(network, Box(0.9, 3), None), recursion(small, Box(0.9, 3), None, joint=False)
    (L, L_), found = (len(network), len(small)), np.zeros(3)
    partner, partner_ = dict(pairs), {b: a for a, b in pairs}
    g: dict[int, list[Array]] = {}

    def G(of: SimpleNamespace, k: int) -> list[Array]:
        return [2 * math.tanh(t / 4) * of.spreads[k] for t in of.theta[k]]

    def common(j: int, end: int, end_: int) -> Array:
        Z, Z_ = drift_of(network, j + 1, end), drift_of(small, partner[j] + 1, end_)
        each = list(zip(g[j], G(X, j), G(Y, partner[j]), V[j], strict=True))
        near = sum(a @ np.abs(v @ Z) + c @ np.abs(v @ (Z - Z_)) for a, _, c, v in each)
        return np.asarray(np.minimum(near, sum(b @ np.abs(v @ Z) + c @ np.abs(v @ Z_) for _, b, c, v in each)))

    def difference(j: int) -> Array:
        return np.asarray(sum(a @ np.abs(v) for a, v in zip(g[j], V[j], strict=True)))

    for k, k_ in pairs:
        drift = 0.9 * np.abs(drift_of(network, 0, k) - drift_of(small, 0, k_)).sum(0)
        own, err = np.zeros(3), drift
        sides = ((X, network, V, k, k_, partner), (Y, small, V_, k_, k, partner_))
        for of, net, values, end, before, other in sides:
            for j in range(end):
                if other.get(j, before) >= before:
                    alone = sum(a @ np.abs(v) for a, v in zip(G(of, j), values[j], strict=True))
                    after = sum(
                        a @ np.abs(v @ drift_of(net, j + 1, end)) for a, v in zip(G(of, j), values[j], strict=True)
                    )
                    own, err = own + alone, err + alone + after
        for j in (j for j, j_ in pairs if j < k and j_ < k_):
            own, err = own + difference(j), err + difference(j) + common(j, k, k_)
        own, err = np.minimum(own, X.owns[k] + Y.owns[k_]), np.minimum(err, drift + X.errs[k] + Y.errs[k_])
        g[k] = []
        for h, w in enumerate(W[k]):
            apart = 2 * (sign_norm(err[:, None] * w * X.spreads[k]) + sign_norm(Y.states[k_][:, None] * w * own))
            turned = math.tanh(apart / 4) * X.spreads[k] + math.tanh(Y.theta[k_][h] / 4) * own
            g[k].append(np.minimum(2 * turned, G(X, k)[h] + G(Y, k_)[h]))
        found = found + difference(k) + common(k, L, L_)
    return found


def matched_differs() -> float:
    network, worst = dg.random_network(layers=4, heads=2, dim=3, eta=0.2, seed=5), 0.0
    for kept in ([0, 2], [1, 3], [0, 1, 3]):
        small = fold(network, kept)
        matches = match_heads(network, small)
        assert [match.k for match in matches] == kept
        layers = layers_of(Comparison(network, small, SETS["box"]), Outward())
        other = layers_of(Comparison(small, small, SETS["box"]), Outward(), joint=False)
        heads = MatchedHeads(layers.region, layers, other, matches)
        found = sum(heads.added(match).floats().numpy() for match in matches)
        expected = matched(network, small, [(match.k, match.other) for match in matches])
        worst = max(worst, float(np.abs(found / expected - 1).max()))
    return worst


def test_matched_heads_are_those_of_the_derivation() -> None:
    assert matched_differs() < 1e-10


def parallel_differs() -> float:
    """Return how far the bound of all heads side by side, for a network without the expansion, is from §3.9."""
    network = dg.random_network(layers=3, heads=2, dim=3, eta=0.3, seed=5, causal=True)
    (W, V), start = arrays(network), np.full(3, 0.9)
    state, apart, expected = start, np.zeros(3), np.zeros(3)
    for w, v in zip(W, V, strict=True):
        heads = list(zip(w, v, strict=True))
        uneven = [2 * math.tanh(sign_norm(state[:, None] * m * state) / 2) for m in w]
        ranges = [sign_norm(apart[:, None] * m * state) + sign_norm(start[:, None] * m * apart) for m in w]
        turned = [2 * math.tanh(r / 2) * start for r in ranges]
        alone = sum(np.minimum(apart + t, state + start) @ np.abs(x) for t, (_, x) in zip(turned, heads, strict=True))
        each = zip(turned, uneven, v, strict=True)
        expected = expected + np.minimum(
            alone, apart @ np.abs(sum(v)) + sum((t + u * apart) @ np.abs(x) for t, u, x in each)
        )
        size = sum(state @ np.abs(x) for x in v)
        together = state @ np.abs(sum(v)) + sum(u * state @ np.abs(x) for u, x in zip(uneven, v, strict=True))
        apart, state = apart + np.minimum(size, together), state + size
    comparison = Comparison(network, dg.collapse(network, "parallel"), SETS["box"])
    return float(np.abs(deletion.Deletion(comparison).value.numpy() / expected - 1).max())


def test_the_parallel_bound_is_that_of_the_derivation() -> None:
    assert parallel_differs() < 1e-10


# --- changed constants ------------------------------------------------------------------------------------------------


def scaled(owner: Any, name: str, factor: float) -> tuple[Any, str, Any]:
    """Return the method `name` with its results multiplied by a factor."""
    before = getattr(owner, name)

    def changed(*given: Any, **named: Any) -> Any:
        found = before(*given, **named)
        return found * factor

    return owner, name, changed


PLANTED: dict[str, tuple[tuple[Any, str, Any], Callable[[], float]]] = {
    "ρ": ((Outward, "rho", property(lambda A: A.upper(0.99 / (12 * math.sqrt(3))))), lambda: expansion_differs("box")),
    "tanh, box": (scaled(OutwardUpper, "tanh", 0.99), lambda: expansion_differs("box")),
    "tanh, causal": (scaled(OutwardUpper, "tanh", 0.99), causal_differs),
    "tanh, deletion": (scaled(OutwardUpper, "tanh", 0.99), deletion_differs),
    "tanh, wide block": (scaled(OutwardUpper, "tanh", 0.99), wide_block_differs),
    "spread on the box": (scaled(BoxRegion, "spread_range", 0.99), lambda: expansion_differs("box")),
    "spread on the ball": (scaled(BallRegion, "spread_range", 0.99), lambda: expansion_differs("ball")),
    "length on the ball": (scaled(BallRegion, "through", 0.99), lambda: expansion_differs("ball")),
    "ranges of points": (scaled(PointRegion, "ranges", 0.99), lambda: expansion_differs("tokens")),
    "ranges of points, causal": (scaled(PointRegion, "ranges", 0.99), causal_differs),
    "rows of points": (scaled(PointRegion, "widest_row", 0.99), lambda: expansion_differs("tokens")),
    "errors of queries": (scaled(ExpansionLayers, "_query_moved", 0.99), lambda: expansion_differs("tokens")),
    "errors of keys": (scaled(ExpansionLayers, "_key_moved", 0.99), lambda: expansion_differs("tokens")),
    "errors of values": (scaled(ExpansionLayers, "_own_read", 0.99), lambda: expansion_differs("tokens")),
    "rest": (scaled(ExpansionLayers, "rest", 0.99), lambda: expansion_differs("tokens")),
    "spread, without skips": (scaled(BoxRegion, "spread_range", 0.99), without_skips_differs),
    "tanh, matched heads": (scaled(OutwardUpper, "tanh", 0.99), matched_differs),
    "lengths, matched heads": (scaled(BoxRegion, "through", 0.99), matched_differs),
    "common parts of matched heads": (scaled(MatchedHeads, "_in_common", 0.99), matched_differs),
    "sign norm": (scaled(Outward, "sign_norm", 0.99), lambda: joint_differs("box", "corrected")),
    "cubic maximum": (scaled(lead, "cubic_maximum", 0.99), lambda: joint_differs("box", "mean-field")),
    "norms of the lead on the box": (
        scaled(Outward, "spectral_norm", 0.99),
        lambda: joint_differs("box", "mean-field"),
    ),
    "cubic maximum, ball": (scaled(lead, "cubic_maximum", 0.99), lambda: joint_differs("ball", "mean-field")),
    "sums of squares": (
        scaled(Outward, "largest_eigenvalue", 0.99),
        lambda: joint_differs("box", "mean-field", "high"),
    ),
    "sums of squares, ball": (
        scaled(Outward, "largest_eigenvalue", 0.99),
        lambda: joint_differs("ball", "mean-field", "high"),
    ),
    "linear part": (scaled(BoxRegion, "largest", 0.99), lambda: joint_differs("box", "last-layer")),
    "tanh, parallel": (scaled(OutwardUpper, "tanh", 0.99), parallel_differs),
    "attention, parallel": (scaled(deletion.DeletedLayers, "_attention_size", 0.99), parallel_differs),
    "pairs": (scaled(Outward, "pair_sizes", 0.99), lambda: leads_differ("tokens")),
    "norm of the leading term": (scaled(Outward, "spectral_norm", 0.99), lambda: leads_differ("ball")),
    "slope, deletion": ((deletion, "STEEPEST", {"gelu": 1.11, "relu": 1.0}), deletion_differs),
    "slope, wide block": (
        (parallel_blocks, "STEEPEST", {"gelu": 1.11, "relu": 1.0}),
        lambda: wide_block_differs(jacobians=False),
    ),
    "averages": (scaled(parallel_blocks.VisibleRows, "_average", 0.99), wide_block_differs),
    "lowered": (scaled(parallel_blocks.ReadTokens, "lowered", 0.99), wide_block_differs),
    "stretched": (scaled(parallel_blocks.ReadTokens, "stretched", 0.99), wide_block_differs),
    "products with leads": (scaled(parallel_blocks.Movements, "_product", 0.99), wide_block_differs),
    "curvature": ((parallel_blocks, "CURVATURE", 0.79), wide_block_differs),
    "diameter": (scaled(parallel_blocks, "diameter", 0.99), wide_block_differs),
    "kink": (scaled(parallel_blocks.Movements, "_kink", 0.99), wide_block_differs),
    "bend": (scaled(parallel_blocks.ReadTokens, "bend", 0.99), lambda: wide_block_differs(jacobians=False)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_changed_constant_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (owner, attribute, value), differs = PLANTED[name]
    monkeypatch.setattr(owner, attribute, value)
    assert differs() > 2e-6


@pytest.mark.parametrize("kind", ["box", "ball", "tokens", "causal", "deletion", "wide block"])
def test_arb_notices_a_bound_that_is_rounded_down(kind: str) -> None:
    """The result in arb is at most 1e-9 below the outward one, so nothing larger than that is lost in rounding."""
    settings: dict[str, Any] = {"causal": {"causal": True}, "deletion": {"mlp": 4}}.get(kind, {})
    settings |= {"mlp": 4, "mlp_skip": True, "norm": "pre", "activation": "relu"} if kind == "wide block" else {}
    network = dg.random_network(layers=2, heads=2, dim=3, eta=0.1, seed=2, **settings)
    surrogate = dg.collapse(network, method="last-layer" if kind == "deletion" else "parallel")
    comparison = Comparison(
        network, surrogate, SETS["tokens" if kind == "wide block" else kind if kind in SETS else "box"]
    )
    method: Method = method_of(comparison)
    assert method.upper is not None
    assert method.verify(comparison, method.upper)
    with pytest.raises(VerificationError, match="output coordinate"):
        method.verify(comparison, method.upper * (1 - 1e-9))
