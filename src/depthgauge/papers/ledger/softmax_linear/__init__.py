"""The numbered statements of paper B, in the order of the paper."""

import re

from depthgauge.papers.ledger.claim import Claim
from depthgauge.papers.ledger.softmax_linear.basics import DEFINITIONS, REGRESSION
from depthgauge.papers.ledger.softmax_linear.lemmas import ALL_ONES, CROSS, IDENTITY
from depthgauge.papers.ledger.softmax_linear.random_signs import CLAIMS as SIGNS


def _place(claim: Claim) -> tuple[bool, list[tuple[int, str]]]:
    """Return the sort key: sections 1 to 6, then A to F, numbers in numerical order, our own statements last."""
    pieces = re.findall(r"\d+|[A-Za-z]+", claim.id.partition(".")[2])
    return claim.paper != "B", [(int(piece) if piece.isdigit() else 1000, piece) for piece in pieces]


CLAIMS: tuple[Claim, ...] = tuple(sorted((*DEFINITIONS, *REGRESSION, *SIGNS, *ALL_ONES, *IDENTITY, *CROSS), key=_place))
