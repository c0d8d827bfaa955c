"""The text of `gauge` and `shrink`: JSONL files, the BOS token, and token ids that the model does not have."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_checkpoint, text_of
from tiny_models import tiny_model

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.checkpoints.inputs.windows import Windows, tokenize_text
from depthgauge.checkpoints.source.library import CheckpointError, quiet
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.tasks.language import MEASURED_LENGTH, MEASURED_WINDOWS
from depthgauge.cli.main import main
from depthgauge.results.shrink_record import make_shrink_options
from depthgauge.surgery import open_model as module
from depthgauge.surgery.calibration import prepare_calibration
from depthgauge.surgery.open_model import OpenedModel, open_model, read_model

SMALL = {"tokens": 64, "window": 16, "device": "cpu", "what_if": "none"}
BOS = 1


def with_bos(folder: Path, token: str = "[CLS]", words: int = 0) -> Any:
    """Give a saved tokenizer a BOS token that it does not add, and more words than the model has."""
    from transformers import AutoTokenizer

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"more{number}" for number in range(words)])
    tokenizer.add_special_tokens({"bos_token": token})
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 64 learned positions."""
    folder = tmp_path_factory.mktemp("gpt2")
    save_checkpoint(folder, "gpt2")
    with_bos(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(text_of(9000))
    return path


def opened(model: Any, tokenizer: Any = None, **fields: Any) -> OpenedModel:
    options = make_shrink_options(None, {"remove": 1, "effort": "quick", "window": 16, "allow": "unread", **fields})
    source = find(model) if isinstance(model, Path) else None
    found = read_model(model, source, options, tokenizer, None, False, lambda sentence: None)
    return open_model(found, options, None, lambda sentence: None)


class Letters:
    """One token per letter and a BOS token that is not added; the built-in text hardly repeats 24 letters."""

    all_special_ids = (0, 1, 2, 3)
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012
    bos_token_id = BOS

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [4 + ord(letter) % 36 for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "?" * len(ids)

    def __len__(self) -> int:
        return 40


def runs(windows: Any, length: int) -> set[tuple[int, ...]]:
    """All runs of tokens of a length that occur in windows."""
    return {tuple(row[i : i + length]) for row in windows for i in range(len(row) - length + 1)}


@pytest.mark.parametrize(("given_text", "sampled"), [(True, 0.5), (True, 0.0), (True, 1.0), (False, None)])
@pytest.mark.parametrize("better", [True, False])
def test_the_bos_token_is_not_decided_on_certify_windows(
    text: Path, monkeypatch: pytest.MonkeyPatch, sampled: float | None, given_text: bool, better: bool
) -> None:
    """No run of tokens that the decision is measured on occurs in a certify window, whichever way it goes."""
    monkeypatch.setattr(module, "measure_start", lambda start, *_: start.decided(BOS, better, "measured"))
    chosen = {"text": text} if given_text else {}
    subject = opened(tiny_model("llama"), Letters(), window=32, sampled=sampled, **chosen)
    made = prepare_calibration(
        subject.checkpoint, subject.tokenizer, subject.read, subject.start, message=lambda sentence: None
    )
    letters = tokenize_text(Letters(), None, wanted=1, length=32, seed=0).pieces[0].tolist()
    measured = letters[: MEASURED_WINDOWS * MEASURED_LENGTH]
    read = [body.tolist() for body in subject.read.measured]
    assert all(len(body) > 24 for body in read)
    assert not runs([measured, *read], 24) & runs(made.certify.inputs.tolist(), 24)
    assert "built-in" in [source.kind for source in made.record.sources]
    assert {tuple(window.shape) for window in made.certify.inputs} == {(32,)}
    assert bool((made.certify.inputs[:, 0] == BOS).all()) == better
    every = [tuple(row) for part in (made.fit, made.select, made.certify) for row in part.inputs.tolist()]
    assert len(set(every)) == len(every)


def test_windows_as_long_as_the_context_are_measured(gpt2: Path, text: Path) -> None:
    """The BOS token does not fit in front of a full window, so the window is measured without its last token."""
    result = dg.gauge(gpt2, text=text, **(SMALL | {"window": 64, "tokens": 256, "allow": "unread"}))
    found = result.subjects[0].text
    assert found.bos_reason.startswith("measured on 8 windows of the built-in text: loss ")
    assert (found.windows, found.window) == (4, 64)
    subject = opened(gpt2, text=text, window=64)
    assert subject.start.reason.startswith("measured on 8 windows of the built-in text: loss ")


def test_the_bos_token_replaces_the_last_token_of_a_window() -> None:
    """With a measured BOS token the windows are those without it, shifted by one."""
    ids = torch.arange(12).view(2, 6)
    moved = Windows(ids, "t", "d").with_first(40, after=2)
    assert moved.ids.tolist() == [[40, 0, 1, 2, 4, 5], [40, 6, 7, 8, 10, 11]]
    assert (moved.source, moved.digest) == ("t", "d")


@pytest.mark.parametrize("where", ["text", "bos"])
def test_unknown_token_ids_are_refused_before_the_model_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The tokenizer has entries that the embedding of 40 rows does not have, in the text or as BOS token."""
    model, text = tmp_path / "model", tmp_path / "t.txt"
    save_checkpoint(model, "llama")
    tokenizer = with_bos(model, "more0" if where == "bos" else "[CLS]", words=3)
    largest = tokenizer.convert_tokens_to_ids("more0" if where == "bos" else "more2")
    text.write_text(text_of(4000).replace("w7", "more2" if where == "text" else "w7"))
    ran: list[Any] = []
    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", lambda *args, **given: ran.append(args))
    expected = f"gives token ids up to {largest}, but the embedding of the model has 40 rows, for ids up to 39; use the"
    with pytest.raises(CheckpointError, match=expected):
        dg.gauge(model, text=text, **(SMALL | {"tokens": 8000}))
    with pytest.raises(CheckpointError, match=expected):
        dg.shrink(model, text=text, window=16, effort="quick", remove=1, sampled=0.0)
    with pytest.raises(CheckpointError, match=expected):
        dg.shrink(tiny_model("llama"), tokenizer=tokenizer, text=text, window=16, effort="quick", remove=1, sampled=0.0)
    assert ran == []


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    records = [{"id": n, "text": text_of(40, seed=n), "body": text_of(40, seed=n + 1000)} for n in range(400)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_field_is_measured_as_its_text_alone(gpt2: Path, jsonl: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    bodies = [json.loads(line)["body"] for line in jsonl.read_text().splitlines()]
    plain.write_text("".join(f"{body}\n\n" for body in bodies))
    by_field, by_text = (dg.gauge(gpt2, text=text, **SMALL) for text in (f"{jsonl}:body", plain))
    assert by_field.subjects[0].baseline == by_text.subjects[0].baseline
    assert by_field.subjects[0].text.source == f"{jsonl}:body"
    assert by_field.subjects[0].text.sha256 == hashlib.sha256(jsonl.read_bytes()).hexdigest()
    assert by_field.settings.text == f"{jsonl}:body"
    usual = dg.gauge(gpt2, text=jsonl, **SMALL).subjects[0]
    assert usual.text.source == f"{jsonl}:text"
    assert usual.baseline != by_field.subjects[0].baseline
    lines = tmp_path / "data.txt"
    lines.write_bytes(jsonl.read_bytes())
    raw = dg.gauge(gpt2, text=lines, **SMALL)
    assert raw.subjects[0].text.source == str(lines)
    assert raw.subjects[0].baseline != usual.baseline


def test_shrink_reads_fields(gpt2: Path, jsonl: Path) -> None:
    subject = opened(gpt2, text=[f"{jsonl}:body", jsonl])
    assert [source.name for source in subject.read.sources] == [f"{jsonl}:body", f"{jsonl}:text"]
    with pytest.raises(InputError, match=r"data\.jsonl:text is given twice"):
        opened(gpt2, text=[f"{jsonl}:text", jsonl])
    with pytest.raises(InputError, match=r"line 1 of .* has no field 'title'; its fields are: 'id', 'text', 'body'"):
        opened(gpt2, text=f"{jsonl}:title")


def test_the_command_line_reads_fields(
    gpt2: Path, jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["depthgauge", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    flags = ["--tokens", "64", "--window", "16", "--device", "cpu", "--what-if", "none", "--json"]
    assert run("gauge", str(gpt2), "--text", f"{jsonl}:body", *flags) == 0
    assert json.loads(capsys.readouterr().out)["subjects"][0]["text"]["source"] == f"{jsonl}:body"
    # The file of a field is an input that no output may replace.
    jsonl = jsonl.rename(tmp_path / "data.json")
    for command in (
        ["gauge", str(gpt2), "--text", f"{jsonl}:body", "--out", str(jsonl), "--overwrite"],
        ["shrink", str(gpt2), "--text", f"{jsonl}:body", "--remove", "1", "--out", str(jsonl), "--overwrite"],
    ):
        before = jsonl.read_bytes()
        assert run(*command) == 2
        assert "are the same file" in capsys.readouterr().err
        assert jsonl.read_bytes() == before
    table = tmp_path / "data.csv"
    table.write_text(f"id,text\n1,{text_of(200)}\n")
    for command in (["gauge", str(gpt2), *flags], ["shrink", str(gpt2), "--remove", "1", "--out", str(tmp_path / "o")]):
        assert run(*command, "--text", str(table)) == 2
        assert "is not plain text but comma-separated values" in capsys.readouterr().err
    assert run("gauge", str(gpt2), "--data", str(table.rename(tmp_path / "data.txt")), *flags) == 0


def test_another_file_or_field_is_not_resumed(
    gpt2: Path, jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"
    with monkeypatch.context() as patch:
        patch.setattr("depthgauge.workflows.gauge_checkpoint.subject_record", lambda *args, **findings: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                dg.gauge(gpt2, text=f"{jsonl}:body", out=out, **SMALL)
    with pytest.raises(InputError, match=r"was started with text '.*:body', now it is '.*:text'"):
        dg.gauge(gpt2, text=f"{jsonl}:text", out=out, **SMALL)
    jsonl.write_text(jsonl.read_text() + json.dumps({"text": "w1", "body": "w1"}) + "\n")
    with pytest.raises(InputError, match="was started with sha256"):
        dg.gauge(gpt2, text=f"{jsonl}:body", out=out, **SMALL)
