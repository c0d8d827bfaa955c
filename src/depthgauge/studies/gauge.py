"""The main job: gauge networks from end to end and gather one result."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from depthgauge._version import __version__
from depthgauge.atomic import write_text
from depthgauge.errors import InputError
from depthgauge.measures.profile import Profile, measure
from depthgauge.network.files import load_network
from depthgauge.network.inputs import load_inputs, uniform_inputs
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.network.random import random_network
from depthgauge.progress import Step, silent

SCHEMA = "depthgauge.gauge/1"
SMALL_ETA, LARGE_ETA = 0.002, 0.2


@dataclass(frozen=True)
class Settings:
    """What a gauging was asked to do; together with the target it reproduces the result.

    Inputs are `samples` matrices of `tokens` rows, uniform in the box of `radius` φ, drawn from `seed` — or the
    tensor `x` of the file `input`, and then the other four are None.
    """

    target: str | None = None
    samples: int | None = 4
    tokens: int | None = 128
    radius: float | None = 1.0
    seed: int | None = 0
    input: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Subject:
    """One network and what was found."""

    network: SelfAttentionNetwork
    profile: Profile

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        return {
            "kind": "network",
            "name": self.network.name,
            "network": self.network.describe(),
            "input": self.profile.input_to_json(),
            "layers": self.profile.layers_to_json(),
        }


@dataclass(frozen=True)
class Gauge:
    """The result of `gauge`."""

    settings: Settings
    subjects: tuple[Subject, ...]

    def to_json(self) -> dict[str, Any]:
        """The versioned result document (docs/guide.md names every key)."""
        return {
            "schema": SCHEMA,
            "version": __version__,
            "settings": self.settings.to_json(),
            "subjects": [subject.to_json() for subject in self.subjects],
        }

    def save(self, path: str | Path) -> None:
        """Write the result document, whole or not at all."""
        write_text(path, json.dumps(self.to_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def built_in_pair() -> tuple[SelfAttentionNetwork, SelfAttentionNetwork]:
    """The same 12-layer network twice: with small weights, and with all of them a hundred times larger."""
    large = random_network(layers=12, heads=4, dim=32, eta=LARGE_ETA, seed=0)
    small = large.rescale(SMALL_ETA)
    small.name, large.name = "small weights", "large weights"
    return small, large


def gauge(
    target: str | Path | SelfAttentionNetwork | None = None,
    *,
    samples: int | None = None,
    tokens: int | None = None,
    radius: float | None = None,
    seed: int | None = None,
    input: str | Path | None = None,
    progress: Step = silent,
) -> Gauge:
    """Gauge a network (an object or a file), or with no target the built-in pair.

    Inputs are drawn (4 samples of 128 tokens, uniform in the box of radius 1, seed 0, unless said otherwise), or
    read from a file.
    """
    drawn = {"samples": samples, "tokens": tokens, "radius": radius, "seed": seed}
    given = {name: value for name, value in drawn.items() if value is not None}
    if input is not None and given:
        raise InputError(f"{next(iter(given))} draws random inputs and cannot go with an input file; leave one out")
    networks = _networks(target)
    described = None if target is None else (target.name if isinstance(target, SelfAttentionNetwork) else str(target))
    if input is not None:
        settings = Settings(described, None, None, None, None, str(input))
    else:
        settings = Settings(described, **given)  # type: ignore[arg-type]
    inputs = [_inputs(settings, network) for network in networks]
    subjects = [
        Subject(network, measure(network, x, progress=progress)) for network, x in zip(networks, inputs, strict=True)
    ]
    return Gauge(settings, tuple(subjects))


def _networks(target: str | Path | SelfAttentionNetwork | None) -> Sequence[SelfAttentionNetwork]:
    if target is None:
        return built_in_pair()
    return [target if isinstance(target, SelfAttentionNetwork) else load_network(target)]


def _inputs(settings: Settings, network: SelfAttentionNetwork) -> Float[Tensor, "samples tokens dim"]:
    if settings.input is not None:
        return load_inputs(settings.input, network.dim, network.dtype).to(network.device)
    assert settings.samples is not None
    assert settings.tokens is not None
    assert settings.radius is not None
    assert settings.seed is not None
    drawn = uniform_inputs(
        settings.samples,
        settings.tokens,
        network.dim,
        radius=settings.radius,
        seed=settings.seed,
        dtype=network.dtype,
    )
    return drawn.to(network.device)
