"""The document of `evaluate`: it is validated when it is read, and its sentences say what the numbers say."""

import copy
from pathlib import Path
from typing import Any

import pytest
from evaluate_documents import document, evaluation

from depthgauge.results.evaluate_document import difference_text, evaluate_verdict, percent_text, task_guarantees
from depthgauge.results.evaluate_record import EVALUATE_SCHEMA, check_evaluate
from depthgauge.results.record import ResultError

FORMATS = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")


def test_a_document_is_read_back_and_later_keys_are_ignored() -> None:
    assert check_evaluate(document() | {"later": 1}) == evaluation()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema": "depthgauge.evaluate/2"}, "of another version of depthgauge"),
        ({"schema": "depthgauge.gauge/1"}, f"expected '{EVALUATE_SCHEMA}'"),
        ({"models": 3}, "models: expected a list"),
        ({"mean": []}, None),
        ({"mean": [{"accuracy": 0.5}]}, "mean: expected one entry per model, 2, got 1"),
        ({"tasks": [{"task": "x"}]}, r"tasks\[0\].metric: is missing"),
    ],
)
def test_a_damaged_document_is_refused_by_the_place(change: dict[str, Any], sentence: str | None) -> None:
    damaged = document() | change
    if sentence is None:
        check_evaluate(damaged)
        return
    with pytest.raises(ResultError, match=sentence):
        check_evaluate(damaged)


def test_every_task_has_an_entry_per_model() -> None:
    damaged = copy.deepcopy(document())
    damaged["tasks"][1]["results"].pop()
    with pytest.raises(ResultError, match=r"tasks\[1\].results: expected one entry per model, 2, got 1"):
        check_evaluate(damaged)


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in keys(inner)}
    return {key for inner in value for key in keys(inner)} if isinstance(value, list) else set()


def test_the_documentation_lists_every_key() -> None:
    section = FORMATS.partition("## Evaluate result")[2].partition("\n## ")[0]
    found = keys({name: value for name, value in document().items() if name != "versions"})
    assert {key for key in found if f"`{key}`" not in section} == set()


def test_the_sentences_have_the_numbers() -> None:
    record = evaluation()
    *sentences, assumption = task_guarantees(record)
    assert [sentence.partition(" on ")[2].partition(" falls")[0] for sentence in sentences] == [
        "items like those of piqa", "items like those of winogrande", "these tasks on average",
    ]  # fmt: skip
    piqa = record.tasks[1].results[1]
    assert f"falls by at most {percent_text(piqa.falls_at_most)} percentage points" in sentences[0]
    assert "independent draws" in assumption
    assert difference_text(piqa).startswith(f"{percent_text(piqa.difference, signed=True)} [")
    assert evaluate_verdict(record).startswith(f"./model answers {percent_text(record.mean[0].accuracy)} % right; ")
    assert task_guarantees(evaluation("./alone")) == ()


def test_of_many_models_the_best_and_the_worst_are_named() -> None:
    record = evaluation(*"abcde")  # later ones answer fewer items right
    told = evaluate_verdict(record)
    assert [part[0] for part in told.split("; ")[:3]] == ["a", "b", "e"]
    assert told.endswith("; 2 more models are between the last two")
