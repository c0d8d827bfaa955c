"""Paper B, Superiority of Softmax: its numbered statements."""

from depthgauge.claims.claim import Claim

CLAIMS: tuple[Claim, ...] = ()
