"""From a network to a shallower one, and how far apart the two can be: proved from above, attacked from below.

This room and the public function `depthgauge.collapse` share a name, so the room can be called:
`depthgauge.collapse(network, "mean-field")` means the same before and after the room has been imported.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthgauge.network.network import SelfAttentionNetwork


class _CallableRoom(ModuleType):
    def __call__(
        self, network: "SelfAttentionNetwork", method: str = "mean-field", **options: Any
    ) -> "SelfAttentionNetwork":
        """The shallower network of a method; see `depthgauge.collapse.collapse.collapse`."""
        from depthgauge.collapse.collapse import collapse

        return collapse(network, method, **options)


sys.modules[__name__].__class__ = _CallableRoom
