"""`collapse`: the shallower network of a method."""

from depthgauge.collapse.surrogates import METHODS, closed_form
from depthgauge.errors import unknown_name
from depthgauge.network.network import SelfAttentionNetwork


def collapse(network: SelfAttentionNetwork, method: str = "mean-field") -> SelfAttentionNetwork:
    """x."""
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    return closed_form(network, method)
