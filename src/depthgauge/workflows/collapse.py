"""Collapse a network file: write the shallower network and certify how far it can be off."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from safetensors.torch import save_file

from depthgauge.base.errors import unknown_name
from depthgauge.base.io import write_atomically
from depthgauge.base.progress import Step, silent
from depthgauge.results.gauge_record import CollapseRecord
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.depth.certificate import Certificate, certify, check_request
from depthgauge.theory.depth.methods import collapse
from depthgauge.theory.measures.printed import printed_bound
from depthgauge.theory.network.files import load_network, save_network
from depthgauge.theory.network.network import SelfAttentionNetwork
from depthgauge.theory.suprema.exact_supremum import ExactLimits
from depthgauge.theory.surrogates.closed_forms import METHODS


@dataclass(frozen=True, eq=False)
class Collapsed:
    """A surrogate network with its certificate, and the record that is printed."""

    record: CollapseRecord
    surrogate: SelfAttentionNetwork = field(repr=False)
    certificate: Certificate = field(repr=False)

    def save(self, out: str | Path | None, witness: str | Path | None) -> None:
        """Write the surrogate network, and the input that attains the lower bound (tensor `x`)."""
        if out is not None:
            save_network(self.surrogate, out)
        if witness is not None:
            inputs, lower = self.certificate.inputs, self.certificate.lower
            metadata = {"set": inputs.kind, "radius": repr(inputs.radius), "lower": repr(lower)}
            tensors = {"x": self.certificate.witness.contiguous()}
            write_atomically(witness, lambda temporary: save_file(tensors, temporary, metadata=metadata))


def collapse_file(
    path: str | Path,
    method: str,
    *,
    radius: float | None = None,
    ball: float | None = None,
    inputs: Tokens | None = None,
    tokens: int | None = None,
    effort: str = "default",
    limits: ExactLimits | None = None,
    seed: int = 0,
    progress: Step = silent,
) -> Collapsed:
    """Collapse the network in a file by one of `METHODS`, and certify the surrogate.

    The certificate is about every input with |entries| up to `radius`, by default 1, or with tokens of Euclidean length
    up to `ball`, or about all sequences of the tokens `inputs`. With `tokens=None` it holds for any number of tokens.
    The seed is that of the attack and of `fitted`, and `limits` are those of effort "exact".
    """
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    radius = 1.0 if radius is None and ball is None and inputs is None else radius
    network = load_network(path)
    chosen = check_request(network, network, radius, ball, inputs, tokens, effort)
    length = tokens if inputs is None else inputs.length
    surrogate = collapse(network, method, length=length, radius=chosen.radius, seed=seed, progress=progress)
    limits = limits or ExactLimits()
    certificate = certify(
        network, surrogate, radius=radius, ball=ball, inputs=inputs, tokens=tokens, effort=effort,
        tolerance=limits.tolerance, seconds=limits.seconds, seed=seed, progress=progress,
    )  # fmt: skip
    document = {
        "method": method,
        "layers_before": len(network),
        "layers_after": len(surrogate),
        **certificate.to_json(),
        **printed_bound(network, chosen.radius).to_json(),
    }
    return Collapsed(msgspec.convert(document, CollapseRecord), surrogate, certificate)
