"""Paper B, Superiority of Softmax: its numbered statements."""

import re

from depthgauge.ledger.claim import Claim
from depthgauge.ledger.softmax_linear import basics, cross_attention, identity, self_attention
from depthgauge.ledger.softmax_linear import random_signs as signs
from depthgauge.ledger.softmax_linear import softmax_regression as regression


def _place(claim: Claim) -> tuple[bool, list[tuple[int, str]]]:
    """Where the paper has it: sections 1 to 6, then A to F, numbers as numbers; our own statements come last."""
    pieces = re.findall(r"\d+|[A-Za-z]+", claim.id.partition(".")[2])
    return claim.paper != "B", [(int(piece) if piece.isdigit() else 1000, piece) for piece in pieces]


_ROOMS = (basics, regression, signs, self_attention, identity, cross_attention)
CLAIMS: tuple[Claim, ...] = tuple(sorted((claim for room in _ROOMS for claim in room.CLAIMS), key=_place))
