"""What a recovery trains on: all of the texts, nothing that is held, in an order that the seed decides."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import WORDS, save_tokenizer, text_of
from tiny_models import tiny_model

from depthgauge.base.errors import InputError, MissingPackageError
from depthgauge.checkpoints.inputs import text_files
from depthgauge.checkpoints.inputs.text_files import HubData, TextFile, find_general, find_text
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.tasks.language import Start
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_tokenizer, wrap
from depthgauge.recovery import training_data as made_here
from depthgauge.recovery.training_data import RUN, HeldRuns, RecoveryData, training_data

START = Start((1,), (), True, "")
UNKNOWN = 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Splits at white space; word i is token i + 4."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").touch()
    save_tokenizer(folder, special=False)
    return load_tokenizer(find(folder), Placement())


@pytest.fixture(scope="module")
def teacher() -> Checkpoint:
    return wrap(tiny_model("llama"), "tiny")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write(text: str, name: str = "corpus.txt") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


def tokens(text: str) -> list[int]:
    return [WORDS.index(word) + 4 for word in text.split()]


def prepare(
    teacher: Checkpoint, tokenizer: Any, texts: list[str], general: str | None = "none", **changes: Any
) -> RecoveryData:
    settings = {"start": START, "window": 16, "wanted": 40, "held": (), "seed": 0} | changes
    return training_data(teacher, tokenizer, [find_text(text) for text in texts], general, **settings)


def runs(rows: Any, length: int) -> set[tuple[int, ...]]:
    """All runs of a length in rows of token ids, by plain Python."""
    return {tuple(row[i : i + length]) for row in rows for i in range(len(row) - length + 1)}


def contents(data: RecoveryData) -> list[tuple[int, ...]]:
    return [tuple(row[1:]) for row in data.windows.tolist()]


def test_all_of_the_texts_is_used_once(teacher: Checkpoint, tokenizer: Any, write: Any) -> None:
    one, two = text_of(1000, seed=1), text_of(317, seed=2)
    names = [write(one, "one.txt"), write(two, "two.txt")]
    made = prepare(teacher, tokenizer, names)
    grid = [tuple(ids[i : i + 15]) for ids in map(tokens, (one, two)) for i in range(0, len(ids) - 14, 15)]
    assert contents(made) == grid
    assert (made.windows[:, 0] == 1).all()
    assert made.own == len(grid) == 66 + 21
    assert made.sources == {names[0]: 66 * 15, names[1]: 21 * 15}
    ends = prepare(teacher, tokenizer, names[:1], start=Start((1,), (2, 2), True, ""))
    assert ends.windows.shape == (1000 // 13, 16)
    assert (ends.windows[:, -2:] == 2).all()
    again = prepare(teacher, tokenizer, [write(" ".join([text_of(150)] * 10))])
    assert len(again.windows) == 10  # of a hundred


def test_a_large_text_gives_as_many_windows_as_are_wanted(
    teacher: Checkpoint, tokenizer: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "WHOLE_BYTES", 1000)
    text = text_of(60_000)
    plain = write(text)
    lines = write("\n".join(json.dumps({"text": text[i : i + 600]}) for i in range(0, len(text), 600)), "d.jsonl")
    for name in (plain, lines):
        made = prepare(teacher, tokenizer, [name], wanted=100)
        assert 100 <= len(made.windows) < 600
        assert len(prepare(teacher, tokenizer, [name], wanted=4000).windows) > 3000  # all of it
    inside = runs([tokens(text)], 15)
    assert set(contents(prepare(teacher, tokenizer, [plain], wanted=100))) <= inside


@pytest.mark.parametrize("window", [16, 64])
def test_held_windows_are_left_out_wherever_they_start(
    teacher: Checkpoint, tokenizer: Any, write: Any, window: int
) -> None:
    part = text_of(400, seed=1)
    text = " ".join([text_of(301, seed=2), part, text_of(7, seed=3), part, text_of(500, seed=4), part])
    ids = torch.tensor(tokens(text))
    chosen = torch.stack([ids[place : place + window - 1] for place in (350, 520, 41)])
    held = [torch.cat([torch.ones(3, 1, dtype=torch.int64), chosen], dim=1)]
    forbidden = runs(chosen.tolist(), 8)
    other = write(" ".join([text_of(11, seed=5), part, text_of(300, seed=6)]), "other.txt")
    for texts, general in (([write(text)], "none"), ([write(text)], other), ([], other)):
        free = prepare(teacher, tokenizer, texts, general, window=window)
        assert len(runs(contents(free), 8) & forbidden) > 3  # the text repeats what is held
        made = prepare(teacher, tokenizer, texts, general, window=window, held=held)
        assert not runs(contents(made), 8) & forbidden
        # Nothing else is lost: two windows are held at three places or in the other text, and one at one place.
        lost = 7 * len(texts) + 2 * (general != "none")
        assert lost - 2 <= len(free.windows) - len(made.windows) <= lost + 2
    again = write(" ".join([part] * 9))
    with pytest.raises(InputError, match=f"no window of {window} tokens to train on, beyond those that select"):
        prepare(teacher, tokenizer, [again], window=window, held=[torch.tensor([[1, *tokens(part)]])])


def test_held_runs_are_those_of_a_plain_search() -> None:
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        size, run = int(torch.randint(2, 5, (), generator=draw)), int(torch.randint(1, 7, (), generator=draw))
        ids = torch.randint(size, (3, 50), generator=draw)
        held = [torch.randint(size, (2, run + 1), generator=draw), torch.randint(size, (1, run), generator=draw)]
        forbidden = runs([row for rows in held for row in rows.tolist()], run)
        expected = torch.zeros(ids.shape, dtype=torch.bool)
        for number, row in enumerate(ids.tolist()):
            for start in range(len(row) - run + 1):
                expected[number, start : start + run] |= tuple(row[start : start + run]) in forbidden
        found = HeldRuns.of(held, 40)
        assert found.run == run
        assert torch.equal(found.cover(ids), expected)
        assert torch.equal(found.cover(ids[1]), expected[1])
        assert not found.cover(ids[:, : run - 1]).any()
    assert not HeldRuns.of([], 40).cover(ids).any()
    assert HeldRuns.of([torch.zeros(1, 500, dtype=torch.int64)], 400).run == RUN


def test_own_and_general_windows_alternate_in_shuffled_passes() -> None:
    data = RecoveryData(torch.arange(10)[:, None], 3, {})
    order = data.order(41, seed=5)
    own, general = order[0::2], order[1::2]
    assert [sorted(own[i : i + 3].tolist()) for i in range(0, 21, 3)] == [[0, 1, 2]] * 7
    assert [sorted(general[i : i + 7].tolist()) for i in range(0, 14, 7)] == [[3, 4, 5, 6, 7, 8, 9]] * 2
    assert len({tuple(own[i : i + 3].tolist()) for i in range(0, 21, 3)}) > 1
    assert general[:7].tolist() != general[7:14].tolist()
    assert torch.equal(order, data.order(41, seed=5))
    assert not torch.equal(order, data.order(41, seed=6))
    for own_alone in (0, 10):
        alone = RecoveryData(torch.arange(10)[:, None], own_alone, {}).order(25, seed=0)
        assert sorted(alone[:10].tolist()) == sorted(alone[10:20].tolist()) == list(range(10))
        assert len(alone) == 25


def test_the_model_continues_prefixes_of_both_texts(teacher: Checkpoint, tokenizer: Any, write: Any) -> None:
    text, calls = text_of(3000), []
    settings: dict[str, Any] = {"wanted": 200, "window": 24, "progress": lambda *call: calls.append(call)}
    made = prepare(teacher, tokenizer, [write(text)], None, **settings)
    assert 0.8 * 100 < len(made.windows) - made.own <= 100
    assert made.sources["continued by tiny"] == 23 * (len(made.windows) - made.own)
    general = contents(made)[made.own :]
    assert (made.windows[:, 0] == 1).all()
    built_in = [row for row in general if row[:8] == (UNKNOWN,) * 8]  # to this tokenizer
    assert 40 <= len(built_in) <= 50
    user = [row[:8] for row in general if row not in built_in]
    assert set(user) <= runs([tokens(text)], 8)
    assert len(set(user)) == len(user)  # no place is used twice
    assert not set(user) <= {row[:8] for row in contents(made)[: made.own]}  # they start at random places
    assert len(set(general)) == len(general)
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)
    assert calls[-1] == (100, 100, "sample general windows")
    assert made == prepare(teacher, tokenizer, [write(text)], None, **settings)
    other = prepare(teacher, tokenizer, [write(text)], None, **(settings | {"seed": 1}))
    assert not set(contents(other)[other.own :]) & set(general)
    alone = prepare(teacher, tokenizer, [], None, **settings)
    assert alone.own == 0
    assert {row[:8] for row in contents(alone)} == {(UNKNOWN,) * 8}
    assert len(alone.windows) > 0.8 * 200


def test_nothing_held_is_continued_or_sampled(
    teacher: Checkpoint, tokenizer: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(600)
    ids = torch.tensor(tokens(text))
    held = [torch.cat([torch.ones(1, 31, dtype=torch.int64).new_ones(13, 1), ids[100 : 100 + 13 * 31].view(13, 31)], 1)]
    built_in = [torch.tensor([[1] + [UNKNOWN] * 31])]
    seen = []

    def planted(checkpoint: Checkpoint, *, prompts: torch.Tensor, window: int, **_: Any) -> torch.Tensor:
        seen.append(prompts)
        rest = torch.randint(4, 40, (len(prompts), window - prompts.shape[1]), generator=torch.Generator())
        rest[::2, : 31 - 8] = held[0][0, 1 : 32 - 8]
        return torch.cat([prompts, rest], dim=1)

    monkeypatch.setattr(made_here, "sample_windows", planted)
    made = prepare(teacher, tokenizer, [write(text)], None, window=32, wanted=60, held=held + built_in)
    prompts = torch.cat(seen)[:, 1:].tolist()
    assert len(prompts) == 30
    assert not any(UNKNOWN in prompt for prompt in prompts)
    assert not {tuple(prompt) for prompt in prompts} & runs([ids[107 : 100 + 13 * 31 - 7].tolist()], 8)
    assert not runs(contents(made), 31) & runs(held[0][:, 1:].tolist(), 31)


def test_outliers_by_loss_are_dropped(teacher: Checkpoint) -> None:
    draw = torch.Generator().manual_seed(0)
    windows = torch.randint(3, 40, (60, 24), generator=draw)
    with torch.no_grad():
        for place in range(8, 24):
            scores = teacher.model(input_ids=windows[:2, :place]).logits[:, -1, 3:]
            windows[0, place], windows[1, place] = scores[0].argmax() + 3, scores[1].argmin() + 3
        likely = teacher.model(input_ids=windows).logits.double().log_softmax(-1)
    losses = -likely[:, 7:-1].gather(2, windows[:, 8:, None])[..., 0].mean(dim=1).numpy()
    first, third = np.percentile(losses, [25, 75])
    inside = (losses > first - 1.5 * (third - first)) & (losses < third + 1.5 * (third - first))
    assert not inside[0]
    assert not inside[1]
    assert inside.sum() > 50
    assert torch.equal(made_here._usual(teacher, windows, 8), windows[torch.from_numpy(inside)])


def test_sampling_takes_a_part_of_a_limited_time(
    teacher: Checkpoint, tokenizer: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_here, "_TOGETHER", {"cpu": 4})
    sample, clock, texts = made_here.sample_windows, [0.0], [write(text_of(900))]

    def slow(*given: Any, **settings: Any) -> torch.Tensor:
        clock[0] += 6
        return sample(*given, **settings)

    monkeypatch.setattr(made_here, "sample_windows", slow)
    monkeypatch.setattr(made_here.time, "perf_counter", lambda: clock[0])
    # A block takes 6 seconds. A fifth of 100 seconds holds three of them, and a fifth of 10 seconds none.
    for seconds, blocks in ((100.0, 3), (10.0, 0)):
        clock[0], said = 0.0, []
        made = prepare(teacher, tokenizer, texts, None, wanted=80, seconds=seconds, message=said.append)
        assert len(made.windows) - made.own <= 4 * blocks
        assert (len(made.windows) > made.own) == (len(made.sources) > 1) == (blocks > 0)
        assert len(said) == 1
        assert said[0].startswith(f"{4 * blocks} windows of 40 were sampled from tiny in 1/5 of the time")
        assert ("the texts alone" in said[0]) == (blocks == 0)
    clock[0], said = 0.0, []
    made = prepare(teacher, tokenizer, texts, None, wanted=80, seconds=300.0, message=said.append)
    assert len(made.windows) - made.own > 30
    assert said == []  # ten blocks take all of the fifth


def test_what_cannot_be_sampled_has_no_general_part(tokenizer: Any, write: Any) -> None:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    bare = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    cases = {
        "bert is not a causal language model and writes no general text": wrap(tiny_model("bert"), "bert"),
        "gpt cannot be sampled: OpenAIGPTLMHeadModel returns no KV cache": wrap(bare, "gpt"),
    }
    for words, checkpoint in cases.items():
        said: list[str] = []
        made = prepare(checkpoint, tokenizer, [write(text_of(300))], None, message=said.append)
        assert made.own == len(made.windows) == 20
        assert len(made.sources) == 1
        assert len(said) == 1
        assert words in said[0]
        assert "texts alone" in said[0]


def test_a_general_file(teacher: Checkpoint, tokenizer: Any, write: Any) -> None:
    own, other = text_of(600, seed=1), text_of(450, seed=2)
    rows = write("\n".join(json.dumps({"body": other[i : i + 300]}) for i in range(0, len(other), 300)), "g.jsonl")
    for general in (write(other, "general.txt"), f"{rows}:body"):
        made = prepare(teacher, tokenizer, [write(own)], general)
        assert len(made.sources) == 2
        assert made.sources[general] == 15 * (len(made.windows) - made.own)
        assert 28 <= len(made.windows) - made.own <= 30
    said: list[str] = []
    made = prepare(teacher, tokenizer, [write(own)], write(own, "copy.txt"), message=said.append)
    assert made.own == len(made.windows) == 40
    assert said == [
        f"{write(own, 'copy.txt')} has no window of 16 tokens beyond the user's texts; the texts alone are used"
    ]


@pytest.fixture
def on_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set that the library `datasets` finds in a directory instead of on the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "org" / "name").mkdir(parents=True)
    return tmp_path / "org" / "name"


def test_names_of_general_texts(write: Any, on_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_general("a/b@1f2e") == HubData("a/b", "1f2e")
    assert find_general("a/b-c.d@v1.0:body") == HubData("a/b-c.d", "v1.0", "body")
    assert find_general(write("w1 w2")) == TextFile(Path(write("w1 w2")))
    Path("org/file@1.txt").write_text("w1")
    assert find_general("org/file@1.txt") == TextFile(Path("org/file@1.txt"))
    for given in ("HuggingFaceFW/fineweb-edu", "HuggingFaceFW/fineweb-edu:text"):
        with pytest.raises(InputError) as raised:
            find_general(given)
        for words in (
            f"{given} is no file here", "the result must be reproducible", "give HuggingFaceFW/fineweb-edu@COMMIT",
        ):  # fmt: skip
            assert words in str(raised.value)
    with pytest.raises(InputError, match="cannot read text a/b@1: No such file"):
        find_general("./a/b@1")


def test_a_data_set_is_streamed(teacher: Checkpoint, tokenizer: Any, write: Any, on_hub: Path) -> None:
    documents = [text_of(40, seed=seed) for seed in range(60)]
    rows = [json.dumps({"text": one, "body": one.upper()}) for one in documents]
    (on_hub / "train.jsonl").write_text("\n".join(rows))
    seen: list[tuple[int, int, str]] = []
    made = prepare(
        teacher, tokenizer, [write(text_of(600, seed=99))], "org/name@1f2e", progress=lambda *call: seen.append(call)
    )
    assert contents(made)[made.own :] == [
        tuple(tokens(" ".join(documents))[i : i + 15]) for i in range(0, 21 * 15, 15)
    ]  # eight documents have the tokens of 20 windows, and of one more
    assert made.sources["org/name@1f2e"] == 21 * 15
    assert seen[-1] == (20, 20, "read windows of org/name@1f2e")
    field = prepare(teacher, tokenizer, [], "org/name@1f2e:body", wanted=20)
    assert set(field.windows[:, 1:].flatten().tolist()) == {UNKNOWN}
    with pytest.raises(InputError, match=r"document 1 of org/name@1f2e:no has no field 'no'; its fields are: 'text'"):
        prepare(teacher, tokenizer, [], "org/name@1f2e:no")


def test_data_sets_that_cannot_be_read(
    teacher: Checkpoint, tokenizer: Any, on_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    read = []

    def streamed(name: str, **given: Any) -> Iterator[dict[str, str]]:
        assert (name, given) == ("org/other", {"revision": "1f2e", "split": "train", "streaming": True})
        for number in range(1000):
            read.append(number)
            yield {"text": text_of(100, seed=number)}
            if number == 30:
                raise ConnectionError("the connection is lost")

    monkeypatch.setattr(datasets, "load_dataset", streamed)
    assert len(prepare(teacher, tokenizer, [], "org/other@1f2e", wanted=20).windows) == 20
    assert len(read) == 3  # documents, for 300 tokens
    with pytest.raises(InputError, match="cannot read the data set org/other@1f2e: the connection is lost; check its"):
        prepare(teacher, tokenizer, [], "org/other@1f2e", wanted=2000)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="a data set on the hub needs the extra `train`"):
        prepare(teacher, tokenizer, [], "org/other@1f2e")
