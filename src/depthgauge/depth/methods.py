"""`collapse`: replace a deep network by a shallow one."""

from depthgauge.certificates.compared_networks import InputSet
from depthgauge.depth.fitted import fit
from depthgauge.errors import InputError, require_radius, require_seed, unknown_name
from depthgauge.linalg.threads import threads_for
from depthgauge.network.network import SelfAttentionNetwork, require_network
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
    """Return the one-layer network that a method makes from a deep one (docs/math.md §3.7).

    For weights of size η the errors are O(η) for `identity` and `last-layer`, O(η²) for `parallel`, O(η³) for
    `mean-field` and O(η⁴) for `corrected`. `fitted` starts from the best of these and trains it against the attack. A
    network with MLPs keeps them and its number of layers: `identity` and `last-layer` delete attention there.

    Args:
        network: S.
        method: "identity", "last-layer", "parallel", "mean-field", "corrected" or "fitted".
        radius: φ; `fitted` is trained on the box |X_ic| ≤ φ. The other methods do not use it.
        seed: seed of the training of `fitted`.
        progress: called as `progress(done, total, label)` during the training of `fitted`.

    Returns:
        The surrogate S'. Its `provenance` records the method and the original network.

    Raises:
        InputError: the method is unknown or does not apply to this kind of network.

    Example:
        >>> from depthgauge import random_network
        >>> len(collapse(random_network(layers=5, heads=2, dim=4, eta=0.01), "mean-field"))
        1
    """
    require_network(network)
    require_seed(seed)
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    require_radius(radius)
    if method != "fitted":
        return closed_form(network, method)
    reason = refusal(network, method)
    if reason is not None:
        raise InputError(reason)
    with threads_for(network.dim):
        return fit(network, InputSet("box", radius), seed=seed, progress=progress)
