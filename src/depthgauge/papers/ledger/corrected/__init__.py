"""Our own statements: corrected forms of the papers' statements, and the bounds that the library uses."""

from depthgauge.papers.ledger.claim import Claim
from depthgauge.papers.ledger.corrected.causal_collapse import CLAIMS as CAUSAL
from depthgauge.papers.ledger.corrected.exact_expansion import CLAIMS as EXPANSION
from depthgauge.papers.ledger.corrected.sandwich_claims import CLAIMS as CERTIFICATES
from depthgauge.papers.ledger.corrected.sharp_constants import CLAIMS as CONSTANTS

CLAIMS: tuple[Claim, ...] = (*CONSTANTS, *EXPANSION, *CAUSAL, *CERTIFICATES)
