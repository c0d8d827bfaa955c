"""Typed records of everything a verb returns, with the labels and verdicts shown to people."""

from depthgauge.base.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)


def __dir__() -> list[str]:
    return __all__
