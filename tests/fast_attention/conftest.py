"""Every test starts without kept choosers and rules: tests exchange backends, costs and limits."""

import pytest

from depthgauge.fast_attention.call import kept_validated
from depthgauge.fast_attention.plan import prepared_for


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> None:
    kept_validated.cache_clear()
    prepared_for.cache_clear()
