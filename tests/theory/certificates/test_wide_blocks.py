"""Each inequality behind the certificates of wide blocks, on random cases and on the case that attains it."""

import math

import pytest
import torch
from example_counts import few
from flint import arb
from gpt_networks import attention_of, difference, drawn, gpt, mlp_of, upper
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import depthgauge as dg
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.parallel_blocks import Movements, VisibleRows, WideBlock
from depthgauge.theory.certificates.read_tokens import Moved, ReadTokens, diameter
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import CURVATURE, STEEPEST, THIRD, Outward, Upper, precision, total
from depthgauge.theory.linalg.enclosures import Enclosure
from depthgauge.theory.linalg.norms import softm
from depthgauge.theory.network.network import NORM_EPSILON, SelfAttentionNetwork

SLACK = 1 + 1e-9
A = Outward()


# --- the inequalities: LayerNorm and RMSNorm --------------------------------------------------------------------------

NORMS = ("pre", "pre-rms")


def normed(x: Tensor, norm: str = "pre") -> Tensor:
    c: Tensor = x - x.mean(-1, keepdim=True) if norm == "pre" else x
    return c / ((c * c).mean(-1, keepdim=True) + NORM_EPSILON).sqrt()


def lifted(x: Tensor, norm: str) -> Tensor:
    return x - x.mean(-1, keepdim=True) if norm == "pre" else x


def read_by(points: Tensor, norm: str = "pre") -> ReadTokens:
    return ReadTokens(A, points, gpt(norm=norm, layers=1, dim=points.shape[1], heads=1))


