"""The BOS token: what the tokenizer or the GGUF metadata says, and the measurement where neither adds it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_checkpoint, text_of
from tiny_gguf import BOS, write_gguf
from tiny_models import tiny_model

import depthgauge as dg
from depthgauge.checkpoints.load import Checkpoint, Placement, load_config, load_model, load_tokenizer
from depthgauge.checkpoints.source import find, gguf_metadata
from depthgauge.checkpoints.start_token import measure_start, plan_start
from depthgauge.checkpoints.windows import read_windows, special_tokens
from depthgauge.errors import InputError

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


class Repeats:
    """A model whose loss depends on whether the sequence starts with token 0."""

    def __init__(self, wants_bos: bool) -> None:
        self.wants_bos = wants_bos

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return torch.nn.Embedding(9, 1)

    def __call__(self, input_ids: torch.Tensor) -> Any:
        good = bool(input_ids[0, 0] == 0) == self.wants_bos
        following = torch.nn.functional.one_hot(input_ids.roll(-1, dims=1), 9).float()
        return SimpleNamespace(logits=following * (5.0 if good else 1.0))


@pytest.mark.parametrize("wants_bos", [True, False])
def test_the_smaller_loss_wins(ggufs: dict[bool | None, Path], wants_bos: bool) -> None:
    undecided = plan(ggufs[None])
    undecided = type(undecided)((), (), False, "", candidate=0)
    checkpoint = Checkpoint("m", Repeats(wants_bos), tiny_model("llama").config, "loss", ())
    decided = measure_start(undecided, checkpoint, [torch.arange(1, 8), torch.arange(2, 9)])
    assert (decided.bos, decided.before) == (wants_bos, (0,) if wants_bos else ())
    assert decided.reason.startswith("measured on 2 windows: loss ")
    assert measure_start(undecided, Checkpoint("m", None, None, "states", ()), []).bos is False


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_the_better_of_two_forward_passes(tmp_path: Path, seed: int) -> None:
    """The decision in the result agrees with losses computed by transformers alone."""
    path, text = tmp_path / "m.gguf", tmp_path / "t.txt"
    write_gguf(path, add_bos=None, family="qwen2", seed=seed)
    text.write_text(text_of(60), encoding="utf-8")
    result = dg.gauge(path, text=text, **SMALL)
    source = find(path)
    model = load_model(source, load_config(source, HERE), HERE).model
    bodies = read_windows(load_tokenizer(source, HERE), text, tokens=64, window=16, context=64, seed=0).ids[:3]
    losses = {}
    for bos in (True, False):
        values = []
        for body in bodies.tolist():
            ids = torch.tensor([[*([BOS] if bos else []), *body]])
            labels = ids.clone()
            labels[0, : 1 + bos] = -100  # the first token of the body is predicted by neither
            with torch.no_grad():
                values.append(float(model(input_ids=ids, labels=labels).loss))
        losses[bos] = sum(values) / len(values)
    assert result.subjects[0].text.bos == (losses[True] < losses[False])


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
