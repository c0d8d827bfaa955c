"""Paper A, Only Large Weights Can Prevent the Perils of Rank Collapse: its numbered statements, in its order."""

from depthgauge.claims.claim import Claim
from depthgauge.claims.layer_collapse.attention import CLAIMS as ATTENTION
from depthgauge.claims.layer_collapse.networks import CLAIMS as NETWORKS
from depthgauge.claims.layer_collapse.softmax import CLAIMS as SOFTMAX
from depthgauge.claims.layer_collapse.theorem import CLAIMS as THEOREM


def _number(claim: Claim) -> tuple[str, int]:
    """`A.4.2.3` → ("4", 2): sections 1 to 5 stand before the appendices B to D."""
    _, section, number, *_ = claim.id.split(".")
    return section, int(number)


CLAIMS: tuple[Claim, ...] = tuple(sorted((*SOFTMAX, *ATTENTION, *NETWORKS, *THEOREM), key=_number))
