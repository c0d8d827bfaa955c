"""`depthgauge shrink model.gguf --out smaller.gguf`, from the command line to the written file."""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_checkpoints import save_checkpoint
from tiny_gguf import write_gguf

from depthgauge.cli.main import main
from depthgauge.results.shrink_record import check_shrink
from depthgauge.surgery import write_shrunk as writer
from depthgauge.workflows import shrink_stages

SLIDING = "attention.sliding_window_pattern"
QUICK = ("--effort", "quick", "--window", "16", "--allow", "unread")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with quantized maps; K-quants among them, which gguf-py cannot write."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.gguf"
    types = {"attn_output": "Q4_1", "ffn_down": "Q4_K", "attn_q": "Q5_0"}
    write_gguf(path, add_bos=True, layers=4, hidden=256, types=types)
    return path


def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["depthgauge", "shrink", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), *capsys.readouterr()


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_a_repaired_model_as_gguf(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp")
    # The windows are sampled from the model, so that imitating it lowers the loss and the repair is kept.
    code, out, err = typed(
        monkeypatch, capsys, model, "--remove-layers", "1", "--out", "smaller.gguf", "--json", *QUICK
    )
    assert code == 0, err
    record = check_shrink(json.loads(out))
    assert record.repaired
    assert record.stages[-1].name == "rounding to Q4_1, Q8_0"
    assert record.out == "smaller.gguf"
    assert record.bytes.after == Path("smaller.gguf").stat().st_size
    assert record.reload is not None
    assert (record.reload.program, record.reload.layers) == ("llama.cpp", 3)
    # The speed is that of the files in llama.cpp, and not of float32 in transformers.
    assert record.memory is None
    assert record.speed is not None
    assert "in llama.cpp with 1 thread" in record.speed.what
    assert not any(note.startswith("memory") for note in record.notes)
    assert any("of the type Q4_K are written as Q8_0" in note for note in record.notes)
    assert json.loads(Path("smaller.depthgauge.json").read_text()) == json.loads(out)
    source, made = tensors(model), tensors(Path("smaller.gguf"))
    for old, new in ((0, 0), (2, 1), (3, 2)):  # the repair changes neither queries nor the input of the MLP
        for part in ("attn_q", "attn_k", "attn_v", "ffn_up", "ffn_gate"):
            before, after = source[f"blk.{old}.{part}.weight"], made[f"blk.{new}.{part}.weight"]
            assert before.data.tobytes() == after.data.tobytes()
            assert before.tensor_type == after.tensor_type
    assert "blk.3.attn_q.weight" not in made
    fields = {key: field.contents() for key, field in gguf.GGUFReader("smaller.gguf").fields.items()}
    assert fields["llama.block_count"] == 3
    assert fields["depthgauge.removed_blocks"] == [1]
    assert fields["depthgauge.source.sha256"] == record.plan.files["model.gguf"]
    assert fields["general.name"] == "model.gguf (3 of 4 layers)"
    assert sorted(path.name for path in Path().iterdir()) == ["model.gguf", "smaller.depthgauge.json", "smaller.gguf"]
    # The losses in the record are those of the file: gauged from the file, the windows have the same loss.
    again = typed(
        monkeypatch, capsys, model, "--remove", "smaller.depthgauge.json", "--out", "smaller.gguf", *QUICK[-2:]
    )
    assert again[0] == 2
    assert "smaller.gguf exists; use --overwrite" in again[2]


def test_several_sizes_and_a_missing_llama(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shrink_stages, "has_llama", lambda: False)
    code, out, err = typed(
        monkeypatch, capsys, model, "--remove", "1,2", "--out", "s.gguf", "--recover", "none", "--json", *QUICK
    )
    assert code == 0, err
    for document, count in zip(json.loads(out), (1, 2), strict=True):
        assert document["out"] == f"s-{count}.gguf"
        assert document["reload"] is document["speed"] is document["memory"] is None
        assert any("not run in llama.cpp, which is not installed" in note for note in document["notes"])
        assert any("byte for byte" in note for note in document["notes"])
    assert sorted(path.name for path in Path().iterdir()) == [
        "model.gguf", "s-1.depthgauge.json", "s-1.gguf", "s-2.depthgauge.json", "s-2.gguf",
    ]  # fmt: skip


def test_nothing_is_left_if_the_check_fails(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file whose tensors were written in a wrong order of rows is found, and does not get its name."""
    right = writer.write_gguf

    def wrong(path: Path, layout: Any, kept: Any, fields: Any, changed: Any, progress: Any) -> None:
        right(path, layout, [0, 2, 3], fields, changed, progress)  # other blocks than the model in memory has

    monkeypatch.setattr(writer, "write_gguf", wrong)
    monkeypatch.setattr(shrink_stages, "has_llama", lambda: False)
    words = (model, "--remove-layers", "2", "--out", "smaller.gguf", "--recover", "none", *QUICK)
    code, _, err = typed(monkeypatch, capsys, *words)
    assert code == 1
    assert "in smaller.gguf is not the one in memory" in err
    assert {path.name for path in Path().iterdir()} <= {"model.gguf", "smaller.gguf.partial"}


def test_a_block_with_a_sliding_window_is_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp crashes when it loads a Gemma 3 file that has none."""
    monkeypatch.setattr(shrink_stages, "has_llama", lambda: False)
    write_gguf(model, add_bos=True, family="gemma3", layers=3, fields={SLIDING: [True, False, True]})
    quick = ("--recover", "none", *QUICK)
    code, _, err = typed(monkeypatch, capsys, "model.gguf", "--out", "x.gguf", "--remove-layers", "0,2", *quick)
    assert (code, Path("x.gguf").exists()) == (2, False)
    assert "2 blocks of model.gguf have a sliding window, and all of them would be removed" in err
    code, out, err = typed(monkeypatch, capsys, "model.gguf", "--out", "x.gguf", "--remove", "2", "--json", *quick)
    assert code == 0, err
    assert 0 not in json.loads(out)["removed"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("model.gguf", "--out", "model.gguf"), "--out and MODEL are the same file"),
        (("model.gguf", "--out", "x.gguf", "--dtype", "Q3_K"), "dtype must be one of Q4_0, Q4_1"),
        (("model.gguf", "--out", "x", "--dtype", "Q8_0"), "--dtype Q8_0 is a type of GGUF files"),
        (("folder", "--out", "x.gguf"), "convert it with llama.cpp's convert_hf_to_gguf.py"),
        (("cut.gguf", "--out", "x.gguf"), "cut.gguf is cut off: it has"),
        (("foreign.gguf", "--out", "x.gguf"), "foreign.gguf is not a GGUF file"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    words: tuple[str, ...],
    sentence: str,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_checkpoint(Path("folder"), "llama")
    content = model.read_bytes()
    Path("cut.gguf").write_bytes(content[: len(content) * 2 // 3])
    Path("foreign.gguf").write_bytes(b"PK" + content[2:])
    before = {path: path.stat().st_size for path in Path().iterdir()}
    code, out, err = typed(monkeypatch, capsys, *words, "--remove", "1", *QUICK)
    assert (code, out) == (2, "")
    assert err.strip().count("\n") <= 1
    assert sentence in err
    assert {path: path.stat().st_size for path in Path().iterdir()} == before
