"""Every test starts without the memory of earlier calls: tests exchange backends and limits."""

import pytest

from depthgauge.fast_attention import attention as attention_module
from depthgauge.fast_attention.call_kinds import CallKinds


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> CallKinds:
    """An empty memory of earlier calls."""
    own = CallKinds()
    monkeypatch.setattr(attention_module, "_kinds", own)
    return own
