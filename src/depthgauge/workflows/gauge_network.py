"""The main job: gauge networks from end to end and gather one result."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from depthgauge._format import number
from depthgauge._io import write_text
from depthgauge._version import __version__
from depthgauge.certificates.certificate import Certificate, certify
from depthgauge.certificates.printed import PrintedBound, printed_bound
from depthgauge.checkpoints.load import is_checkpoint
from depthgauge.depth.effective import Depth, FoldBounds, certified_depth, effective_depth
from depthgauge.errors import InputError
from depthgauge.measures.profile import Profile, measure
from depthgauge.network.files import load_network
from depthgauge.network.inputs import load_inputs, uniform_inputs
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.network.random_networks import random_network
from depthgauge.progress import Step, silent
from depthgauge.surrogates.closed_forms import CLOSED_FORMS, closed_form, refusal
from depthgauge.workflows.checkpoint_subject import ModelSubject
from depthgauge.workflows.gauge_checkpoint import ModelOptions, ModelSettings, gauge_checkpoint
from depthgauge.workflows.partial import forget_partial

SCHEMA = "depthgauge.gauge/1"
SMALL_ETA, LARGE_ETA = 0.004, 0.4
TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6)
"""The tolerances at which effective depth is reported."""
ATTACK: dict[str, Any] = {"starts": 12, "steps": 25}
"""The attack's effort per method; `depthgauge collapse` spends more on one."""


@dataclass(frozen=True)
class Settings:
    """What a gauging was asked to do; together with the target it reproduces the result.

    Inputs are `samples` matrices of `tokens` rows, uniform in the box of `radius` φ, drawn from `seed` — or the
    tensor `x` of the file `input`, and then the other four are None. `target` is a file, or None for the built-in pair;
    where `in_memory` is true it is only the name of a network that was handed over as an object.
    """

    target: str | None = None
    samples: int | None = 4
    tokens: int | None = 128
    radius: float | None = 1.0
    seed: int | None = 0
    input: str | None = None
    in_memory: bool = False

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Collapsed:
    """One method's surrogate and the sandwich on its error; `refused` says why where the method does not apply."""

    method: str
    certificate: Certificate | None = None
    layers_after: int | None = None
    refused: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        if self.certificate is None:
            return {"method": self.method, "refused": self.refused}
        found = self.certificate.to_json()
        return {"method": self.method, "layers_after": self.layers_after, **found}


@dataclass(frozen=True)
class Subject:
    """One network and what was found."""

    network: SelfAttentionNetwork
    profile: Profile
    radius: float
    collapsed: tuple[Collapsed, ...]
    depths: tuple[Depth, ...]
    printed: PrintedBound

    def verdict(self) -> str:
        """One sentence: how many layers are enough, within what, for which inputs."""
        L, inputs = len(self.network), f"for every input up to {number(self.radius, 6)}"
        shallow = [depth for depth in self.depths if depth.certified and depth.layers < L]
        if not self.depths:
            return f"{L} layers; effective depth is not defined for this kind of network"
        if not shallow:
            return f"{L} layers; none can be folded away within {number(max(TOLERANCES), 6)} {inputs}"
        best = min(shallow, key=lambda depth: (depth.layers, depth.error))
        enough = "1 is enough" if best.layers == 1 else f"{best.layers} are enough"
        return f"{L} layers; {enough} within {number(best.error)} {inputs}"

    def to_json(self) -> dict[str, Any]:
        """As in the result JSON."""
        return {
            "kind": "network",
            "name": self.network.name,
            "verdict": self.verdict(),
            "network": self.network.describe(),
            "radius": self.radius,
            "input": self.profile.input_to_json(),
            "layers": self.profile.layers_to_json(),
            "collapse": [collapsed.to_json() for collapsed in self.collapsed],
            "depth": [depth.to_json() for depth in self.depths],
            "printed": self.printed.to_json(),
        }


