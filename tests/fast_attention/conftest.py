"""Every test starts without the memory of earlier calls: tests exchange backends and limits."""

import pytest

from depthgauge.fast_attention import attention as attention_module
from depthgauge.fast_attention.call_kinds import CallKinds


@pytest.fixture(autouse=True)
def kinds() -> CallKinds:
    """An empty memory of earlier calls."""
    attention_module._kinds.forget()
    return attention_module._kinds
