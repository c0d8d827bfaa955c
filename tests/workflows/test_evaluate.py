"""`evaluate` from end to end on tiny checkpoints: pairing, perplexity by hand, and what is refused before loading."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_checkpoint, save_reader, text_in_order, text_of
from tiny_shrinks import quick

import depthgauge as dg
from depthgauge.checkpoints.tasks.confidence import largest_fall
from depthgauge.results.evaluate_record import EvaluateRecord, check_evaluate

TASKS = Path(__file__).parents[1] / "data" / "tasks"
pytestmark = pytest.mark.usefixtures("data_cache", "forked_verification")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    save_reader(folder / "reader")
    save_checkpoint(folder / "random", "llama")
    save_checkpoint(folder / "encoder", "bert")
    return {name: folder / name for name in ("reader", "random", "encoder")}


@pytest.fixture(scope="module")
def both(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> EvaluateRecord:
    folder = tmp_path_factory.mktemp("both")
    text = folder / "order.txt"
    text.write_text(text_in_order(500), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(TASKS)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "datasets")
        return dg.evaluate(
            [models["reader"], models["random"]], tasks=["next_word.yaml", "depthgauge_cloze"], limit=20,
            perplexity=f"order:{text}", window=32, out=folder / "r.json", report=folder / "r.html", confidence=0.9,
        )  # fmt: skip


def test_all_models_answer_the_same_items_and_are_compared_with_the_first(both: EvaluateRecord) -> None:
    assert [model.layers for model in both.models] == [3, 3]
    assert [(task.task, task.metric, task.is_main) for task in both.tasks] == [
        ("next_word", "acc", False), ("next_word", "acc_norm", True),
        ("depthgauge_cloze", "acc", False), ("depthgauge_cloze", "acc_norm", True),
    ]  # fmt: skip
    for task in both.tasks:
        first, other = task.results
        assert (first.difference, first.p) == (None, None)
        assert task.items == 20
        assert other.lost is not None
        assert other.gained is not None
        assert other.accuracy - first.accuracy == pytest.approx((other.gained - other.lost) / 20)
        assert other.falls_at_most == largest_fall(other.lost, other.gained, 20, 0.9)
    assert both.tasks[0].results[0].accuracy > 0.8 > both.tasks[0].results[1].accuracy


def test_the_mean_is_over_the_main_metrics(both: EvaluateRecord) -> None:
    main = [task for task in both.tasks if task.is_main]
    for index, mean in enumerate(both.mean):
        assert mean.accuracy == pytest.approx(sum(task.results[index].accuracy for task in main) / 2)
    assert both.mean[1].lost == sum(task.results[1].lost or 0 for task in main)


def test_perplexity_and_bits_per_byte_are_those_of_a_plain_loop(both: EvaluateRecord, models: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["random"])
    words = text_in_order(500).split()
    for name, found in zip(("reader", "random"), both.texts[0].results, strict=True):
        model = AutoModelForCausalLM.from_pretrained(models[name])
        nats, size, count = 0.0, 0, 0
        for start in range(0, 480, 32):
            window = words[start : start + 32]
            ids = torch.tensor([tokenizer(" ".join(window))["input_ids"]])
            assert ids.shape == (1, 32)
            with torch.no_grad():
                table = torch.log_softmax(model(input_ids=ids).logits[0].double(), dim=-1)
            nats -= sum(float(table[k, ids[0, k + 1]]) for k in range(31))
            size, count = size + len(" ".join(window[1:])), count + 31
        assert (found.windows, found.tokens) == (15, count)
        assert found.loss == pytest.approx(nats / count, rel=1e-5)
        assert found.perplexity == pytest.approx(math.exp(nats / count), rel=1e-4)
        assert found.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    first, other = both.texts[0].results
    assert other.increase == pytest.approx(other.loss - first.loss)
    assert first.increase is None


def test_the_document_round_trips_and_becomes_a_table(both: EvaluateRecord) -> None:
    assert check_evaluate(json.loads(both.dump())) == both
    frame = both.to_frame()
    assert list(frame["task"].unique()) == ["next_word", "depthgauge_cloze"]
    assert len(frame) == 8


def test_perplexity_needs_no_lm_eval(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text(text_of(100), encoding="utf-8")
    for name in ("lm_eval", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    found = dg.evaluate(models["random"], perplexity=tmp_path / "text.txt", window=16)
    assert found.tasks == ()
    assert found.texts[0].name == "text.txt"
    with pytest.raises(dg.InputError, match="evaluate --tasks needs the extra `eval`; install it with `pip install "):
        dg.evaluate(models["random"], tasks="depthgauge_cloze")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tasks": "no_such_task_anywhere"}, "there is no task 'no_such_task_anywhere' in lm-eval"),
        ({"tasks": "a,,b"}, "tasks must be names with commas between them"),
        ({"tasks": "piqa,piqa"}, "the task piqa is given twice"),
        ({"tasks": "piqa", "text": "x.txt"}, "--text has no effect without depthgauge_cloze among --tasks"),
        ({"limit": -1}, "limit must be a whole number of at least 0"),
        ({"window": 8}, "--window has no effect without --perplexity"),
        ({"confidence": 1.0}, "confidence must be a number from 0.5 to 0.9999"),
        ({"perplexity": "wiki:nowhere.txt"}, "cannot read text nowhere.txt"),
        ({"perplexity": "short.txt"}, "short.txt has 3 tokens, but one window needs"),
        ({"text": "short.txt"}, "short.txt has 3 words; depthgauge_cloze needs at least"),
        ({"bos": "maybe"}, "bos must be one of auto, yes, no"),
        ({"task": "piqa"}, "option of evaluate must be one of"),
    ],
)
def test_bad_input_is_one_sentence_before_any_model_is_loaded(
    given: dict[str, Any],
    sentence: str,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "depthgauge.checkpoints.weights.described.load_model", lambda *_: pytest.fail("a model was loaded")
    )
    (tmp_path / "short.txt").write_text("w1 w2 w3", encoding="utf-8")
    with pytest.raises(dg.InputError, match=sentence) as raised:
        dg.evaluate(models["random"], out="r.json", report="r.html", **given)
    assert "\n" not in str(raised.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"short.txt", "datasets"}


def test_models_that_cannot_be_evaluated_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(dg.InputError, match="is a bert model; this command needs a causal language model"):
        dg.evaluate([models["random"], models["encoder"]])
    with pytest.raises(dg.InputError, match=r"cannot read .*nowhere: no such file or directory"):
        dg.evaluate(tmp_path / "nowhere")
    with pytest.raises(dg.InputError, match="twice; give every model once"):
        dg.evaluate([models["random"], models["random"]])
    dg.save_network(dg.random_network(1, 1, 2, 0.1), tmp_path / "n.safetensors")
    with pytest.raises(dg.InputError, match="is not a checkpoint; evaluate expects"):
        dg.evaluate(tmp_path / "n.safetensors")


def test_the_bos_token_of_the_first_model_is_used_for_the_others(models: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models["random"])
    tokenizer.bos_token = "[CLS]"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text(text_of(100), encoding="utf-8")
    given = {"perplexity": tmp_path / "text.txt", "window": 16, "tokenizer": str(tmp_path / "tokenizer")}
    pair = [models["random"], models["reader"]]
    asked = dg.evaluate(pair, bos="yes", **given)
    assert [model.bos for model in asked.models] == [True, True]
    measured = dg.evaluate(pair, **given)
    assert measured.models[0].bos_reason.startswith("measured on 8 windows of the built-in text")
    assert measured.models[1].bos == measured.models[0].bos
    assert measured.models[1].bos_reason == "as for the first model"


def test_shrink_evaluates_both_models(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TASKS)
    text = tmp_path / "text.txt"
    text.write_text(text_in_order(4000), encoding="utf-8")
    task = "next_word.yaml"
    files = {"out": tmp_path / "out", "report": tmp_path / "p.html"}
    made = quick(str(models["reader"]), text, remove=1, sampled=0.0, evaluate=task, **files)
    found = made.record.evaluation
    assert found is not None
    assert [model.layers for model in found.models] == [3, 2]
    again = dg.evaluate([models["reader"], tmp_path / "out"], tasks=task)
    for ours, theirs in zip(found.tasks, again.tasks, strict=True):  # the written model, loaded again
        assert ours.results == theirs.results
        assert ours.sha256 == theirs.sha256
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "## Accuracy on each task" in card
    assert "| next_word, acc_norm | 30 | 2 |" in card
    assert "falls by at most" in card
    assert "What changed" in (tmp_path / "p.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in card.partition("## Accuracy")[2]
    noted = dg.evaluate(tmp_path / "out", perplexity=text, window=16)
    assert any("was calibrated on" in note and "perplexity on text.txt" in note for note in noted.notes)


def test_shrink_refuses_an_unknown_task_before_it_loads_the_model(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(dg.InputError, match="there is no task 'no_such_task_anywhere'"):
        quick(str(models["reader"]), None, remove=1, evaluate="no_such_task_anywhere", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
