"""depthgauge: measure, certify and remove the depth of attention networks that does no useful work.

What is returned is described in `depthgauge.results`; what belongs to the two papers is in `depthgauge.papers`.
"""

from pathlib import Path
from typing import Any

from depthgauge.base.lazy import lazy_names, names_of

_find, __all__ = lazy_names(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        for package in ("papers", "results"):
            if name in names_of(Path(__file__).parent / package / "__init__.pyi"):
                raise AttributeError(f"depthgauge.{name} is now depthgauge.{package}.{name}")
    return _find(name)


def __dir__() -> list[str]:
    return __all__
