"""The BOS token: what the tokenizer or the GGUF metadata says, and the measurement where neither adds it."""

import re
import statistics
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_checkpoint, text_of
from tiny_gguf import BOS, write_gguf
from tiny_models import tiny_model

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.checkpoints.inputs.windows import special_tokens
from depthgauge.checkpoints.source.library import quiet
from depthgauge.checkpoints.source.model_files import find, gguf_metadata
from depthgauge.checkpoints.tasks.language import Start, measure_start, plan_start
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_config, load_model, load_tokenizer
from depthgauge.results.shrink_record import make_shrink_options
from depthgauge.surgery.open_model import open_model, read_model

HERE = Placement(device="cpu")
SMALL = {"tokens": 64, "window": 16, "device": "cpu", "what_if": "none"}


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool | None, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    found = {add: folder / f"{add}.gguf" for add in (True, False, None)}
    for add, path in found.items():
        write_gguf(path, add_bos=add)
    return found


def plan(path: Path, choice: str = "auto") -> Any:
    source = find(path)
    return plan_start(choice, source, load_tokenizer(source, HERE))


def test_transformers_ignores_the_metadata(ggufs: dict[bool | None, Path]) -> None:
    """The reason for reading the metadata here; if this fails, transformers has learned to do it."""
    assert special_tokens(load_tokenizer(find(ggufs[True]), HERE)) == ([], [])
    assert gguf_metadata(find(ggufs[True]))["tokenizer.ggml.add_bos_token"] is True


def test_the_gguf_metadata_decides(ggufs: dict[bool | None, Path]) -> None:
    start = plan(ggufs[True])
    assert (start.before, start.bos, start.candidate) == ((BOS,), True, None)
    assert "GGUF metadata" in start.reason
    for add in (False, None):
        start = plan(ggufs[add])
        assert (start.before, start.bos, start.candidate) == ((), False, BOS)


def test_the_option_decides(ggufs: dict[bool | None, Path], tmp_path: Path) -> None:
    assert plan(ggufs[None], "yes").before == (BOS,)
    assert plan(ggufs[True], "no").before == ()
    assert plan(ggufs[True], "no").candidate is None
    save_checkpoint(tmp_path, "bert")  # its tokenizer has [CLS] and [SEP] but no BOS token
    with pytest.raises(InputError, match=r"--bos yes needs a BOS token; the tokenizer of .* has none"):
        plan(tmp_path, "yes")
    start = plan(tmp_path)
    assert (len(start.before), len(start.after), start.bos) == (1, 1, None)


def test_a_tokenizer_that_adds_the_token_is_followed(ggufs: dict[bool | None, Path]) -> None:
    class Adding:
        bos_token_id = 7

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [*([7] if add_special_tokens else []), 1, 2]}

    start = plan_start("auto", find(ggufs[None]), Adding())
    assert (start.before, start.bos, start.reason) == ((7,), True, "the tokenizer adds it")
    assert plan_start("no", find(ggufs[None]), Adding()).before == ()


