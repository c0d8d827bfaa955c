"""depthgauge: how deep is an attention network, really?

The public names below are resolved on first use, so that `import depthgauge` and `depthgauge --help` stay
quick and a room can be imported alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from depthgauge._version import __version__

if TYPE_CHECKING:
    from depthgauge.certificates.certificate import Certificate, certify
    from depthgauge.depth.effective import effective_depth
    from depthgauge.depth.methods import collapse
    from depthgauge.errors import DepthgaugeError
    from depthgauge.fast_attention.attention import attention, attention_plan
    from depthgauge.ledger.registry import claims
    from depthgauge.measures.profile import Profile, measure
    from depthgauge.network.files import load_network, save_network
    from depthgauge.network.network import SelfAttentionNetwork
    from depthgauge.network.random_networks import random_network
    from depthgauge.report.write import write_report
    from depthgauge.workflows.gauge import gauge

_HOME = {
    "Certificate": "depthgauge.certificates.certificate",
    "DepthgaugeError": "depthgauge.errors",
    "Profile": "depthgauge.measures.profile",
    "attention": "depthgauge.fast_attention.attention",
    "attention_plan": "depthgauge.fast_attention.attention",
    "certify": "depthgauge.certificates.certificate",
    "claims": "depthgauge.ledger.registry",
    "collapse": "depthgauge.depth.methods",
    "effective_depth": "depthgauge.depth.effective",
    "SelfAttentionNetwork": "depthgauge.network.network",
    "gauge": "depthgauge.workflows.gauge",
    "load_network": "depthgauge.network.files",
    "measure": "depthgauge.measures.profile",
    "random_network": "depthgauge.network.random_networks",
    "save_network": "depthgauge.network.files",
    "write_report": "depthgauge.report.write",
}

__all__ = [
    "Certificate",
    "DepthgaugeError",
    "Profile",
    "SelfAttentionNetwork",
    "__version__",
    "attention",
    "attention_plan",
    "certify",
    "claims",
    "collapse",
    "effective_depth",
    "gauge",
    "load_network",
    "measure",
    "random_network",
    "save_network",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'depthgauge' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
