"""A model that cannot read its text is noticed by both verbs; another tokenizer, or --allow unread, helps."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import SPECIAL, WORDS, save_checkpoint, save_reader, save_tokenizer, text_in_order
from tiny_gguf import write_gguf
from tiny_models import tiny_model
from written_models import write_model

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.tasks.language import LEAST_WINDOW, Start, UnreadableTextError, reading_loss
from depthgauge.checkpoints.weights.load import Placement, load_tokenizer, wrap
from depthgauge.cli.main import main

pytestmark = pytest.mark.usefixtures("forked_verification")
HERE = Placement(device="cpu")
VERBS: dict[str, dict[str, Any]] = {
    "gauge": {"tokens": 192, "window": 48, "what_if": "none", "device": "cpu"},
    "plan_shrink": {"remove": 1, "window": 48, "effort": "quick", "recover": "none", "device": "cpu"},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` with the tokenizer of another model, its own tokenizer in `right`, and a text."""
    folder = tmp_path_factory.mktemp("shared")
    save_reader(folder / "model")
    save_tokenizer(folder / "model", special=False, reverse=True)
    save_tokenizer(folder / "right", special=False)
    (folder / "corpus.txt").write_text(text_in_order(9000))
    return folder


def called(verb: str, shared: Path, **changes: Any) -> Any:
    return getattr(dg, verb)(shared / "model", text=shared / "corpus.txt", **(VERBS[verb] | changes))