@dataclass(frozen=True)
class Gauge:
    """The result of `gauge`."""

    settings: Settings | ModelSettings
    subjects: tuple[Subject | ModelSubject, ...]

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
        if isinstance(self.settings, ModelSettings):
            forget_partial(path)


def built_in_pair() -> tuple[SelfAttentionNetwork, SelfAttentionNetwork]:
    """The same 12-layer network twice: with small weights, and with all of them a hundred times larger."""
    large = random_network(layers=12, heads=2, dim=16, eta=LARGE_ETA, seed=0)
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
    text: str | Path | None = None,
    options: ModelOptions | None = None,
    progress: Step = silent,
) -> Gauge:
    """Gauge a network (an object or a file), a checkpoint (a directory or a GGUF file), or with no target the pair.

    A network's inputs are drawn (4 samples of 128 tokens, uniform in the box of radius 1, seed 0, unless said
    otherwise), or read from a file. A checkpoint is gauged on `tokens` of `text` (2,048 of a built-in one), with
    `options` of its own.
    """
    if isinstance(target, str | Path) and is_checkpoint(target):
        _only_for("networks", samples=samples, radius=radius, input=input)
        asked = options or ModelOptions()
        asked = asked if text is None else replace(asked, text=text)
        found, model = gauge_checkpoint(target, asked, tokens=tokens, seed=seed, progress=progress)
        return Gauge(found, (model,))
    _only_for("checkpoints", text=text, options=options)
    drawn = {"samples": samples, "tokens": tokens, "radius": radius, "seed": seed}
    given = {name: value for name, value in drawn.items() if value is not None}
    if input is not None and given:
        raise InputError(f"{next(iter(given))} draws random inputs and cannot go with an input file; leave one out")
    networks = _networks(target)
    in_memory = isinstance(target, SelfAttentionNetwork)
    described = None if target is None else (target.name if isinstance(target, SelfAttentionNetwork) else str(target))
    if input is not None:
        settings = Settings(described, None, None, None, None, str(input), in_memory)
    else:
        settings = Settings(described, in_memory=in_memory, **given)  # type: ignore[arg-type]
    inputs = [_inputs(settings, network) for network in networks]
    subjects = [_subject(network, x, settings, progress) for network, x in zip(networks, inputs, strict=True)]
    return Gauge(settings, tuple(subjects))


def _only_for(what: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name} is for {what}, and the target is none; leave it out")


def _subject(
    network: SelfAttentionNetwork, x: Float[Tensor, "samples tokens dim"], settings: Settings, progress: Step
) -> Subject:
    """Measure, certify every method, and find the effective depth of one network."""
    radius = settings.radius if settings.radius is not None else float(x.abs().amax()) or 1.0
    profile = measure(network, x, progress=progress)
    foldable = not network.causal and network.norm == "none" and all(layer.mlp is None for layer in network)
    bounds = FoldBounds(network.copy().double().cpu(), radius, **ATTACK) if foldable else None
    collapsed = []
    for index, method in enumerate(CLOSED_FORMS):
        progress(index, len(CLOSED_FORMS), f"certifying {method}")
        collapsed.append(_collapsed(network, method, radius, bounds))
    depths: list[Depth] = []
    for index, tolerance in enumerate(TOLERANCES if bounds is not None else ()):
        assert bounds is not None
        progress(index, len(TOLERANCES), f"effective depth within {number(tolerance, 6)}")
        depths.append(certified_depth(bounds, tolerance))
        depths.append(effective_depth(network, tolerance=tolerance, certified=False, x=x))
    return Subject(network, profile, radius, tuple(collapsed), tuple(depths), printed_bound(network, radius))


def _collapsed(network: SelfAttentionNetwork, method: str, radius: float, bounds: FoldBounds | None) -> Collapsed:
    reason = refusal(network, method)
    if reason is not None:
        return Collapsed(method, refused=reason)
    surrogate = closed_form(network, method)
    known = None if bounds is None else bounds.S
    certificate = certify(network, surrogate, radius=radius, bounds=known, **ATTACK)
    return Collapsed(method, certificate, len(surrogate))


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
