"""The user's own choice of blocks, sizes and bytes in `shrink`."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny_checkpoints import text_of
from tiny_shrinks import LAYERS, quick, save

from depthgauge.base.errors import InterruptedRunError
from depthgauge.workflows.shrink import shrink

pytestmark = pytest.mark.usefixtures("forked_verification")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(text_of(4000))
    return path


def test_one_search_makes_several_sizes(llama: Path, text: Path, tmp_path: Path) -> None:
    """Each size is a checkpoint of its own; one page shows all of them, and the bounds allow for the choice."""
    out, page = tmp_path / "out", tmp_path / "sizes.html"
    result = quick(llama, text, remove=[2, 1], out=out, report=page)
    assert [one.record.layers_after for one in result.sizes] == [LAYERS - 1, LAYERS - 2]
    assert result.record == result.sizes[-1].record
    assert [step.layer for step in result.plan.search[:1]] == [step.layer for step in result.sizes[0].plan.search]
    for count in (1, 2):
        config = json.loads((tmp_path / f"out-{count}" / "config.json").read_text("utf-8"))
        assert config["num_hidden_layers"] == LAYERS - count
        assert result.sizes[count - 1].plan.looks() == 2
    assert {path.name for path in tmp_path.iterdir()} == {"out-1", "out-2", "sizes.html"}
    shown = page.read_text("utf-8")
    assert "Choose by looking" in shown
    assert shown.count("What is guaranteed") == 2


def test_outputs_of_shares_have_their_names(llama: Path, text: Path, tmp_path: Path) -> None:
    result = quick(llama, text, remove="50%,1", out=tmp_path / "out")
    assert [one.record.layers_after for one in result.sizes] == [LAYERS - 1, LAYERS - LAYERS // 2]
    assert [Path(one.record.out or "").name for one in result.sizes] == ["out-1", "out-50%"]
    assert {path.name for path in tmp_path.iterdir()} == {"out-1", "out-50%"}


def test_a_resumed_run_of_several_sizes_keeps_what_is_written(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def progress(done: int, total: int, label: str) -> None:
        if label.startswith("loading the result") and (tmp_path / "out-1").exists():
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError, match="run the same command again"):
        quick(llama, text, remove="1,2", out=out, progress=progress)
    before = (tmp_path / "out-1" / "depthgauge.json").stat().st_mtime_ns
    quick(llama, text, remove="1,2", out=out)
    assert (tmp_path / "out-1" / "depthgauge.json").stat().st_mtime_ns == before
    assert {path.name for path in tmp_path.iterdir()} == {"out-1", "out-2"}


def test_exactly_the_named_blocks_are_removed(llama: Path, text: Path) -> None:
    result = quick(llama, text, remove_layers="0,2-3")
    assert result.record.removed == (0, 2, 3)
    assert result.record.plan.search == ()
    (given,) = [one for one in result.plan.candidates if one.chosen]
    assert given.methods[0] == "given blocks"
    assert shrink(llama, plan=result.plan).record.removed == (0, 2, 3)


def test_kept_blocks_stay(llama: Path, text: Path) -> None:
    assert not {0, 1} & {*quick(llama, text, remove=2, keep=[0, 1]).record.removed}


def test_as_few_blocks_go_as_the_bytes_need(llama: Path, text: Path, tmp_path: Path) -> None:
    size = sum(weight.nbytes for weight in load_file(llama / "model.safetensors").values())
    counts = []
    for share in (0.95, 0.7):
        limit = int(share * size)
        record = quick(llama, text, max_bytes=limit, recover="none", out=tmp_path / f"{share}").record
        assert record.bytes.after is not None
        assert record.bytes.after <= limit + 2000  # the header of the file
        counts.append(len(record.removed))
    assert counts[0] < counts[1]


def test_nothing_is_sampled_with_a_share_of_zero(llama: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthgauge.surgery.calibration.sample_windows", None)
    record = quick(llama, text, remove=1, sampled=0.0).record
    assert {source.kind for source in record.plan.calibration.sources} == {"text", "built-in"}


def test_the_durations_add_up_to_the_run(llama: Path, text: Path) -> None:
    record = quick(llama, text, remove=1).record
    assert {"loading", "calibration windows", "search", "repair and comparison", "certification"} <= {*record.durations}
    assert 0.5 * record.seconds < sum(record.durations.values()) <= record.seconds
