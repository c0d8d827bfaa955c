"""Our own statements: corrected forms of the papers' statements, and the bounds that the library uses."""

from depthgauge.ledger.claim import Claim
from depthgauge.ledger.corrected.exact_expansion import CLAIMS as EXPANSION
from depthgauge.ledger.corrected.sandwich_claims import CLAIMS as CERTIFICATES
from depthgauge.ledger.corrected.sharp_constants import CLAIMS as CONSTANTS

CLAIMS: tuple[Claim, ...] = (*CONSTANTS, *EXPANSION, *CERTIFICATES)
