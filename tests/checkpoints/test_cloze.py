"""The shipped task: the same text gives the same items, and their answers are in the text."""

from pathlib import Path

import pytest

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.tasks.known_tasks import CHOICES, CONTEXT, LEAST_ITEMS, MOST_ITEMS, PIECE, cloze_items


def plain(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def built_in() -> str:
    import depthgauge.checkpoints

    return plain((Path(depthgauge.checkpoints.__path__[0]) / "inputs" / "text.txt").read_text(encoding="utf-8"))


def test_the_built_in_text_gives_a_few_hundred_items(built_in: str) -> None:
    made = cloze_items()
    assert 200 <= len(made.items) <= 500
    assert made == cloze_items()
    assert len({item.context for item in made.items}) == len(made.items)
    for item in made.items:
        assert len(set(item.choices)) == CHOICES
        assert len(item.context.split()) == CONTEXT
        assert all(len(choice.split()) == PIECE and choice in built_in for choice in item.choices)
        following = [choice for choice in item.choices if f"{item.context} {choice}" in built_in]
        assert following == [item.choices[item.answer]]


def test_wrong_answers_have_similar_lengths_and_are_not_in_the_context() -> None:
    items = cloze_items().items
    for item in items:
        true = item.choices[item.answer]
        wrong = [choice for choice in item.choices if choice != true]
        assert not any(choice in item.context for choice in wrong)
        assert max(abs(len(choice) - len(true)) for choice in wrong) <= 12
    longest = sum(max(item.choices, key=len) == item.choices[item.answer] for item in items) / len(items)
    assert 0.15 < longest < 0.35  # the length does not give the answer away


def test_the_answers_are_spread_over_the_places_and_the_items_over_the_text(built_in: str) -> None:
    items = cloze_items().items
    for place in range(CHOICES):
        assert 0.18 < sum(item.answer == place for item in items) / len(items) < 0.32
    found = [built_in.index(item.context) / len(built_in) for item in items[:100]]
    assert all(0.1 < sum(k / 4 <= at < (k + 1) / 4 for at in found) / 100 < 0.45 for k in range(4))


def test_a_text_of_the_user_is_used_and_a_long_one_gives_a_limited_number_of_items(tmp_path: Path) -> None:
    words = [f"word{k}" for k in range(60_000)]
    (tmp_path / "long.txt").write_text(" ".join(words), encoding="utf-8")
    made = cloze_items(tmp_path / "long.txt")
    assert len(made.items) == MOST_ITEMS
    assert made.source == str(tmp_path / "long.txt")
    places = [int(item.choices[item.answer].split()[0][4:]) for item in made.items]
    assert max(places) > 55_000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("too short", f"has 2 words; depthgauge_cloze needs at least {(LEAST_ITEMS + CONTEXT // PIECE + 1) * PIECE}"),
        ("a b c d e f g h " * 100, "the text repeats itself too often"),
    ],
)
def test_a_text_that_gives_no_items_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=sentence):
        cloze_items(tmp_path / "text.txt")
