"""`recover` and `shrink --recover`, end to end on tiny trained models."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import check_in_forks
from tiny_recoveries import WINDOW, save_models, save_text
from tiny_shrinks import save

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.recovery.divergence import TRAIN, Pair
from depthgauge.results.recover_record import check_recover
from depthgauge.results.shrink_record import check_shrink

pytestmark = pytest.mark.usefixtures("forked_verification")
TOKENS = "40k"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recover")
    save_models(folder)
    save_text(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def recovered(place: Path) -> Iterator[tuple[Path, dg.results.RecoverResult]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("depthgauge.recovery.distillation.POINTS", 3)
        check_in_forks(patch)
        yield place / "recovered", run(place, tokens=TOKENS, out=place / "recovered", report=place / "page.html")


def run(place: Path, **fields: Any) -> dg.results.RecoverResult:
    given: dict[str, Any] = {"teacher": place / "model", "text": place / "text.txt", "window": WINDOW} | fields
    return dg.recover(place / "smaller", **given)


def test_training_recovers_most_of_the_loss(recovered: tuple[Path, dg.results.RecoverResult]) -> None:
    record = recovered[1].record
    text = record.texts[0]
    assert record.recovery.kept
    assert text.teacher is not None
    assert text.before is not None
    assert text.after is not None
    assert text.after - text.teacher < 0.6 * (text.before - text.teacher)
    assert text.high is not None
    assert text.high < 0
    assert record.recovery.tokens == pytest.approx(40_000, rel=0.03)
    assert [point.tokens for point in record.recovery.curve] == sorted(point.tokens for point in record.recovery.curve)
    assert sum(record.recovery.data.values()) > 0


def test_the_result_loads_and_is_described(recovered: tuple[Path, dg.results.RecoverResult]) -> None:
    out, result = recovered
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_hidden_layers == result.record.layers == result.record.teacher_layers - 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, result.model.state_dict()[name]), name
    document = json.loads((out / "depthgauge.json").read_text())
    assert check_recover(document) == result.record
    page = (out.parent / "page.html").read_text()
    assert "How the training went" in page
    assert dg.results.write_report(out / "depthgauge.json", out.parent / "again.html").exists()


def test_evaluate_says_what_a_recovered_model_was_trained_on(
    place: Path, recovered: tuple[Path, dg.results.RecoverResult]
) -> None:
    notes = dg.evaluate(recovered[0], perplexity=place / "text.txt", window=WINDOW).notes
    assert any("was trained on text.txt, so its perplexity on" in note for note in notes)


def test_nothing_held_is_trained_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By content, at any offset: no run of 23 tokens of a window that decides or measures is among the training."""
    seen: dict[str, Any] = {}
    forward = Pair.forward

    def watched(self: Pair, index: Any, part: str = TRAIN) -> torch.Tensor:
        seen.update(self.windows)
        return forward(self, index, part)

    monkeypatch.setattr(Pair, "forward", watched)
    run(place, tokens="2k", general="none")
    size = WINDOW - 1

    def runs(rows: torch.Tensor) -> set[tuple[int, ...]]:
        return {tuple(run) for row in rows.tolist() for run in (row[k : k + size] for k in range(len(row) - size + 1))}

    assert len(seen["train"]) > 100
    assert not runs(seen["train"]) & runs(seen["select"])


def test_a_general_file_is_the_second_half(place: Path) -> None:
    save_text(place / "general.txt", seed=11)
    record = run(place, tokens="2k", general=place / "general.txt").record
    assert {Path(name).name for name in record.recovery.data} == {"text.txt", "general.txt"}


def test_a_recovery_that_gains_nothing_is_undone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("depthgauge.recovery.distillation.RATE", 1.0)
    result = run(place, tokens="5k")
    assert not result.record.recovery.kept
    assert "gained less than its standard error" in result.record.notes[0]
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(place / "smaller").state_dict()
    assert all(torch.equal(value, before[name]) for name, value in result.model.state_dict().items())


def test_shrink_recovers_before_it_certifies(place: Path) -> None:
    given: dict[str, Any] = {
        "text": place / "text.txt", "window": WINDOW, "effort": "quick", "remove_layers": "2", "sampled": 0.1,
    }  # fmt: skip
    bare = dg.shrink(place / "model", recover="none", **given).record
    made = dg.shrink(place / "model", recover=TOKENS, out=place / "shrunk", report=place / "shrunk.html", **given)
    record = made.record
    assert record.recovery is not None
    assert record.recovery.kept
    assert record.loss.shrunk is not None
    assert bare.loss.shrunk is not None
    assert record.loss.dense is not None
    assert record.loss.shrunk - record.loss.dense < 0.6 * (bare.loss.shrunk - bare.loss.dense)
    assert record.guarantee is not None
    assert bare.guarantee is not None
    assert record.guarantee.quantile.increase < bare.guarantee.quantile.increase
    assert check_shrink(json.loads((place / "shrunk" / "depthgauge.json").read_text())) == record
    assert "predict what the source model predicts" in (place / "shrunk" / "README.md").read_text()
    assert "How the training went" in (place / "shrunk.html").read_text()
    assert bare.loss.dense == record.loss.dense  # the dense model had its weights again
    assert len(record.examples) == 3
    for example in record.examples:
        assert example.dense == continued(place / "model", example.prompt)
        assert example.shrunk == continued(place / "shrunk", example.prompt)
        assert example.unrecovered == continued(place / "smaller", example.prompt)
    assert bare.examples == ()  # nothing was written
    assert "What the models write" in (place / "shrunk.html").read_text()


def continued(folder: Path, prompt: str) -> str:
    """Return what transformers' own `generate` adds to a prompt that is half a window."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = model.generate(ids, do_sample=False, max_new_tokens=WINDOW - WINDOW // 2, pad_token_id=0, eos_token_id=-1)
    return tokenizer.decode(made[0, ids.shape[1] :])


def test_a_shrink_without_training_says_how_to_train(place: Path) -> None:
    record = dg.shrink(place / "model", text=place / "text.txt", window=WINDOW, effort="quick", remove=1).record
    assert record.recovery is None
    (said,) = (note for note in record.notes if "was not trained" in note)
    assert re.search(r"at the pace of this run, --recover 2M would take about \d+ \w+, and --recover 30min", said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokens": "two"}, "tokens must be a number of tokens such as 2M"),
        ({"tokens": "10min"}, "--minutes is for a time"),
        ({"tokens": "auto"}, "--minutes is for a time"),
        ({"minutes": 0}, "minutes must be a positive number"),
        ({"teacher": None}, "--teacher is missing"),
        ({"general": "org/data"}, "revision"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_wrong_options_are_named(place: Path, fields: dict[str, Any], said: str) -> None:
    given = {"teacher": place / "model", "text": place / "text.txt"} | fields
    with pytest.raises(InputError, match=said):
        dg.recover(place / "smaller", **given)


@pytest.mark.parametrize("recover", ["2X", "-1", "0", "never", ""])
def test_shrink_names_what_recover_expects(place: Path, recover: str) -> None:
    with pytest.raises(InputError, match="recover must be a number of tokens such as 2M, a time such as 10min"):
        dg.shrink(place / "model", remove=1, recover=recover)


def test_models_with_other_tokenizers_are_refused(place: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", "llama")
    from tiny_checkpoints import save_tokenizer

    save_tokenizer(other, special=False, reverse=True)
    with pytest.raises(InputError, match="different tokenizers"):
        dg.recover(other, teacher=place / "model", text=place / "text.txt")
