"""To come."""

from depthgauge.claims.claim import Claim

CLAIMS: tuple[Claim, ...] = ()
