"""The shrink benchmark: its windows, its settings and the claims it judges."""

import json
import sys
from pathlib import Path

import pytest
import torch
from benchmark_files import benchmark
from layered_models import layered_model
from tiny_checkpoints import save_checkpoint, text_of

from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.checkpoints.load import Placement, load_config, load_model, wrap
from depthgauge.checkpoints.source import find
from depthgauge.errors import InputError

pytestmark = pytest.mark.soak
judge, texts = benchmark("shrink_claims"), benchmark("shrink_texts")
shrink = benchmark("shrink", "shrink_peers")
OURS, HEALED = judge.OURS, judge.HEALED


# --- claims -----------------------------------------------------------------------------------------------------------


def row(method: str, values: tuple[float, float], setting: str = "known", removed: int = 7) -> object:
    return judge.Row(setting, "all", method, removed, dict(zip("ab", values, strict=True)))


def unmet(rows: list[object], layers: int = 12) -> list[str]:
    return [claim.text for claim in judge.claims(rows, layers) if not claim.met]


def test_the_best_peer_of_each_text_counts() -> None:
    rivals = [row("UIDL", (1.0, 2.0)), row("SLEB", (2.0, 1.0))]
    assert unmet([*rivals, row(OURS, (0.5, 0.5))]) == []
    worse = unmet([*rivals, row(OURS, (0.1, 1.1))])
    assert len(worse) == 1
    assert "7 blocks, b:" in worse[0]


def test_the_mean_is_compared_in_the_known_setting_at_seven_and_eleven_blocks() -> None:
    for setting, removed, count in [("known", 7, 1), ("known", 11, 1), ("known", 3, 0), ("unknown", 7, 0)]:
        rows = [row("UIDL", (1.0, 1.0), setting, removed), row(OURS, (0.61, 0.61), setting, removed)]
        assert len(unmet(rows)) == count
    assert unmet([row("UIDL", (1.0, 1.0)), row(OURS, (0.6, 0.6))]) == []


def test_other_sizes_and_settings_are_not_compared() -> None:
    rows = [row("UIDL", (0.1, 0.1), removed=3), row("UIDL", (0.1, 0.1), "unknown"), row(OURS, (5.0, 5.0))]
    assert judge.claims(rows, 12) == []


def test_numbers_that_are_not_finite_do_not_help_anyone() -> None:
    nan = float("nan")
    assert unmet([row("UIDL", (1.0, 1.0)), row("SLEB", (nan, nan)), row(OURS, (0.5, 0.5))]) == []
    assert len(unmet([row("UIDL", (1.0, 1.0)), row(OURS, (nan, 0.5))])) == 2
    document = json.dumps(row("SLEB", (nan, float("inf"))).to_json(), allow_nan=False)  # type: ignore[attr-defined]
    assert json.loads(document)["increase"] == {"a": None, "b": None}


def test_targets_apply_to_thirty_layers() -> None:
    over = [row(OURS, (0.5, 0.5)), row(HEALED, (0.4, 0.4)), row("UIDL", (9.0, 9.0))]
    assert unmet(over) == []
    assert len(unmet(over, 30)) == 2
    mixed = [row(OURS, (0.4, 0.4), "unknown"), row(OURS, (0.7, 0.7), "unknown")]
    assert unmet(mixed, 30) == []  # the mean over all unknown settings is judged


# --- settings ---------------------------------------------------------------------------------------------------------