@pytest.mark.parametrize(("before", "after"), [((), ()), ((1,), ()), ((0, 1), (2,))])
def test_bits_per_byte_come_from_the_loss_of_transformers(
    tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """The special tokens around a window are neither predicted nor text."""
    save_checkpoint(tmp_path, "llama")
    model, tokenizer = tiny_model("llama"), load_tokenizer(find(tmp_path), HERE)
    bodies = list(torch.randint(4, 40, (3, 34), generator=torch.Generator().manual_seed(0)))
    nats, tokens, size = 0.0, 0, 0
    for body in bodies:
        ids = torch.tensor([[*before, *body.tolist(), *after]])
        labels = ids.clone()
        labels[0, : max(1, len(before))] = labels[0, len(before) + len(body) :] = -100
        text = [[*SPECIAL, *WORDS][token] for token in labels[0].tolist() if token >= 0]
        with torch.no_grad():
            nats += len(text) * float(model(input_ids=ids, labels=labels).loss)
        tokens, size = tokens + len(text), size + len(" ".join(text))
    start = Start(before, after, None, "")
    found = reading_loss(wrap(model), tokenizer, start, bodies)
    assert found == pytest.approx((nats / tokens, nats / math.log(2) / size, 40), rel=1e-5)


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_tokenizer_is_refused_and_can_be_replaced(shared: Path, verb: str) -> None:
    with pytest.raises(
        UnreadableTextError, match=r"bits per byte and .* tokenizer .* --tokenizer DIR, or use --allow unread"
    ):
        called(verb, shared)
    said: list[str] = []
    forced = called(verb, shared, allow="unread", message=said.append)
    assert [line for line in said if "continuing because of --allow unread" in line]
    right = str(shared / "right")
    for given in (right, Path(right)):
        said.clear()
        result = called(verb, shared, tokenizer=given, message=said.append)
        assert not [line for line in said if "cannot read" in line]
        assert result.to_json()["settings"]["tokenizer"] == right
    settings = forced.to_json()["settings"]
    assert (settings["allow"], settings["tokenizer"]) == ("unread", None)
    assert called(verb, shared, window=LEAST_WINDOW - 1)  # too little context to tell


def test_the_uniform_distribution_is_refused(shared: Path, tmp_path: Path) -> None:
    """An untrained model of long words needs few bits per byte, and still knows nothing."""
    model = save_reader(tmp_path)
    model.lm_head.weight.data.zero_()
    model.save_pretrained(tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w', '"' + 20 * "w"))
    (tmp_path / "corpus.txt").write_text((shared / "corpus.txt").read_text().replace("w", 20 * "w"))
    with pytest.raises(UnreadableTextError, match=r"needs 0\.2\d* bits per byte and 3\.69 nats per token"):
        dg.gauge(tmp_path, text=tmp_path / "corpus.txt", **VERBS["gauge"])


def test_without_text_the_built_in_text_is_read(tmp_path: Path) -> None:
    """The model is refused before anything is sampled, also if nothing has to be measured about the BOS token."""
    for add_bos in (True, None):
        write_gguf(tmp_path / "random.gguf", add_bos=add_bos)
        with pytest.raises(UnreadableTextError):
            dg.plan_shrink(tmp_path / "random.gguf", **VERBS["plan_shrink"])


def test_the_shrunk_model_gets_the_given_tokenizer(shared: Path, tmp_path: Path) -> None:
    options = VERBS["plan_shrink"] | {"text": shared / "corpus.txt", "tokenizer": shared / "right"}
    record = dg.shrink(shared / "model", out=tmp_path / "out", **options).record
    assert f"the tokenizer is that of {shared / 'right'}" in record.notes
    expected = (shared / "right" / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == expected
    write_gguf(tmp_path / "m.gguf", add_bos=True)
    source = find(tmp_path / "m.gguf", tokenizer=str(shared / "right"))
    tokenizer = load_tokenizer(source, HERE)
    assert tokenizer("w3")["input_ids"] == [SPECIAL.index("[UNK]") + 4]
    write_model(tiny_model("llama"), source, tokenizer, tmp_path / "gguf", {}, overwrite=False)
    assert (tmp_path / "gguf" / "tokenizer.json").read_bytes() == expected


def test_a_plan_can_be_followed_with_another_tokenizer(shared: Path) -> None:
    """The plan has the directory; a directory that was moved can be given again."""
    plan = called("plan_shrink", shared, tokenizer=shared / "right")
    assert dg.shrink(shared / "model", plan=plan, tokenizer=shared / "right").record.plan == plan
    with pytest.raises(UnreadableTextError):
        dg.shrink(shared / "model", plan=plan, tokenizer=shared / "model")
    assert dg.shrink(shared / "model", plan=plan, tokenizer=shared / "model", allow="unread").record.removed


@pytest.mark.parametrize("verb", VERBS)
def test_directories_without_a_tokenizer_are_refused(shared: Path, tmp_path: Path, verb: str) -> None:
    with pytest.raises(CheckpointError, match=r"is none: it has none of tokenizer\.json"):
        called(verb, shared, tokenizer=tmp_path)
    for other in (tmp_path / "missing", shared / "corpus.txt"):
        with pytest.raises(CheckpointError, match="--tokenizer must be a directory with the files of a tokenizer"):
            called(verb, shared, tokenizer=other)
    memory = load_tokenizer(find(shared / "model"), HERE)
    with pytest.raises(InputError, match="is on disk, and its tokenizer must be a directory"):
        called(verb, shared, tokenizer=memory)
    function = getattr(dg, verb)
    rest = {name: value for name, value in VERBS[verb].items() if name != "device"} | {"text": shared / "corpus.txt"}
    with pytest.raises(InputError, match="tokenizer applies to models that are loaded from disk"):
        function(tiny_model("llama"), tokenizer=shared / "right", **rest)
    with pytest.raises(UnreadableTextError):
        function(tiny_model("llama"), tokenizer=memory, **rest)


def test_the_given_tokenizer_is_never_replaced(shared: Path, tmp_path: Path) -> None:
    save_reader(tmp_path / "other")
    options = VERBS["plan_shrink"] | {"text": shared / "corpus.txt", "tokenizer": tmp_path / "other"}
    with pytest.raises(InputError, match="contains the tokenizer"):
        dg.shrink(shared / "model", out=tmp_path / "other", overwrite=True, **options)


def test_the_command_ends_with_one_sentence(
    shared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["depthgauge", "gauge", str(shared / "model"), "--text", str(shared / "corpus.txt"), "--what-if", "none"]
    words += ["--tokens", "192", "--window", "48", "--json"]

    def typed(*more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    code, out, err = typed()
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: model cannot read its text: it needs ")
    code, out, _ = typed("--tokenizer", str(shared / "right"))
    assert (code, json.loads(out)["settings"]["tokenizer"]) == (0, str(shared / "right"))
    code, _, err = typed("--allow", "unread")
    assert code == 0
    assert "continuing because of --allow unread" in err
