"""The three parts of the calibration text: disjoint, in the requested shares, reproducible."""

import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import WORDS, save_tokenizer, text_of
from tiny_models import tiny_model

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.inputs import text_files as reading
from depthgauge.checkpoints.inputs.text_files import find_text, find_texts
from depthgauge.checkpoints.inputs.windows import read_windows
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.tasks.language import Start
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_tokenizer, wrap
from depthgauge.surgery import calibration as parts
from depthgauge.surgery.calibration import (
    PARTS,
    Calibration,
    CalibrationRequest,
    CalibrationSizes,
    CutTexts,
    cut_texts,
    prepare_calibration,
    windows_digest,
)

SIZES = CalibrationSizes(fit=10, select=6, certify=12)
BOS = ((1,), ())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Splits at white space; word i is token i + 4."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").touch()
    save_tokenizer(folder, special=False)
    return load_tokenizer(find(folder), Placement())


@pytest.fixture(scope="module")
def decoder() -> Checkpoint:
    return wrap(tiny_model("llama"), "tiny")


@pytest.fixture(scope="module")
def encoder() -> Checkpoint:
    return wrap(tiny_model("bert"), "tiny")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def prepare(checkpoint: Checkpoint, tokenizer: Any, texts: list[Path], **changes: Any) -> Calibration:
    said: list[str] = []
    settings = {
        "sizes": SIZES, "sampled": 0.5, "window": 16, "context": 64, "special": BOS, "seed": 0, "message": said.append,
        "decoder": checkpoint.objective == "loss",
    } | changes  # fmt: skip
    message, special = settings.pop("message"), settings.pop("special")
    start = Start(*special, True, "")
    cut = cut_texts(tokenizer, CalibrationRequest(tuple(map(find_text, texts)), start=start, **settings))
    return prepare_calibration(checkpoint, tokenizer, cut, start, message=message)


def of(made: Calibration, part: str, kind: str) -> torch.Tensor:
    """Return the token ids of the windows of a part whose source has this kind."""
    matches = torch.tensor([source.kind == kind for source in made.record.sources])
    windows = getattr(made, part)
    return windows.inputs[matches[windows.source]]


def contents(part: parts.CalibrationPart) -> list[tuple[int, ...]]:
    return [tuple(row) for row in part.inputs.tolist()]


def assert_disjoint(made: Calibration) -> None:
    every = contents(made.fit) + contents(made.select) + contents(made.certify)
    assert len(set(every)) == len(every)
    for index, source in enumerate(made.record.sources):
        for name in ("fit", "select", "certify"):
            assert int((getattr(made, name).source == index).sum()) == getattr(source, name)


def grid(text: str, length: int) -> list[tuple[int, ...]]:
    """All windows of a text on the grid, by plain Python."""
    ids = [WORDS.index(word) + 4 for word in text.split()]
    return [tuple(ids[i : i + length]) for i in range(0, len(ids) - length + 1, length)]


def test_half_of_the_windows_are_sampled(decoder: Checkpoint, tokenizer: Any, write: Any) -> None:
    text = text_of(1000)
    made = prepare(decoder, tokenizer, [write("t", text)])
    assert_disjoint(made)
    assert [source.kind for source in made.record.sources] == ["text", "sampled", "built-in"]
    counts = [(len(of(made, part, "text")), len(of(made, part, "sampled"))) for part in PARTS]
    assert counts == [(5, 5), (3, 3), (12, 3)]
    assert [len(of(made, part, "built-in")) for part in PARTS] == [0, 0, 1]  # to this tokenizer it is all [UNK]
    assert made.guaranteed_kind == "text"
    assert made.record.window == made.fit.inputs.shape[1] == 16
    places = []
    for part in PARTS:
        assert (getattr(made, part).inputs[:, 0] == 1).all()
        places += [grid(text, 15).index(row[1:]) for row in map(tuple, of(made, part, "text").tolist())]
    assert len(set(places)) == 20  # windows of the text, none used twice; on a grid, so none overlap
    assert places != sorted(places)
    assert [row[1:] for row in map(tuple, of(made, "certify", "sampled").tolist()) if row[1:] in grid(text, 15)] == []
    mixed = made.certify.source.tolist()
    assert mixed != sorted(mixed)


def test_samples_are_the_models_own(decoder: Checkpoint, tokenizer: Any) -> None:
    """On its samples the tiny model has a lower loss than on random words."""
    made = prepare(decoder, tokenizer, [], sizes=CalibrationSizes(60, 1, 1))
    assert (made.fit.inputs[:, 1] > 3).all()  # [PAD] and [UNK] of the tokenizer, BOS and EOS of the model are no starts

    def loss(ids: torch.Tensor) -> float:
        with torch.no_grad():
            logits = decoder.model(ids).logits[:, 1:-1]
        return float(torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 2:]))

    random = torch.cat([made.fit.inputs[:, :2], made.fit.inputs[torch.randperm(60), 2:]], dim=1)
    assert loss(made.fit.inputs) < loss(random) - 0.5


