"""Every benchmark can be imported: the names it takes from the project exist. `make soak` tests the benchmarks."""

import pytest
from benchmark_files import BENCHMARKS, benchmark


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_can_be_imported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert benchmark(name).__doc__