def in_ball(count: int, d: int, radius: float, seed: int) -> Tensor:
    direction = drawn(count, d, seed=seed)
    direction = direction / direction.norm(dim=1, keepdim=True)
    return radius * direction * torch.rand(count, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", NORMS)
def test_what_is_read_encloses_the_norm(norm: str) -> None:
    points = torch.cat([drawn(5, 6), drawn(3, 6, seed=1, size=1e-4), torch.full((1, 6), 2.0, dtype=torch.float64)])
    read = read_by(points, norm)
    assert bool(((read.u.mid - normed(points, norm)).abs() <= read.u.rad + 1e-15).all())
    exact = torch.func.vmap(torch.func.jacrev(lambda x: normed(x, norm)))(points)
    derivative = read.derivative(slice(None))
    assert torch.allclose(derivative.mid, exact, rtol=1e-9, atol=1e-9)
    assert bool((derivative.rad <= 1e-11 * (1 + exact.abs())).all())
    assert bool((torch.linalg.matrix_norm(exact, 2) <= read.steep.floats() * SLACK).all())


def moved_from(t: Tensor, x: Tensor, norm: str = "pre") -> Moved:
    """The smallest numbers that are allowed."""
    outward = ((x - t) * normed(t, norm)).sum(1) / math.sqrt(t.shape[1])
    return Moved(A.upper((x - t).norm(dim=1)), *(A.upper((sign * outward).clamp(min=0.0)) for sign in (-1, 1)))


@few(60)
@given(st.integers(0, 10**6), st.floats(0.001, 3.0), st.floats(0.01, 3.0), st.integers(2, 6), st.sampled_from(NORMS))
def test_no_movement_exceeds_the_bounds_of_the_norm(seed: int, rho: float, size: float, d: int, norm: str) -> None:
    t = drawn(1, d, seed=seed, size=size).expand(60, d)
    read = read_by(t, norm)
    x, other = t + in_ball(60, d, rho, seed), t + in_ball(60, d, rho, seed + 1)
    ends = A.upper((x - other).norm(dim=1)), moved_from(t, x, norm), moved_from(t, other, norm)
    far = read.shift(ends[1]).floats()
    assert bool(((normed(x, norm) - normed(t, norm)).norm(dim=1) <= far * SLACK + 1e-14).all())
    moved = normed(x, norm) - normed(other, norm)
    assert bool((moved.norm(dim=1) <= read.shift_between(*ends).floats() * SLACK + 1e-14).all())
    bent = moved - (x - other) @ read.derivative(slice(1)).mid[0]
    assert bool((bent.norm(dim=1) <= read.bend(*ends).floats() * SLACK + 1e-13).all())
    # n(x) − n(t) = −(1 − cos α)n(t) + (w/‖z(x)‖)(x − t)Dn(t), in the lifted space
    z, z_t = (torch.cat([lifted(y, norm), torch.full_like(y[:, :1], math.sqrt(d * NORM_EPSILON))], 1) for y in (x, t))
    w, length = z_t.norm(dim=1), z.norm(dim=1)
    lowered, stretch = 1 - (z * z_t).sum(1) / (w * length), w / length
    exact = -lowered[:, None] * normed(t, norm) + stretch[:, None] * ((x - t) @ read.derivative(slice(1)).mid[0])
    assert torch.allclose(normed(x, norm) - normed(t, norm), exact, rtol=1e-6, atol=1e-9)
    assert bool((lowered <= read.lowered(ends[1]).floats() * SLACK + 1e-13).all())
    assert bool(((stretch - 1).abs() <= read.stretched(ends[1]).floats() * SLACK + 1e-13).all())


def test_a_tangent_movement_attains_the_shift() -> None:
    """The lifted vector (c, √(dε)) moves orthogonally to the moved one: then sin(angle) = ρ/w."""
    t = torch.tensor([[300.0, -300.0, 0.0, 0.0]], dtype=torch.float64)  # ε is negligible
    read, w = read_by(t), float(t.norm())
    along, across = t[0] / w, torch.tensor([0.0, 0.0, 1.0, -1.0], dtype=torch.float64) / math.sqrt(2)
    for s in (0.01, 0.3, 0.9):
        moved = t[0] - w * s * s * along + w * s * math.sqrt(1 - s * s) * across
        bound = read.shift(moved_from(t, moved[None]))
        assert float((normed(moved) - normed(t[0])).norm()) == pytest.approx(float(bound.floats()), rel=1e-6)
        if s < 0.1:  # then the arcsine is smaller
            continue
        aside = t[0] + w * s * (across - 0.1 * along)  # tan α = s/(1 − a) with a = s/10, up to the length of the step
        state = moved_from(t, aside[None])
        bound = float(read.shift(Moved(A.upper([w * s]), state.inward, state.outward)).floats())
        assert float((normed(aside) - normed(t[0])).norm()) == pytest.approx(bound, rel=1e-6)
    assert float(read.shift(moved_from(t, -t)).floats()) == pytest.approx(4.0)
    assert float((normed(-t) - normed(t)).norm()) == pytest.approx(4.0, rel=1e-6)
    # The largest second derivative: a third of the square along c, two thirds across it.
    s = 1e-4
    moved = t[0] + w * s * (along / math.sqrt(3) + across * math.sqrt(2 / 3))
    ends = A.upper((moved - t[0]).norm()[None]), moved_from(t, moved[None]), moved_from(t, t)
    bent = normed(moved) - normed(t[0]) - (moved - t[0]) @ read.derivative(slice(None)).mid[0]
    assert float(bent.norm()) == pytest.approx(float(read.bend(*ends).floats()), rel=1e-3)
    # Across c, the angle is what the distance says; towards and away from 0 the length is.
    for direction in (across, along, -along):
        x = (t[0] + 0.3 * w * direction)[None]
        state = moved_from(t, x)
        if direction is across:
            lowered = 1 - w / float(x.norm())
            assert float(read.lowered(state).floats()) == pytest.approx(lowered, rel=1e-6)
        else:
            bound = float(read.stretched(state).floats())
            assert abs(w / float(x.norm()) - 1) == pytest.approx(bound, rel=1e-6 if direction is not along else 0.6)
    # Two states on the ray of c, at distance ρ towards the origin: the slope there is 1/(1 − s).
    one, two = (t[0] * 0.5 + sign * 1e-6 * across for sign in (1, -1))
    ends = A.upper((one - two).norm()[None]), moved_from(t, one[None]), moved_from(t, two[None])
    assert float((normed(one) - normed(two)).norm()) == pytest.approx(
        float(read.shift_between(*ends).floats()), rel=1e-6
    )


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_weights_that_differ_move_an_average_by_at_most_the_diameter(seed: int) -> None:
    n = 2 + seed % 5
    z, p, q = drawn(n, 3, seed=seed), *(softm(drawn(n, seed=seed + k, size=2.0)[None])[0] for k in (1, 2))
    variation = float((p - q).abs().sum() / 2)
    farthest = float(torch.cdist(z, z).max())
    assert float(((p - q) @ z).norm()) <= variation * farthest * SLACK
    assert farthest <= float(diameter(Enclosure.exact(z)).floats()) * SLACK
    ends = torch.stack([z[0], -z[0]])
    assert float(diameter(Enclosure.exact(ends)).floats()) == pytest.approx(2 * float(z[0].norm()))


# --- the inequalities: activations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_activations_are_enclosed(activation: str) -> None:
    z = torch.cat([drawn(300, size=3.0), torch.tensor([0.0, 1e-9, -1e-9, 7.9999, 8.0, -8.001, 40.0, -300.0]).double()])
    value, slope = A.activation(Enclosure(z, torch.full_like(z, 1e-12)), activation)
    with precision(200):
        for k, x in enumerate(map(arb, z.tolist())):
            if activation == "relu":
                exact = x.max(arb(0)), arb(int(x > 0))
            else:
                Phi, phi = (1 + (x / arb(2).sqrt()).erf()) / 2, (-x * x / 2).exp() / (2 * arb.pi()).sqrt()
                exact = x * Phi, Phi + x * phi
            for made, wanted in zip((value, slope), exact, strict=True):
                assert abs(arb(float(made.mid[k])) - wanted) <= arb(float(made.rad[k]))
    assert float(value.rad.max()) < 1e-10
    assert float(slope.rad.max()) < 2e-7


def test_constants_of_gelu_are_attained() -> None:
    z = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
    phi = (-z * z / 2).exp() / math.sqrt(2 * math.pi)
    Phi = (1 + torch.erf(z / math.sqrt(2))) / 2
    slopes = Phi + z * phi, phi * (2 - z * z), phi * (z**3 - 4 * z)
    for values, bound in zip(slopes, (STEEPEST["gelu"], CURVATURE, THIRD), strict=True):
        assert 0.995 * bound <= float(values.abs().max()) <= bound


@few(30)
@given(st.integers(0, 10**6), st.sampled_from(["gelu", "relu"]), st.floats(0.01, 3.0))
def test_no_hidden_state_exceeds_the_kink(seed: int, activation: str, rho: float) -> None:
    """|act(h) − act(h') − act'(h_t)(h − h')| |W_out| over states n, n' within ρ of n(t), from the distances of h."""
    net = gpt(seed % 100, 0.5, layers=1, activation=activation)
    t = drawn(1, 4, seed=seed)
    found = movements(net, t)
    layer, act = found.layers[0], torch.nn.functional.gelu if activation == "gelu" else torch.relu
    u, u_other = (normed(t) + in_ball(50, 4, rho, seed + k) for k in (1, 2))
    h, h_other = (z @ layer.w_in.mid + layer.b_in.mid for z in (u, u_other))
    error = (act(h) - act(h_other) - (h - h_other) * found.slopes[0].mid) @ layer.w_out.mid
    at_t = found.hidden[0].mid
    ends = [A.upper((a - b).abs()) for a, b in ((h, at_t), (h_other, at_t), (h, h_other))]
    bound = (found._kink(0, *ends) @ layer.w_out.size()).floats()
    assert bool((error.abs() <= bound * SLACK + 1e-6).all())  # the slope of GELU is known to 1e-7


def test_a_unit_that_changes_sign_attains_the_kink() -> None:
    net = gpt(0, 0.5, layers=1, activation="relu", mlp=1)
    t = drawn(1, 4, seed=4)
    found = movements(net, t)
    hidden = float(found.hidden[0].mid[0, 0])
    far = A.upper([[2 * abs(hidden)]])
    h = -hidden
    error = max(h, 0.0) - max(hidden, 0.0) - (h - hidden) * float(hidden > 0)
    assert float(found._kink(0, far, far * 0.0, far).floats()[0, 0]) == pytest.approx(abs(error))


def movements(net: SelfAttentionNetwork, t: Tensor) -> Movements:
    return Movements(Comparison(net, dg.collapse(net, method="parallel"), Tokens(t)), A)


# --- the inequalities: averages over the visible tokens ---------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.sampled_from(["positions", "length", "any"]))
def test_no_average_over_visible_tokens_exceeds_the_bound(seed: int, causal: bool, is_read: bool, kind: str) -> None:
    """Every sequence of up to three tokens; where a row sees a known number of places, the largest one attains it."""
    n, each = 3, 2
    positions = drawn(n, 2, seed=seed) if kind == "positions" else None
    tokens = Tokens(drawn(each, 2, seed=seed + 1), positions, length=None if kind == "any" else n)
    seen, v = VisibleRows(A, tokens, causal=causal, is_read=is_read), len(tokens.points())
    pairs, single = drawn(v, v, seed=seed + 2), drawn(v, seed=seed + 3)
    bound, alone = seen.average(A.upper(pairs)).floats(), seen.of_tokens(A.upper(single)).floats()
    largest = torch.full((2, v), -math.inf, dtype=torch.float64)
    for length in range(n if is_read and positions is not None else 1, n + 1):
        for chosen in torch.cartesian_prod(*[torch.arange(each)] * length).reshape(-1, length):
            rows = chosen + each * torch.arange(length) if positions is not None else chosen
            for i, t in enumerate(rows):
                visible = rows[: i + 1] if causal else rows
                found = torch.stack([pairs[t, visible].mean(), single[visible].mean()])
                largest[:, t] = torch.maximum(largest[:, t], found)
    made = torch.stack([bound, alone])
    assert bool((largest <= made + 1e-12).all())
    if positions is not None and (causal or is_read):
        assert torch.allclose(largest, made, rtol=1e-12)
    rows_ = drawn(v, 1, seed=seed + 4)
    last = rows_[-each:] if is_read and positions is not None else rows_
    assert torch.equal(seen.largest(A.upper(rows_)).floats(), last.amax(0))


@few(10)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from(["gelu", "relu"]), st.sampled_from([0.01, 0.1, 0.6]))
def test_no_state_moves_further_than_the_bounds(seed: int, causal: bool, activation: str, eta: float) -> None:
    """Every state of S and S' on random sequences against `far`, `inward`, G and F, with the average of its own row."""
    net = gpt(seed, eta, layers=3, causal=causal, activation=activation)
    tokens = Tokens(drawn(3, 4, seed=seed), drawn(4, 4, seed=seed + 1, size=0.5))
    found = Movements(Comparison(net, dg.collapse(net, method="parallel"), tokens), A)
    changed = []
    for k, layer in enumerate(found.layers):
        for V, o, state, late, Y in (
            (found.V_before[k], found.o_before[k], found.states[2 * k], [*found.E[:k], *found.G[:k]], layer.V[0]),
            (
                found.V_before[k + 1],
                found.o_before[k + 1],
                found.states[2 * k + 1],
                [*found.E[: k + 1], *found.G[: k + 1]],
                layer.w_in,
            ),
        ):
            rest = total(found.start, *late, *found.F[:k])
            changed.append(found._changes(state, rest, V, o + found.m_before[k], Y))
    generator, places = torch.Generator().manual_seed(seed), tokens.at_positions()
    chosen = torch.randint(0, 3, (10, 4), generator=generator)
    X, points = places[torch.arange(4), chosen], torch.arange(4) * 3 + chosen

    def holds(size: Tensor, bound: Upper, slack: float = 0.0) -> bool:
        return bool((size <= bound.floats()[points] * SLACK + slack).all())

    with torch.no_grad():
        x, y_wide = X, X + sum(attention_of(net, k, X) for k in range(3))
        for k in range(len(net)):
            first, moved = attention_of(net, k, X), attention_of(net, k, x)
            y = x + moved
            mapped = mlp_of(net, k, y)
            for name, (state, bound) in {"x": (x, found.states[2 * k]), "y": (y, found.states[2 * k + 1])}.items():
                outward = ((state - X) * normed(X)).sum(-1) / 2.0
                assert holds((state - X).norm(dim=-1), bound.far), name
                assert holds(-outward, bound.inward), name
                assert holds(outward, bound.outward), name
            matrices = found.layers[k].V[0].mid, found.layers[k].w_in.mid
            for matrix, state, change in zip(matrices, (x, y), changed[2 * k : 2 * k + 2], strict=True):
                assert holds(((normed(state) - normed(X)) @ matrix).abs(), change, 1e-13)
            assert holds((moved - first).norm(dim=-1), found.G[k])
            assert holds((mapped - mlp_of(net, k, X)).norm(dim=-1), found.F[k], 1e-9)
            x = y + mapped
        assert holds((y_wide - X).norm(dim=-1), found.other.far)


