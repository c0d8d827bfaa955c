"""lm-eval on our models: the answers are those of a plain loop over the same items, with and without the BOS token."""

import copy
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_reader
from tiny_models import tiny_model

from depthgauge.base.progress import no_message, silent
from depthgauge.checkpoints.tasks.harness import TaskError, answer_tasks, load_tasks
from depthgauge.checkpoints.tasks.known_tasks import cloze_items
from depthgauge.checkpoints.tasks.language import Start
from depthgauge.checkpoints.weights.load import Checkpoint, wrap

TASKS = Path(__file__).parents[1] / "data" / "tasks"
ROWS = [json.loads(line) for line in (TASKS / "next_word.jsonl").read_text(encoding="utf-8").splitlines()]
BARE = Start((), (), False, "test")

pytestmark = pytest.mark.usefixtures("data_cache")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TASKS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("reader")
    save_reader(folder)
    return AutoTokenizer.from_pretrained(folder)


def log_likelihood(model: Any, context: list[int], continuation: list[int]) -> float:
    """Return log p(continuation | context), one position after the other."""
    with torch.no_grad():
        ids = torch.tensor([[*context, *continuation]])
        table = torch.log_softmax(model(input_ids=ids).logits[0].double(), dim=-1)
    return sum(float(table[len(context) + k - 1, token]) for k, token in enumerate(continuation))


def plain_answers(model: Any, tokenizer: Any, before: list[int]) -> dict[str, list[bool]]:
    """Answer every item by a loop that does not use lm-eval."""
    found: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    for row in ROWS:
        context = [*before, *tokenizer.encode(row["context"], add_special_tokens=False)]
        scores = [log_likelihood(model, context, tokenizer.encode(one)) for one in row["choices"]]
        lengths = [len(one) for one in row["choices"]]
        found["acc"].append(max(range(4), key=scores.__getitem__) == row["answer"])
        found["acc_norm"].append(max(range(4), key=lambda k: scores[k] / lengths[k]) == row["answer"])
    return found


def answered(checkpoint: Checkpoint, tokenizer: Any, start: Start, limit: int = 0) -> Any:
    tasks = load_tasks(["next_word.yaml"], None, no_message)
    return answer_tasks(checkpoint, tokenizer, start, tasks, limit, silent)["next_word"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_answers_are_those_of_a_plain_loop(family: str, tokenizer: Any) -> None:
    model = tiny_model(family)
    checkpoint = wrap(model)
    bare = answered(checkpoint, tokenizer, BARE)
    started = answered(checkpoint, tokenizer, Start((1,), (), True, "test"))
    for found, before in ((bare, []), (started, [1])):
        assert {name: list(right) for name, right in found.right.items()} == plain_answers(model, tokenizer, before)
    assert bare.right != started.right  # the token matters, so a forgotten one would be noticed
    assert bare.sha256 == started.sha256
    assert (bare.all_items, bare.shots) == (len(ROWS), 0)


@pytest.mark.usefixtures("here")
def test_a_model_that_knows_the_answers_is_right(tokenizer: Any, tmp_path: Path) -> None:
    found = answered(wrap(save_reader(tmp_path)), tokenizer, BARE)
    assert sum(found.right["acc"]) / len(ROWS) > 0.8


@pytest.mark.usefixtures("here")
def test_a_limit_takes_the_first_items(tokenizer: Any) -> None:
    checkpoint = wrap(tiny_model("llama"))
    every, some = answered(checkpoint, tokenizer, BARE), answered(checkpoint, tokenizer, BARE, limit=7)
    assert some.right["acc"] == every.right["acc"][:7]
    assert some.all_items == len(ROWS)
    assert some.sha256 != every.sha256


@pytest.mark.usefixtures("here")
def test_nothing_is_left_behind_and_progress_is_reported(tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    before = copy.deepcopy(tokenizer.get_vocab()), logging.getLogger("lm_eval").level, list(warnings.filters)
    steps: list[tuple[int, int, str]] = []
    said: list[str] = []
    tasks = load_tasks(["next_word.yaml"], None, said.append)
    answer_tasks(
        wrap(tiny_model("llama")), tokenizer, BARE, tasks, 0, lambda *step: steps.append(step)
    )  # fmt: skip
    assert (tokenizer.get_vocab(), logging.getLogger("lm_eval").level, list(warnings.filters)) == before
    assert capfd.readouterr() == ("", "")
    assert steps[-1][0] <= steps[-1][1] == 4 * len(ROWS)
    assert said == ["loading the data of next_word.yaml"]


def test_the_shipped_task_is_scored_by_lm_eval(tokenizer: Any) -> None:
    cloze = cloze_items()
    tasks = load_tasks(["depthgauge_cloze"], cloze, no_message)
    found = answer_tasks(wrap(tiny_model("llama")), tokenizer, BARE, tasks, 12, silent)
    assert set(found["depthgauge_cloze"].right) == {"acc", "acc_norm"}
    assert (len(found["depthgauge_cloze"].right["acc"]), found["depthgauge_cloze"].all_items) == (12, len(cloze.items))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("hellaswagg", "there is no task 'hellaswagg' in lm-eval .*; did you mean 'hellaswag'"),
        ("no_such_file.yaml", "cannot read the task no_such_file.yaml: no such file"),
        ("missing.yaml", "the task missing.yaml cannot be loaded: "),
        (
            "rolling.yaml",
            "the task rolling is of the type loglikelihood_rolling .*evaluate --perplexity",
        ),
        ("broken.yaml", "the task broken.yaml cannot be loaded: "),
    ],
)
def test_a_task_that_cannot_be_used_is_one_sentence(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = (TASKS / "next_word.yaml").read_text(encoding="utf-8")
    (tmp_path / "missing.yaml").write_text(config.replace("next_word.jsonl", "nowhere.jsonl"), encoding="utf-8")
    (tmp_path / "broken.yaml").write_text("task: [", encoding="utf-8")
    (tmp_path / "text.jsonl").write_text('{"page": "w1 w2"}\n', encoding="utf-8")
    (tmp_path / "rolling.yaml").write_text(
        "task: rolling\ndataset_path: json\ndataset_kwargs: {data_files: {test: text.jsonl}}\ntest_split: test\n"
        'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{page}}"\n'
        "metric_list: [{metric: bits_per_byte}]\n",
        encoding="utf-8",
    )
    with pytest.raises(TaskError, match=sentence) as raised:
        load_tasks([name], None, no_message)
    assert "\n" not in str(raised.value)


def test_a_named_task_without_its_data_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(TaskError, match=r"the data of the task piqa is missing: .*connect this machine"):
        load_tasks(["piqa"], None, no_message)
