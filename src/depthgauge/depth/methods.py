"""`collapse`: a deep network in, a shallow one out."""

from depthgauge.certificates.attack import InputSet
from depthgauge.depth.fitted import fit
from depthgauge.errors import InputError, require_positive, unknown_name
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.progress import Step, silent
from depthgauge.surrogates.closed_forms import METHODS, closed_form, refusal


def collapse(
    network: SelfAttentionNetwork,
    method: str = "mean-field",
    *,
    radius: float = 1.0,
    seed: int = 0,
    progress: Step = silent,
) -> SelfAttentionNetwork:
    """The one-layer network of a method (docs/math.md §3.7), with where it came from in its provenance.

    `identity`, `last-layer`, `parallel`, `mean-field` and `corrected` are closed forms; `fitted` starts from the best
    of them and is trained against the attack on ‖X‖max ≤ `radius`, which only it uses (with `seed` and `progress`).
    Networks with MLPs keep them: there, attention is deleted layer by layer and the number of layers stays.

    >>> from depthgauge import random_network
    >>> len(collapse(random_network(layers=5, heads=2, dim=4, eta=0.01), "mean-field"))
    1
    """
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    require_positive("radius", radius, "the largest |entry| an input may have")
    if method != "fitted":
        return closed_form(network, method)
    reason = refusal(network, method)
    if reason is not None:
        raise InputError(reason)
    return fit(network, InputSet("box", radius), seed=seed, progress=progress)
