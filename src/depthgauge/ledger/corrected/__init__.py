"""Our own statements: the corrected forms, each a claim that holds."""

from depthgauge.ledger.claim import Claim
from depthgauge.ledger.corrected.exact_expansion import CLAIMS as EXPANSION
from depthgauge.ledger.corrected.sandwich_claims import CLAIMS as CERTIFICATES
from depthgauge.ledger.corrected.sharp_constants import CLAIMS as CONSTANTS

CLAIMS: tuple[Claim, ...] = (*CONSTANTS, *EXPANSION, *CERTIFICATES)
