"""How many examples hypothesis draws in tests whose examples are slow."""

import os

from hypothesis import settings


def few(examples: int) -> settings:
    """Draw so many examples in `make test`, and twenty times as many in `make soak`."""
    return settings(max_examples=examples * (20 if os.environ.get("DEPTHGAUGE_SOAK") else 1), deadline=None)