def runner_and_windows(count: int) -> tuple[BlockRunner, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    windows = {name: torch.randint(3, 40, (count, 9), generator=generator) for name in "abc"}
    return BlockRunner(wrap(layered_model("llama"), "tiny"), windows["a"][:1]), windows


def content(ids: torch.Tensor) -> set[tuple[int, ...]]:
    return {tuple(one) for one in ids.tolist()}


def test_evaluation_windows_are_used_for_nothing_else() -> None:
    runner, windows = runner_and_windows(12)
    made = shrink.settings_of(runner, windows, evaluated=4, calibrated=8, counts=(2, 1), unknown=["a", "c"])
    assert [(one.name, one.source, tuple(one.evaluation)) for one in made] == [
        ("known", "all", ("a", "b", "c")),
        ("unknown", "a", ("b", "c")),
        ("unknown", "c", ("a", "b")),
    ]
    for one in made:
        assert one.counts == (1, 2)
        assert sum(len(ids) for ids in one.calibration.values()) == 8
        used = set().union(*(content(ids) for ids in one.calibration.values()))
        assert len(used) == 8
        assert all(len(dense.ids) == 4 and not used & content(dense.ids) for dense in one.evaluation.values())
    assert sorted(len(ids) for ids in made[0].calibration.values()) == [2, 3, 3]
    assert list(made[1].calibration) == ["a"]


@pytest.mark.parametrize("counts", [(0,), (1, 5), (7,)])
def test_impossible_numbers_of_blocks_are_refused(counts: tuple[int, ...]) -> None:
    runner, windows = runner_and_windows(3)
    with pytest.raises(InputError, match="--remove must name numbers from 1 to 4"):
        shrink.settings_of(runner, windows, evaluated=1, calibrated=2, counts=counts, unknown=[])


def test_our_method_returns_losses_of_every_window() -> None:
    runner, windows = runner_and_windows(12)
    setting = shrink.settings_of(runner, windows, evaluated=3, calibrated=9, counts=(1, 3), unknown=[])[0]
    before = {name: value.clone() for name, value in runner.checkpoint.model.state_dict().items()}
    made = shrink.ours(setting, effort="quick", heal=1, seed=0)
    assert made.keys() == {OURS, HEALED}
    for by_count in made.values():
        assert list(by_count) == [1, 3]
        for losses in by_count.values():
            assert {name: len(part) for name, part in losses.items()} == dict.fromkeys("abc", 3)
    assert all(torch.equal(value, before[name]) for name, value in runner.checkpoint.model.state_dict().items())


def test_the_increase_of_the_dense_model_is_zero() -> None:
    runner, windows = runner_and_windows(6)
    setting = shrink.settings_of(runner, windows, evaluated=3, calibrated=3, counts=(1,), unknown=[])[0]
    losses = shrink.model_losses(runner.checkpoint.model, setting.evaluation)
    assert all(abs(value) < 1e-6 for value in shrink.row_of(setting, "dense", 1, losses).increase.values())


def test_the_peers_run_on_a_random_llama(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "shrink.json"
    monkeypatch.setattr(sys, "argv", ["shrink.py", "--peers-only", "--calibration", "9", "--out", str(out)])
    assert shrink.main() == 0
    found = json.loads(out.read_text("utf-8"))
    assert found["met"] is None
    assert len(found["rows"]) == 2 * 2 * 3 * 5  # settings, sizes, choices, repairs
    assert all(len(one["blocks"]) == one["removed"] for one in found["rows"])
    assert "SLEB + ReplaceMe" in capsys.readouterr().out


# --- texts ------------------------------------------------------------------------------------------------------------


def test_windows_are_cut_from_texts_and_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "WINDOW", 8)
    save_checkpoint(tmp_path / "model", "llama")
    source = find(tmp_path / "model")
    checkpoint = load_model(source, load_config(source, Placement(device="cpu")), Placement(device="cpu"))
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for seed, path in enumerate(paths):
        path.write_text(text_of(200, seed), encoding="utf-8")
    made = texts.windows_of_texts(checkpoint, paths, 20, 0)
    assert {name: tuple(ids.shape) for name, ids in made.items()} == {"one": (20, 8), "two": (20, 8)}
    assert len(content(made["one"])) == 20
    torch.save({name: ids.int() for name, ids in made.items()}, tmp_path / "data.pt")
    again = texts.windows_of_file(tmp_path / "data.pt")
    assert all(again[name].dtype == torch.int64 and torch.equal(again[name], made[name]) for name in made)
    texts.require_windows(again, 20)
    with pytest.raises(InputError, match="one has 20 windows, but 21 are needed"):
        texts.require_windows(again, 21)


def test_bad_windows_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "flat.pt")
    with pytest.raises(InputError, match="must contain a dictionary"):
        texts.windows_of_file(tmp_path / "flat.pt")
    with pytest.raises(InputError, match="cannot read"):
        texts.windows_of_file(tmp_path / "none.pt")
    with pytest.raises(InputError, match="at least two texts"):
        texts.require_windows({"a": torch.zeros(3, 4)}, 1)
    with pytest.raises(InputError, match="same number of tokens"):
        texts.require_windows({"a": torch.zeros(3, 4), "b": torch.zeros(3, 5)}, 1)


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
