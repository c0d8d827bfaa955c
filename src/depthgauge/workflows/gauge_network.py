"""Gauge networks: measure them on inputs, certify every method, find the effective depth."""

from collections.abc import Sequence
from typing import Any

import msgspec
from jaxtyping import Float
from torch import Tensor

from depthgauge.base.format import number
from depthgauge.base.progress import Step
from depthgauge.results.gauge_record import (
    NETWORK_DEFAULTS,
    NETWORKS,
    DepthRow,
    GaugeOptions,
    GaugeSettings,
    NetworkDescription,
    NetworkSubject,
    Sandwich,
    network_verdict,
)
from depthgauge.theory.certificates.attack import AttackOptions
from depthgauge.theory.certificates.compared_networks import InputSet
from depthgauge.theory.depth.certificate import certify
from depthgauge.theory.depth.effective import DepthBounds, can_fold, certified_depth, measured_depth, measured_errors
from depthgauge.theory.linalg.small_matrices import threads_for
from depthgauge.theory.measures.printed import printed_bound
from depthgauge.theory.measures.profile import measure
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.network.random_networks import load_inputs, uniform_inputs
from depthgauge.theory.surrogates.closed_forms import CLOSED_FORMS, closed_form, needs_tokens, refusal
from depthgauge.workflows.target import Target

TOLERANCES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-6)
"""The tolerances at which effective depth is reported."""
ATTACK: dict[str, Any] = {}
"""Options of the attack; the defaults, so that `gauge` and `collapse` report the same numbers."""


def gauge_networks(
    target: Target, options: GaugeOptions, progress: Step
) -> tuple[GaugeSettings, tuple[NetworkSubject, ...]]:
    """Gauge the networks of a target; return the options with their defaults filled in, and one subject per network."""
    settings = _settings(target, options)
    networks = target.networks()
    inputs = [_inputs(settings, network) for network in networks]
    subjects = [_subject(network, x, settings, progress) for network, x in zip(networks, inputs, strict=True)]
    return settings, tuple(subjects)


def _settings(target: Target, options: GaugeOptions) -> GaugeSettings:
    in_memory = target.network is not None
    if options.input is None:
        return GaugeSettings(target=target.name, in_memory=in_memory, **options.with_defaults(NETWORKS).given())
    return GaugeSettings(target=target.name, in_memory=in_memory, input=options.input)


def _inputs(settings: GaugeSettings, network: SelfAttentionNetwork) -> Float[Tensor, "samples tokens dim"]:
    if settings.input is not None:
        return load_inputs(settings.input, network.dim, network.dtype).to(network.device)
    drawn = {name: getattr(settings, name) for name in NETWORK_DEFAULTS}
    samples, tokens = drawn.pop("samples"), drawn.pop("tokens")
    return uniform_inputs(samples, tokens, network.dim, dtype=network.dtype, **drawn).to(network.device)


def _subject(
    network: SelfAttentionNetwork,
    x: Float[Tensor, "samples tokens dim"],
    settings: GaugeSettings,
    progress: Step,
) -> NetworkSubject:
    """Measure one network, certify every method on the box of the inputs, and find the effective depth."""
    radius = settings.radius if settings.radius is not None else float(x.abs().amax()) or 1.0
    profile = measure(network, x, progress=progress)
    with threads_for(network.dim):
        bounds = (
            DepthBounds(network, InputSet("box", radius), attack=AttackOptions(**ATTACK)) if can_fold(network) else None
        )
        sandwiches: list[Sandwich] = []
        for index, method in enumerate(CLOSED_FORMS):
            progress(index, len(CLOSED_FORMS), f"certifying {method}")
            sandwiches.append(_sandwich(network, method, radius, bounds))
        depths = [] if bounds is None else _depths(network, x, bounds, progress)
        return NetworkSubject(
            name=network.name,
            verdict=network_verdict(len(network), radius, depths, max(TOLERANCES)),
            network=msgspec.convert(network.describe(), NetworkDescription),
            radius=radius,
            input=profile.input_record(),
            layers=profile.layer_records(),
            collapse=tuple(sandwiches),
            depth=tuple(depths),
            printed=printed_bound(network, radius),
        )


def _depths(
    network: SelfAttentionNetwork, x: Float[Tensor, "samples tokens dim"], bounds: DepthBounds, progress: Step
) -> Sequence[DepthRow]:
    """Find the certified and the measured effective depth at every tolerance."""
    rows, errors = [], measured_errors(network, x)
    for index, tolerance in enumerate(TOLERANCES):
        progress(index, len(TOLERANCES), f"effective depth within {number(tolerance, 6)}")
        rows.append(certified_depth(bounds, tolerance))
        rows.append(measured_depth(network, errors, tolerance))
    return [msgspec.convert(row.to_json(), DepthRow) for row in rows]


def _sandwich(network: SelfAttentionNetwork, method: str, radius: float, bounds: DepthBounds | None) -> Sandwich:
    """Bound the error of one method's surrogate from both sides; or give the reason why the method does not apply."""
    reason = refusal(network, method)
    if reason is None and method == "parallel" and needs_tokens(network):
        reason = "parallel is certified over tokens alone for this network (collapse --tokens), not over a box"
    if reason is not None:
        return Sandwich(method=method, refused=reason)
    if bounds is None:
        certificate = certify(network, closed_form(network, method), radius=radius, **ATTACK)
    else:
        certificate = bounds.certificate(method)
    document = {"method": method, "layers_after": len(certificate.surrogate), **certificate.to_json()}
    return msgspec.convert(document, Sandwich)