# --- the inequalities: leading terms ----------------------------------------------------------------------------------


def test_ends_of_products_with_one_radius_for_all_rows_are_enclosed() -> None:
    u, G = drawn(5, 3), drawn(4, 3, 3, seed=1)
    made = u @ G
    high, low = Enclosure.exact(u).coarse(Enclosure.exact(G)).ends()
    for bound, exact in ((high.floats(), made.amax(1)), (low.floats(), -made.amin(1))):
        assert bool((bound >= exact).all())
        assert torch.allclose(bound, exact, rtol=1e-12)
    wide = Enclosure(G, torch.full_like(G, 0.1))
    off = 0.1 * torch.sign(drawn(4, 3, 3, seed=5))
    assert bool((Enclosure.exact(u).coarse(wide).ends()[0].floats() >= (u @ (G + off)).amax(1)).all())
    left, right, weights = drawn(3, 6), drawn(6, 3, seed=3), drawn(4, 6, seed=4)
    a, w, b = (Enclosure(m, torch.full_like(m, 1e-3)) for m in (left, weights, right))
    moved = [m + 1e-3 * torch.sign(drawn(*m.shape, seed=6)) for m in (left, weights, right)]
    product_ = (a[:, None] * w[None]).coarse(b).permute(1, 0, 2)
    assert bool(((moved[0] * moved[1][:, None] @ moved[2] - product_.mid).abs() <= product_.rad).all())