def test_several_texts_have_equal_shares(decoder: Checkpoint, tokenizer: Any, write: Any) -> None:
    texts = [write(f"t{i}", text_of(1000, seed=i)) for i in range(3)]
    made = prepare(decoder, tokenizer, texts, sizes=CalibrationSizes(16, 8, 14), sampled=0.25)
    assert_disjoint(made)
    shares = [(source.fit, source.select, source.certify) for source in made.record.sources]
    assert shares == [(4, 2, 5), (4, 2, 5), (4, 2, 4), (4, 2, 3), (0, 0, 1)]
    assert [source.name for source in made.record.sources[:3]] == [str(path) for path in texts]
    for index, path in enumerate(texts):
        known = grid(path.read_text(), 15)
        for part in (made.fit, made.select, made.certify):
            assert all(tuple(row[1:]) in known for row in part.inputs[part.source == index].tolist())
        assert made.record.sources[index].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        (0.0, [(10, 6, 12), (0, 0, 1)]),
        (1.0, [(0, 0, 12), (10, 6, 3)]),
        (0.01, [(9, 5, 12), (1, 1, 3)]),
        (0.99, [(1, 1, 12), (9, 5, 3)]),
        (0.3, [(7, 4, 12), (3, 2, 3)]),
    ],
)
def test_the_share_of_samples(
    decoder: Checkpoint, tokenizer: Any, write: Any, sampled: float, expected: list[tuple[int, ...]]
) -> None:
    made = prepare(decoder, tokenizer, [write("t", text_of(1000))], sampled=sampled)
    assert [(source.fit, source.select, source.certify) for source in made.record.sources[:2]] == expected
    assert_disjoint(made)


