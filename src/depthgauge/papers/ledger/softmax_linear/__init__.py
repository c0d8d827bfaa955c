"""The numbered statements of paper B, in the order of the paper."""

import re

from depthgauge.papers.ledger.claim import Claim
from depthgauge.papers.ledger.softmax_linear import basics, cross_attention, identity, self_attention
from depthgauge.papers.ledger.softmax_linear import random_signs as signs
from depthgauge.papers.ledger.softmax_linear import softmax_regression as regression


def _place(claim: Claim) -> tuple[bool, list[tuple[int, str]]]:
    """Return the sort key: sections 1 to 6, then A to F, numbers in numerical order, our own statements last."""
    pieces = re.findall(r"\d+|[A-Za-z]+", claim.id.partition(".")[2])
    return claim.paper != "B", [(int(piece) if piece.isdigit() else 1000, piece) for piece in pieces]


_MODULES = (basics, regression, signs, self_attention, identity, cross_attention)
CLAIMS: tuple[Claim, ...] = tuple(sorted((claim for module in _MODULES for claim in module.CLAIMS), key=_place))
