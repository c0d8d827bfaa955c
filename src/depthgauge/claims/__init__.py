"""The ledger of claims: every numbered statement of both papers, decided by running a search for what breaks it.

This room and the public function `depthgauge.claims` share a name, so the room can be called: `depthgauge.claims("A")`
means the same before and after the room has been imported.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthgauge.claims.claim import Finding


class _CallableRoom(ModuleType):
    def __call__(self, paper: str | None = None, id: str | None = None, **options: Any) -> "list[Finding]":
        """Decide claims; see `depthgauge.claims.ledger.claims`."""
        from depthgauge.claims.ledger import claims

        return claims(paper, id, **options)


sys.modules[__name__].__class__ = _CallableRoom