class Letters:
    """One token per letter."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [4 + ord(letter) % 36 for letter in text]}


@pytest.mark.parametrize(
    ("gains", "added", "shown"),
    [
        ([0.5, 0.4] * 4, True, "loss 2.0000 with it and 2.4500 without it, a difference of 0.4500 ± 0.019"),
        ([-0.5, -0.4] * 4, False, "loss 2.0000 with it and 1.5500 without it, a difference of 0.4500 ± 0.019"),
        ([0.5, -0.4] * 4, False, "a difference of 0.0500 ± 0.17; a tie, so as the tokenizer does"),
        ([-0.5, 0.4] * 4, False, "a difference of 0.0500 ± 0.17; a tie, so as the tokenizer does"),
        ([1e-5] * 8, False, "loss 2.0000 with it and 2.0000 without it, .* a tie, so as the tokenizer does"),
    ],
    ids=["better", "worse", "within the error", "within the error, worse", "equal in what is printed"],
)
def test_what_decides_is_printed(monkeypatch: pytest.MonkeyPatch, gains: list[float], added: bool, shown: str) -> None:
    """The model loses 2 nats per token with the token, and more by the gain of the window without it."""

    def output(checkpoint: Any, ids: torch.Tensor) -> torch.Tensor:
        losses = torch.tensor([2.0 + (gain if int(ids[0, 0]) else 0.0) for gain in gains], dtype=torch.float64)
        scale = -torch.log((losses.exp() - 1) / 39)
        return torch.nn.functional.one_hot(ids.roll(-1, dims=1), 40) * scale[:, None, None]

    monkeypatch.setattr("depthgauge.checkpoints.tasks.language.model_output", output)
    model = tiny_model("llama")
    undecided = Start((), (), False, "", candidate=0)
    decided = measure_start(undecided, Checkpoint("m", model, model.config, "loss", ()), Letters())
    assert (decided.bos, decided.before) == (added, (0,) if added else ())
    assert re.search(shown, decided.reason)
    assert decided.reason.startswith("measured on 8 windows of the built-in text: loss ")
    assert measure_start(undecided, Checkpoint("m", None, None, "states", ()), None).bos is False


def started(path: Path, text: Path) -> dict[str, tuple[bool | None, str | None]]:
    """Return what each of the three verbs decides about a model, and why."""
    gauged = dg.gauge(path, text=text, allow="unread", **SMALL).subjects[0].text
    evaluated = dg.evaluate(path, perplexity=str(text), window=16, device="cpu").models[0]
    options = make_shrink_options(None, {"remove": 1, "effort": "quick", "window": 16, "text": text, "allow": "unread"})
    read = read_model(path, find(path), options, None, None, False, lambda sentence: None)
    shrunk = open_model(read, options, None, lambda sentence: None).start
    return {
        "gauge": (gauged.bos, gauged.bos_reason),
        "evaluate": (evaluated.bos, evaluated.bos_reason),
        "shrink": (shrunk.bos, shrunk.reason),
    }


@pytest.mark.parametrize("seed", range(3))
def test_the_verbs_agree_where_it_is_measured(tmp_path: Path, seed: int) -> None:
    """They take the decision that losses computed by transformers alone lead to."""
    path, text = tmp_path / "m.gguf", tmp_path / "t.txt"
    write_gguf(path, add_bos=None, seed=seed)
    text.write_text(text_of(900), encoding="utf-8")
    found = started(path, text)
    assert len({*found.values()}) == 1
    source = find(path)
    model = load_model(source, load_config(source, HERE), HERE).model
    tokenizer = load_tokenizer(source, HERE)
    passage = resources.files("depthgauge.checkpoints.inputs").joinpath("text.txt").read_text("utf-8")
    ids = tokenizer(passage, add_special_tokens=False)["input_ids"]
    gains = []
    for window in range(8):
        body, losses = ids[63 * window : 63 * (window + 1)], []  # the context has 64 tokens
        for before in ([], [BOS]):
            given = torch.tensor([[*before, *body]])
            labels = given.clone()
            labels[0, : 1 + len(before)] = -100  # the first token of the body is predicted by neither
            with torch.no_grad():
                losses.append(float(model(input_ids=given, labels=labels).loss))
        gains.append(losses[0] - losses[1])
    assert found["gauge"][0] == (statistics.mean(gains) > statistics.stdev(gains) / 8**0.5)


@pytest.mark.parametrize("configured", ["adds", "has", "none"])
def test_the_verbs_agree_about_what_is_configured(tmp_path: Path, configured: str) -> None:
    """A tokenizer that adds the token is followed; where it has one and adds none, a tie leaves it out."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    text, folder = tmp_path / "t.txt", tmp_path / "model"
    text.write_text(text_of(4000), encoding="utf-8")
    model = save_checkpoint(folder, "llama")
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight.zero_()  # no token depends on those before it
    with quiet():
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if configured != "none":
        tokenizer.add_special_tokens({"bos_token": "[CLS]"})
    if configured == "adds":
        first = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
        tokenizer.backend_tokenizer.post_processor = first
    tokenizer.save_pretrained(folder)
    found = started(folder, text)
    assert len({*found.values()}) == 1
    bos, reason = found["gauge"]
    expected = {
        "adds": (True, "the tokenizer adds it"),
        "has": (False, "as the tokenizer does"),
        "none": (None, "the model has no BOS token"),
    }[configured]
    assert bos is expected[0]
    assert reason is not None
    assert reason.endswith(expected[1])


def test_the_result_says_what_was_chosen(ggufs: dict[bool | None, Path], tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text(text_of(60), encoding="utf-8")
    chosen = {bos: dg.gauge(ggufs[True], text=text, bos=bos, **SMALL) for bos in ("auto", "yes", "no")}
    assert [result.subjects[0].text.bos for result in chosen.values()] == [True, True, False]
    assert chosen["auto"].subjects[0].baseline == chosen["yes"].subjects[0].baseline
    assert chosen["auto"].subjects[0].baseline != chosen["no"].subjects[0].baseline
    assert chosen["no"].settings.bos == "no"
    # With the token, the first position of every window is the BOS token and attention on it is measured.
    masses = [result.subjects[0].layers[0].heads[0].first_mass for result in chosen.values()]
    assert masses[0] == masses[1] != masses[2]
