"""The shrink benchmark: its windows, its settings and the claims it judges."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_files import benchmark
from tiny_checkpoints import save_checkpoint, text_of

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.load import Placement, load_config, load_model, load_tokenizer

pytestmark = pytest.mark.soak
judge, texts = benchmark("shrink_claims"), benchmark("shrink_texts")
shrink = benchmark("shrink", "shrink_peers")
OURS, RECOVERED = judge.OURS, judge.RECOVERED


# --- claims -----------------------------------------------------------------------------------------------------------


def row(method: str, values: tuple[float, float], source: str = "all", removed: int = 7) -> object:
    own = ("a", "b") if source == "all" else (source,)
    return judge.Row(source, own, method, removed, dict(zip("ab", values, strict=True)))


def unmet(rows: list[object], layers: int = 12, effort: str = "default") -> list[str]:
    return [claim.text for claim in judge.claims(rows, layers, effort) if not claim.met]


def test_the_best_peer_of_each_text_counts() -> None:
    rivals = [row("UIDL", (1.0, 2.0)), row("SLEB", (2.0, 1.0))]
    assert unmet([*rivals, row(OURS, (0.5, 0.5))]) == []
    worse = unmet([*rivals, row(OURS, (0.1, 1.1))])
    assert len(worse) == 1
    assert "7 blocks, depthgauge, b:" in worse[0]


def test_the_mean_is_compared_where_a_fifth_of_the_blocks_is_removed() -> None:
    for removed, count in [(2, 0), (3, 1)]:
        assert len(unmet([row("UIDL", (1.0, 1.0), removed=removed), row(OURS, (0.61, 0.61), removed=removed)])) == count
    assert unmet([row("UIDL", (1.0, 1.0)), row(OURS, (0.6, 0.6))]) == []
    assert unmet([row("UIDL", (1.0, 1.0), "a"), row(OURS, (0.6, 0.75), "a")]) == []
    assert len(unmet([row("UIDL", (1.0, 1.0), "a"), row(OURS, (0.61, 0.76), "a")])) == 2


def test_other_sizes_and_settings_are_not_compared() -> None:
    rows = [row("UIDL", (0.1, 0.1), removed=3), row("UIDL", (0.1, 0.1), "a"), row(OURS, (5.0, 5.0))]
    assert judge.claims(rows, 12, "default") == []


def test_numbers_that_are_not_finite_do_not_help_anyone() -> None:
    nan = float("nan")
    assert unmet([row("UIDL", (1.0, 1.0)), row("SLEB", (nan, nan)), row(OURS, (0.5, 0.5))]) == []
    assert len(unmet([row("UIDL", (1.0, 1.0)), row(OURS, (nan, 0.5))])) == 2
    document = json.dumps(row("SLEB", (nan, float("inf"))).to_json(), allow_nan=False)  # type: ignore[attr-defined]
    assert json.loads(document)["increase"] == {"a": None, "b": None}


def test_targets_belong_to_a_model_and_an_effort() -> None:
    over = [row(OURS, (0.5, 0.5)), row(RECOVERED, (0.6, 0.6), removed=4)]
    assert unmet(over) == []
    assert len(unmet(over, 30)) == 1
    assert unmet(over, 30, "quick") == []
    assert len(unmet(over, 18)) == 1
    assert all("target" in text for text in unmet(over, 30) + unmet(over, 18))


# --- a run on a random model ------------------------------------------------------------------------------------------


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "made" / "shrink.json"
    monkeypatch.setattr(sys, "argv", ["shrink.py", "--effort", "quick", "--out", str(out), *arguments])
    assert shrink.main() == 0
    found: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return found


def test_all_methods_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(tmp_path, monkeypatch, "--remove", "1", "2", "--source", "a", "--recover", "4k")
    assert found["met"] is None
    assert len(found["rows"]) == 2 * 2 * (3 * 5 + 2)  # settings, sizes; choices and repairs, and ours
    assert all(len(one["blocks"]) == one["removed"] for one in found["rows"] if one["method"] not in (OURS, RECOVERED))
    assert all(set(one["increase"]) == {"a", "b", "c"} for one in found["rows"])
    stages = found["seconds"]["a, depthgauge"]
    assert {"search", "repair and comparison", "total"} < stages.keys()
    assert sum(stages.values()) <= 2 * stages["total"] + 1e-6
    assert "SLEB + ReplaceMe" in capsys.readouterr().out


def test_one_setting_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, monkeypatch, "--source", "b", "--only", "b", "--no-peers")
    assert [(one["source"], one["method"]) for one in found["rows"]] == [("b", OURS)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--remove", "5"], "--remove must name numbers from 1 to 4"),
        (["--source", "x"], "--source must name one of a, b, c, got x"),
        (["--checkpoint", "m", "--text", "t"], "at least two texts are needed, got 1"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shrink.py", *arguments])
    assert shrink.main() == 2
    assert message in capsys.readouterr().err


# --- texts ------------------------------------------------------------------------------------------------------------


def test_no_piece_of_a_text_is_in_both_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 4)
    (tmp_path / "one.txt").write_text("aaaabbbbccccddddeeeeffffg", encoding="utf-8")
    known, unseen = texts.divide_texts([tmp_path / "one.txt"], tmp_path)
    assert known["one"].read_text("utf-8").split() == ["aaaa", "bbbb", "dddd", "eeee", "g"]
    assert unseen["one"].read_text("utf-8").split() == ["cccc", "ffff"]
    with pytest.raises(InputError, match="cannot read"):
        texts.divide_texts([tmp_path / "none.txt"], tmp_path)


def test_windows_are_cut_from_texts(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", "llama")
    source, here = find(tmp_path / "model"), Placement(device="cpu")
    checkpoint = load_model(source, load_config(source, here), here)
    (tmp_path / "one.txt").write_text(text_of(200, 0), encoding="utf-8")
    cut = {"checkpoint": checkpoint, "tokenizer": load_tokenizer(source, here), "window": 8, "seed": 0}
    (ids,) = texts.windows_of_texts({"one": tmp_path / "one.txt"}, count=20, **cut).values()
    assert ids.shape == (20, 8)
    assert len({tuple(one) for one in ids.tolist()}) == 20
    with pytest.raises(InputError, match="needed"):
        texts.windows_of_texts({"one": tmp_path / "one.txt"}, count=2000, **cut)


def test_texts_are_extracted_from_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in texts.FORTUNE_FILES:
        (tmp_path / name).write_text(f"first of {name}\n%\nsecond\n%\n", encoding="utf-8")
    long = "A paragraph with a <em>tag</em> &amp; an entity, " + "and more words " * 5
    page = f'<p>no</p><div class="para">short</div>\n<div class="para">\n\t{long}\n</div>'
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    (tmp_path / "verses").write_bytes(b"in the beginning " * 10)
    monkeypatch.setattr(texts, "FORTUNES", tmp_path)
    monkeypatch.setattr(texts, "HANDBOOK", tmp_path)
    monkeypatch.setattr(texts, "BIBLE", ("cat", str(tmp_path / "verses")))
    monkeypatch.setattr(texts, "BIBLE_BYTES", 16)
    fortunes, handbook, bible = (path.read_text("utf-8") for path in texts.write_debian_texts(tmp_path / "out"))
    assert fortunes.startswith("first of literature\n\nsecond\n\nfirst of people\n\n")
    assert "%" not in fortunes
    assert handbook == ("A paragraph with a tag & an entity, " + "and more words " * 5).strip()
    assert bible == "in the beginning"
    monkeypatch.setattr(texts, "BIBLE", (str(tmp_path / "no-such-program"),))
    with pytest.raises(InputError, match="install the Debian packages"):
        texts.write_debian_texts(tmp_path / "out")