def test_without_text_everything_is_sampled(decoder: Checkpoint, tokenizer: Any) -> None:
    made = prepare(decoder, tokenizer, [])
    assert [source.kind for source in made.record.sources] == ["sampled", "built-in"]
    assert made.guaranteed_kind == "sampled"
    assert (made.record.sources[0].fit, made.record.sources[0].select, made.record.sources[0].certify) == (10, 6, 12)
    assert made.record.sources[0].name == "sampled from tiny"
    assert_disjoint(made)
    letters = Letters()
    read = of(prepare(decoder, letters, []), "certify", "built-in")
    known = letters(built_in())["input_ids"]
    middle = -(-(len(known) // 15) // 2)  # the first half is not evaluated, because a recovery may continue it
    expected = [known[15 * i : 15 * i + 15] for i in range(middle, middle + parts.BUILT_IN_WINDOWS)]
    assert sorted(read[:, 1:].tolist()) == sorted(expected)
    assert len(of(made, "certify", "text")) == 0


def test_encoders_use_text_alone(encoder: Checkpoint, tokenizer: Any, write: Any) -> None:
    said: list[str] = []
    settings: dict[str, Any] = {"special": ((1,), (2,)), "message": said.append}
    made = prepare(encoder, tokenizer, [write("t", text_of(1000))], **settings)
    assert said == ["tiny is not a causal language model, so it cannot be sampled: the text alone is used"]
    assert [(s.kind, s.fit, s.select) for s in made.record.sources] == [("text", 10, 6), ("built-in", 0, 0)]
    assert made.guaranteed_kind == "text"
    assert_disjoint(made)
    assert (made.fit.inputs[:, 0] == 1).all()
    assert (made.fit.inputs[:, -1] == 2).all()


def test_an_encoder_without_text_uses_the_built_in_one(encoder: Checkpoint, tokenizer: Any) -> None:
    said: list[str] = []
    settings: dict[str, Any] = {"special": ((1,), (2,)), "message": said.append, "window": 64}
    # This tokenizer does not know the words of the built-in text; take its tokens from the letters instead.
    letters = Letters()
    made = prepare(encoder, letters, [], **settings)
    assert made.guaranteed_kind == "built-in"
    assert [(s.kind, s.fit, s.select, s.certify) for s in made.record.sources] == [("built-in", 10, 6, 12)]
    assert made.record.window == 64
    assert len(said) == 1
    large = prepare(encoder, letters, [], **settings, sizes=CalibrationSizes(200, 100, 200))
    assert_disjoint(large)
    assert 8 < large.record.window < 64
    assert said[-1] == (
        "the built-in text is too short for windows of 64 tokens, so they have "
        f"{large.record.window}; give a longer text with --text"
    )
    tokens = len(letters(built_in())["input_ids"])
    assert large.record.window == tokens // 500 + 2
    with pytest.raises(InputError, match=r"the built-in text has \d+ tokens, enough for \d+ windows"):
        prepare(encoder, letters, [], **settings, sizes=CalibrationSizes(10**4, 100, 200))


def built_in() -> str:
    return (Path(reading.__file__).parent / "text.txt").read_text(encoding="utf-8")


class Letters:
    """One token per letter, 36 of them."""

    all_special_ids = (0, 1, 2, 3)
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [4 + ord(letter) % 36 for letter in text]}

    def __len__(self) -> int:
        return 40


def test_repeated_windows_are_dropped(decoder: Checkpoint, tokenizer: Any, write: Any) -> None:
    """A text of 28 different windows, each of them many times, gives each window once."""
    pieces = [text_of(15, seed=seed) for seed in range(28)]
    order = torch.randint(28, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    path = write("t", " ".join(pieces[i] for i in order))
    made = prepare(decoder, tokenizer, [path], sampled=0.0)
    assert_disjoint(made)
    used = [row[1:] for part in PARTS for row in map(tuple, of(made, part, "text").tolist())]
    assert sorted(used) == sorted(set(grid(" ".join(pieces), 15)))
    with pytest.raises(InputError, match="has 6000 tokens, enough for 28 windows of 16 tokens that do not repeat; 29"):
        prepare(decoder, tokenizer, [path], sampled=0.0, sizes=CalibrationSizes(11, 6, 12))


def test_equal_files_share_no_window(decoder: Checkpoint, tokenizer: Any, write: Any) -> None:
    text = text_of(15 * 28)
    first, copy = write("a", text), write("b", text)
    with pytest.raises(InputError, match=r"b has 420 tokens, enough for 0 windows of 16 tokens that do not repeat; 14"):
        prepare(decoder, tokenizer, [first, copy], sampled=0.0)
    longer = write("c", text + " " + text_of(15 * 14, seed=1))
    assert_disjoint(prepare(decoder, tokenizer, [first, longer], sampled=0.0))
    with pytest.raises(InputError, match="a is given twice; give every file once"):
        find_texts([first, first.parent / ".." / first.parent.name / "a"])


def test_the_built_in_text_given_as_text_is_not_certified_twice(decoder: Checkpoint, write: Any) -> None:
    said: list[str] = []
    path = write("t", built_in())
    made = prepare(decoder, Letters(), [path], message=said.append)
    assert [source.kind for source in made.record.sources] == ["text", "sampled"]
    assert said == ["the built-in text is left out: it has no window of 16 tokens beyond the others"]
    assert made.notes == tuple(said)


def test_a_model_that_repeats_itself(decoder: Checkpoint, tokenizer: Any) -> None:
    """Two tokens after BOS have 36 first tokens: 100 different windows need many more samples."""
    peaked = wrap(tiny_model("llama", spread=3.0), "peaked")
    with pytest.raises(InputError, match=r"400 different windows of 3 tokens are needed, but peaked repeats itself"):
        prepare(peaked, tokenizer, [], window=3, sizes=CalibrationSizes(200, 100, 100))
    made = prepare(decoder, tokenizer, [], window=3, sizes=CalibrationSizes(60, 20, 20))
    assert_disjoint(made)


@pytest.mark.parametrize("words", [0, 100, 299])
def test_short_texts_are_refused_with_the_window_that_works(
    decoder: Checkpoint, tokenizer: Any, write: Any, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("t", text_of(words))
    with pytest.raises(InputError, match=r"use a longer text$"):  # a window of 15 tokens is no advice
        prepare(decoder, tokenizer, [path])
    monkeypatch.setattr("depthgauge.checkpoints.inputs.windows.SHORT_WINDOW", 8)
    with pytest.raises(InputError) as caught:
        prepare(decoder, tokenizer, [path])
    said = str(caught.value)
    assert f"t has {words} tokens, enough for {words // 15} windows of 16 tokens that do not repeat; 20 are" in said
    assert "at least 300 tokens" in said
    if words < 20 * 8:
        assert said.endswith("use a longer text")
        return
    assert said.endswith(f"use a longer text, or --window {words // 20 + 1}")
    works = prepare(decoder, tokenizer, [path], window=words // 20 + 1)
    assert works.record.sources[0].certify == 12
    with pytest.raises(InputError, match="use a longer text, or"):
        prepare(decoder, tokenizer, [path], window=words // 20 + 2)


def test_the_recommended_window_works_for_all_texts(
    decoder: Checkpoint, tokenizer: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("depthgauge.checkpoints.inputs.windows.SHORT_WINDOW", 8)
    repeated = " ".join([text_of(100)] * 3)  # windows of 10 and of 20 tokens repeat, most others do not
    texts = [write("a", text_of(2000)), write("b", text_of(130, seed=1)), write("c", repeated)]
    sizes = CalibrationSizes(18, 9, 9)
    with pytest.raises(InputError, match="use a longer text, or --window") as caught:
        prepare(decoder, tokenizer, texts, sizes=sizes, sampled=0.0, window=22)
    window = int(str(caught.value).rsplit(" ", 1)[1])
    assert window == 130 // 12 + 1 - 1  # 10 tokens and BOS would repeat in the third text
    assert_disjoint(prepare(decoder, tokenizer, texts, sizes=sizes, sampled=0.0, window=window))


def test_the_seed_decides_everything(decoder: Checkpoint, tokenizer: Any, write: Any) -> None:
    path = write("t", text_of(1000))
    first, again, other = (prepare(decoder, tokenizer, [path], seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.record.sha256 == again.record.sha256
    assert first.record.sha256 != other.record.sha256
    for kind in ("text", "sampled"):
        ours, theirs = (Counter(map(tuple, of(one, "fit", kind).tolist())) for one in (first, other))
        assert ours != theirs
    assert (first.record.window, first.record.bos) == (16, True)
    assert first.record.sources[0].to_json() == {
        "kind": "text", "name": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "fit": 5, "select": 3, "certify": 12,
    }  # fmt: skip


def test_the_digest_sees_every_token_and_part(decoder: Checkpoint, tokenizer: Any) -> None:
    made = prepare(decoder, tokenizer, [])

    def digest() -> str:
        return windows_digest((made.fit, made.select, made.certify))

    before = digest()
    assert before == made.record.sha256
    made.certify.inputs[3, 5] += 1
    assert digest() != before
    made.certify.inputs[3, 5] -= 1
    assert digest() == before
    assert windows_digest((made.select, made.fit, made.certify)) != before


def test_large_texts_are_read_in_pieces(
    decoder: Checkpoint, tokenizer: Any, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "WHOLE_BYTES", 1000)
    path = write("t", text_of(30_000))
    made = prepare(decoder, tokenizer, [path])
    assert_disjoint(made)
    assert (of(made, "fit", "text") > 3).sum() == 5 * 15  # no word was cut
    assert made.record.sources[0].sha256 != hashlib.sha256(path.read_bytes()).hexdigest()
    # 90 pieces of 15 · 64 bytes: more windows than pieces are available, because a piece holds several windows
    many = prepare(decoder, tokenizer, [path], sampled=0.0, sizes=CalibrationSizes(200, 100, 200))
    assert_disjoint(many)
    assert many.record.sources[0].fit == 200
    # Repeated windows make it read more.
    block = " ".join(f"{word:7}" for word in text_of(120, seed=4).split()) + " "  # 960 bytes, the size of a piece
    repeated = write("r", block * 150 + text_of(40_000))
    assert_disjoint(prepare(decoder, tokenizer, [repeated], sampled=0.0))
    with pytest.raises(InputError, match=r"tokens of .*, enough for \d+ windows? of 16 tokens that do not repeat"):
        prepare(decoder, tokenizer, [write("r", block * 2000)], sampled=0.0)
    found = read_windows(tokenizer, path, tokens=16 * 500, window=16, context=64, seed=0)
    assert found.ids.shape == (500, 16)


def test_texts_are_checked_without_the_model(tokenizer: Any, write: Any) -> None:
    def cut(*texts: Path) -> CutTexts:
        files, start = tuple(map(find_text, texts)), Start(*BOS, True, "")
        request = CalibrationRequest(files, SIZES, 0.5, window=16, context=64, start=start, seed=0, decoder=True)
        return cut_texts(tokenizer, request)

    assert [len(part) for part in cut(write("t", text_of(300))).sources[0].parts] == [5, 3, 12]
    assert cut().sources == ()
    with pytest.raises(InputError, match="t has 299 tokens"):
        cut(write("t", text_of(299)))
    with pytest.raises(InputError, match="cannot read text"):
        cut(Path("/nowhere/at/all"))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sizes": CalibrationSizes(2, 6, 12)}, "2 texts, and this --effort has 2 windows to fit.*fewer texts"),
        ({"sizes": CalibrationSizes(3, 3, 1)}, "2 texts, and this --effort has 1 windows to certify"),
        ({"window": 65}, "window must be at most 64 for this model, got 65"),
        ({"window": 2, "special": ((1,), (2,))}, "window must be at least 3 for this model, got 2"),
    ],
)
def test_bad_numbers_are_refused(
    decoder: Checkpoint, tokenizer: Any, write: Any, change: dict[str, Any], expected: str
) -> None:
    texts = [write("a", text_of(1000)), write("b", text_of(1000, seed=1))]
    with pytest.raises(InputError, match=expected):
        prepare(decoder, tokenizer, texts, **change)
