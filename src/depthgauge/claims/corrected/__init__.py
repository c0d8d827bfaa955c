"""Our own statements: the corrected forms, each a claim that holds."""

from depthgauge.claims.claim import Claim
from depthgauge.claims.corrected.certificates import CLAIMS as CERTIFICATES
from depthgauge.claims.corrected.constants import CLAIMS as CONSTANTS
from depthgauge.claims.corrected.expansion import CLAIMS as EXPANSION

CLAIMS: tuple[Claim, ...] = (*CONSTANTS, *EXPANSION, *CERTIFICATES)
