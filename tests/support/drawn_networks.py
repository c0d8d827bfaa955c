"""Hypothesis strategies for networks and surrogates: sizes and weights of all kinds that have caused unsound bounds."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from depthgauge.theory.network.network import Layer, Mlp, SelfAttentionNetwork
from depthgauge.theory.surrogates.closed_forms import averaging_layer, closed_form, fold, refusal, without_attention

CHARACTERS = ("uniform", "sign", "aligned", "low-rank", "huge scores", "huge values", "equal heads", "opposite heads")
CLOSED = ("identity", "last-layer", "parallel", "mean-field", "corrected")


@dataclass(frozen=True)
class Case:
    """Two networks and the keyword arguments of `certify`."""

    network: SelfAttentionNetwork
    surrogate: SelfAttentionNetwork
    request: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """The drawn parameters of a case; the test builds the networks from them, so that examples shrink well."""

    dim: int
    layers: int
    log_eta: float
    characters: tuple[str, ...]
    surrogate: str
    kind: str
    log_radius: float
    tokens: int | None
    effort: str
    seed: int
    most_heads: int = 3
    skip: bool = True
    causal: bool = False
    mlp: bool = False

    def case(self) -> Case:
        """Build the networks and the arguments of `certify`."""
        random = Random(self.seed)
        network = _network(self, random)
        request: dict[str, Any] = {self.kind: 10**self.log_radius, "effort": self.effort, "tokens": self.tokens}
        return Case(network, SURROGATES[self.surrogate](network, random), request)


def _weights(shape: tuple[int, ...], eta: float, character: str, generator: torch.Generator) -> Tensor:
    if character == "aligned":
        return torch.full(shape, eta, dtype=torch.float64)
    if character == "sign":
        return eta * (2.0 * torch.randint(0, 2, shape, generator=generator).to(torch.float64) - 1)
    if character == "low-rank":
        left = torch.randn(*shape[:-1], 1, generator=generator, dtype=torch.float64)
        right = torch.randn(*shape[:-2], 1, shape[-1], generator=generator, dtype=torch.float64)
        product = left * right
        return eta * product / product.abs().max().clamp(min=1e-9)
    return eta * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)


def drawn_layer(heads: int, dim: int, key_dim: int, eta: float, character: str, generator: torch.Generator) -> Layer:
    """Build a layer of a given character with weights at most η, except in a head with huge scores or values."""
    query, key, value = (_weights((heads, dim, width), eta, character, generator) for width in (key_dim, key_dim, dim))
    if character == "huge scores":
        query[0] *= 20.0
        key[0] *= 20.0
    if character == "huge values":
        value[0] *= 20.0
    if heads > 1 and character in ("equal heads", "opposite heads"):
        query[1], key[1] = query[0], key[0]
        value[1] = value[0] if character == "equal heads" else -value[0]
    return Layer(query, key, value)


def _generator(random: Random) -> torch.Generator:
    return torch.Generator().manual_seed(random.getrandbits(32))


def _network(recipe: Recipe, random: Random) -> SelfAttentionNetwork:
    """Build a network; the number of heads, the key width and the character may differ between layers."""
    generator, eta, dim = _generator(random), 10**recipe.log_eta, recipe.dim
    layers = []
    for k in range(recipe.layers):
        heads, key_dim = random.randint(1, recipe.most_heads), random.randint(1, 4)
        character = recipe.characters[k % len(recipe.characters)]
        layers.append(drawn_layer(heads, dim, key_dim, eta, character, generator))
    if recipe.layers > 1 and random.random() < 0.25:
        layers[-1] = layers[0].copy()  # the same heads in two layers
    if recipe.mlp:
        for layer in layers:
            if random.random() < 0.75:
                width = random.randint(1, 5)
                shapes = ((dim, width), (width,), (width, dim), (dim,))
                layer.mlp = Mlp(*(torch.randn(*s, generator=generator, dtype=torch.float64) / 2 for s in shapes))
    return SelfAttentionNetwork(
        layers,
        scale=random.choice([0.5, 1.0, 2.0]),
        skip=recipe.skip,
        causal=recipe.causal,
        activation=random.choice(["relu", "gelu"]),
        mlp_skip=random.random() < 0.5,
        name="drawn",
    )


def _closed(network: SelfAttentionNetwork, random: Random) -> SelfAttentionNetwork:
    """Build a closed form. With MLPs, all heads side by side have a certificate over tokens alone."""
    covered = [m for m in CLOSED if refusal(network, m) is None and not (m == "parallel" and network.has_mlp)]
    return closed_form(network, random.choice(covered))


def _folded(network: SelfAttentionNetwork, random: Random) -> SelfAttentionNetwork:
    return fold(network, [k for k in range(len(network)) if random.random() < 0.5])


def _deleted(network: SelfAttentionNetwork, random: Random) -> SelfAttentionNetwork:
    if random.random() < 0.5:
        return _closed(network, random)
    return without_attention(network, [k for k in range(len(network)) if random.random() < 0.5], "drawn")


def _arbitrary(network: SelfAttentionNetwork, random: Random) -> SelfAttentionNetwork:
    """Build an unrelated network, or the same one with its layers rotated, shifted or unchanged."""
    layers = [layer.copy() for layer in network]
    which = random.choice(["one layer", "two layers", "rotated", "shifted", "the same"])
    generator, eta = _generator(random), 10 ** random.uniform(-4, 0)
    if which == "one layer":
        layers = [drawn_layer(random.randint(1, 3), network.dim, 2, eta, "uniform", generator)]
    elif which == "two layers":
        layers = [drawn_layer(random.randint(1, 3), network.dim, 2, eta, "sign", generator) for _ in range(2)]
    elif which == "rotated":
        layers = layers[1:] + layers[:1]
    elif which == "shifted":
        drift = torch.randn(network.dim, network.dim, generator=generator, dtype=torch.float64) / 10
        layers = [averaging_layer(drift), *layers]
    return SelfAttentionNetwork(layers, scale=network.scale, skip=network.skip, name=which)


SURROGATES: dict[str, Callable[[SelfAttentionNetwork, Random], SelfAttentionNetwork]] = {
    "closed": _closed,
    "folded": _folded,
    "arbitrary": _arbitrary,
    "deleted": _deleted,
}


def recipes(
    dims: st.SearchStrategy[int],
    *,
    surrogate: str = "closed",
    kinds: tuple[str, ...] = ("radius", "ball"),
    effort: str = "default",
    most_layers: int = 4,
    **switches: Any,
) -> st.SearchStrategy[Recipe]:
    """Return recipes of one family; `switches` sets further fields of `Recipe`."""
    return st.builds(
        Recipe,
        dim=dims,
        layers=st.integers(1, most_layers),
        log_eta=st.floats(-4, 0),
        characters=st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=2).map(tuple),
        surrogate=st.just(surrogate),
        kind=st.sampled_from(kinds),
        log_radius=st.floats(-1, 0.5),
        tokens=st.none() | st.integers(1, 64),
        effort=st.just(effort),
        seed=st.integers(0, 2**32),
        **{name: st.just(value) for name, value in switches.items()},
    )
