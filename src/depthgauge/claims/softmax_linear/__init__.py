"""Paper B, Superiority of Softmax: its numbered statements."""

import re

from depthgauge.claims.claim import Claim
from depthgauge.claims.softmax_linear import cross_attention, identity, self_attention


def _place(claim: Claim) -> tuple[bool, list[tuple[int, str]]]:
    """Where the paper has it: sections 1 to 6, then A to F, numbers as numbers; our own statements come last."""
    pieces = re.findall(r"\d+|[A-Za-z]+", claim.id.partition(".")[2])
    return claim.paper != "B", [(int(piece) if piece.isdigit() else 1000, piece) for piece in pieces]


CLAIMS: tuple[Claim, ...] = tuple(
    sorted((*self_attention.CLAIMS, *identity.CLAIMS, *cross_attention.CLAIMS), key=_place)
)
