"""Every test starts without kept choosers and rules: tests exchange backends, costs and limits."""

import pytest

from depthgauge.fast_attention.arguments import kept_rules_of
from depthgauge.fast_attention.decide.chooser import chooser_for


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> None:
    kept_rules_of.cache_clear()
    chooser_for.cache_clear()