@pytest.mark.parametrize("causal", [False, True])
def test_the_leading_terms_are_the_second_order(causal: bool) -> None:
    """The rests vanish against the leading terms, which the attained difference stays within ten of."""
    previous = math.inf
    for eta in (1e-2, 1e-3, 1e-4):
        net = gpt(2, eta, layers=3, causal=causal, biases=False)
        small, tokens = dg.collapse(net, method="parallel"), Tokens(drawn(4, 4), length=6)
        found = Movements(Comparison(net, small, tokens), A)
        rest = max(float(part.floats().max()) for part in (*found.attention, found.mlp, found.flat))
        whole = upper(net, small, tokens)
        assert rest / whole < previous / 5
        previous = rest / whole
        x = tokens.embeddings[torch.randint(0, 4, (400, 6), generator=torch.Generator().manual_seed(0))]
        assert 0.1 * whole < difference(net, small, x) <= whole


def test_blocks_of_tokens_give_the_same_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    net, tokens, steps = gpt(), Tokens(drawn(7, 4)), []
    small = dg.collapse(net, method="parallel")
    whole = WideBlock(Comparison(net, small, tokens)).value
    monkeypatch.setattr("depthgauge.theory.certificates.parallel_blocks.ENTRIES", 3 * 4 * 7)
    parts = WideBlock(Comparison(net, small, tokens), lambda *report: steps.append(report))
    assert torch.allclose(parts.value, whole, rtol=1e-12)
    assert steps == [(0, 7, "proving"), (3, 7, "proving"), (6, 7, "proving")]


def test_short_sequences_have_a_smaller_bound() -> None:
    """The average over the tokens includes the token itself with a weight of 1/n or more."""
    for causal in (False, True):
        net = gpt(3, 0.05, causal=causal)
        small, tokens = dg.collapse(net, method="parallel"), drawn(5, 4)
        uppers = [upper(net, small, Tokens(tokens, length=n)) for n in (1, 2, 4, None)]
        assert uppers == sorted(uppers)
        assert uppers[0] < 0.95 * uppers[-1]
        for n, bound in ((1, uppers[0]), (2, uppers[1])):
            every = tokens[torch.cartesian_prod(*[torch.arange(5)] * n).reshape(-1, n)]
            assert difference(net, small, every) <= bound * SLACK
