"""What belongs to the two papers and not to a user's model: the ledger, softmax versus linear attention, training
under a weight bound, and the figures."""

from depthgauge.base.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)


def __dir__() -> list[str]:
    return __all__
