"""The numbered statements of paper A, in the order of the paper."""

from depthgauge.papers.ledger.claim import Claim
from depthgauge.papers.ledger.layer_collapse.attention_layers import CLAIMS as ATTENTION
from depthgauge.papers.ledger.layer_collapse.main_theorem import CLAIMS as THEOREM
from depthgauge.papers.ledger.layer_collapse.norms_and_softmax import CLAIMS as SOFTMAX
from depthgauge.papers.ledger.layer_collapse.small_weight_networks import CLAIMS as NETWORKS


def _number(claim: Claim) -> tuple[str, int]:
    """Return the sort key: `A.4.2.3` → ("4", 2). Sections 1 to 5 come before the appendices B to D."""
    _, section, number, *_ = claim.id.split(".")
    return section, int(number)


CLAIMS: tuple[Claim, ...] = tuple(sorted((*SOFTMAX, *ATTENTION, *NETWORKS, *THEOREM), key=_number))
