"""`--estimate` of `shrink` and `gauge` as a user meets it."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from tiny_shrinks import save

from depthgauge.cli.main import main


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["depthgauge", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A directory with a configuration alone."""
    (folder := tmp_path / "bare").mkdir()
    shutil.copy(save(tmp_path / "model", "llama") / "config.json", folder)
    return folder


def test_tables_and_documents(bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("shrink", str(bare), "--remove", "1", "--effort", "quick", "--estimate", "--device", "cpu")
    code, out, _ = run(monkeypatch, capsys, *asked)
    assert code == 0
    for word in ("calibration windows", "check in a new process", "memory: ", "disk: ", "→ about "):
        assert word in out, word
    assert "several processes, each with a device of its own: " in out
    assert "streamed: " in out
    assert "the disk gives" not in out  # there are no weight files to read
    code, out, _ = run(monkeypatch, capsys, *asked, "--json", "--plan-only", "plan.json")
    found = json.loads(out)
    assert found["schema"] == "depthgauge.estimate/1"
    assert {"search", "repair and comparison"} <= {*found["parts"]}
    assert "certification" not in found["parts"]
    code, out, _ = run(monkeypatch, capsys, "gauge", str(bare), "--estimate", "--json", "--device", "cpu")
    assert code == 0
    assert [*json.loads(out)["parts"]] == ["loading", "weights", "heads", "what-ifs"]
    assert sorted(path.name for path in bare.iterdir()) == ["config.json"]


def test_an_estimate_reads_no_more_than_the_text_has(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text := bare.parent / "text.txt").write_text("w1 " * 1000)
    asked = ("--text", str(text), "--tokens", str(10**15), "--window", "16", "--device", "cpu")
    code, out, _ = run(monkeypatch, capsys, "gauge", str(bare), "--estimate", "--json", *asked)
    assert code == 0
    assert sum(json.loads(out)["parts"].values()) < 86400  # 3,000 bytes have at most 188 windows


def test_a_run_without_weights_and_an_estimate_of_a_network_are_refused(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(monkeypatch, capsys, "shrink", str(bare), "--remove", "1", "--out", str(bare.parent / "out"))
    assert code == 2
    assert "contains no weights" in err
    code, _, err = run(monkeypatch, capsys, "gauge", "--estimate")
    assert (code, err) == (
        2,
        "error: --estimate applies to checkpoints; the built-in pair is a network. Leave it out\n",
    )
