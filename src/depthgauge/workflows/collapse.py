"""What `depthgauge collapse` does: a network file in, a shallower one out, with how far it can be off."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from depthgauge._io import write_atomically
from depthgauge.certificates.attack import InputSet
from depthgauge.certificates.certificate import EFFORTS, Certificate, certify, check_request
from depthgauge.certificates.printed import PrintedBound, printed_bound
from depthgauge.depth.methods import collapse
from depthgauge.errors import InputError, unknown_name
from depthgauge.network.files import load_network, save_network
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.progress import Step, silent
from depthgauge.surrogates.closed_forms import METHODS


@dataclass(frozen=True)
class CollapseResult:
    """A surrogate, its certificate, and the printed bound beside it."""

    method: str
    network: SelfAttentionNetwork
    surrogate: SelfAttentionNetwork
    certificate: Certificate
    printed: PrintedBound

    def to_json(self) -> dict[str, Any]:
        """The document that `depthgauge collapse --json` prints."""
        return {
            "method": self.method,
            "layers_before": len(self.network),
            "layers_after": len(self.surrogate),
            **self.certificate.to_json(),
            **self.printed.to_json(),
        }


def collapse_file(
    path: str | Path,
    method: str = "mean-field",
    *,
    radius: float | None = None,
    ball: float | None = None,
    tokens: int | None = None,
    effort: str = "default",
    seed: int = 0,
    out: str | Path | None = None,
    witness: str | Path | None = None,
    progress: Step = silent,
) -> CollapseResult:
    """Collapse the network in a file, certify it on a box (radius 1 unless said) or ball, and write what was asked for.

    `out` receives the surrogate, `witness` the input that attains the lower bound (tensor `x`).
    """
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    if effort not in EFFORTS:
        raise unknown_name("effort", effort, EFFORTS)
    for place in (out, witness):
        if place is not None and Path(place).is_dir():
            raise InputError(f"{place} is a directory; name a file to write")
    radius = 1.0 if radius is None and ball is None else radius
    network = load_network(path)
    inputs = check_request(network, network, radius, ball, tokens, effort)
    surrogate = collapse(network, method, radius=inputs.radius, seed=seed, progress=progress)
    certificate = certify(
        network, surrogate, radius=radius, ball=ball, tokens=tokens, effort=effort, seed=seed, progress=progress
    )
    if out is not None:
        save_network(surrogate, out)
    if witness is not None:
        save_witness(certificate, witness)
    return CollapseResult(method, network, surrogate, certificate, printed_bound(network, inputs.radius))


def save_witness(certificate: Certificate, path: str | Path) -> None:
    """Write the input that attains the lower bound as tensor `x` of a safetensors file."""
    inputs: InputSet = certificate.set
    metadata = {"set": inputs.kind, "radius": repr(inputs.radius), "lower": repr(certificate.lower)}
    tensors = {"x": certificate.witness.contiguous()}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=metadata))
