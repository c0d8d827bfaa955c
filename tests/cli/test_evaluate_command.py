"""`depthgauge evaluate` as a user meets it: tables, JSON, files, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from evaluate_documents import HOSTILE, evaluation
from rich.console import Console
from tiny_checkpoints import save_checkpoint, text_of
from tiny_pairs import save_paired
from tiny_vision import save_vision

from depthgauge.cli.print_document import section_lines
from depthgauge.results.evaluate_document import evaluate_document
from depthgauge.results.evaluate_record import check_evaluate

Typed = Callable[..., tuple[int, str, str]]
TASK = Path(__file__).parents[1] / "data" / "tasks"
pytestmark = pytest.mark.usefixtures("data_cache")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a text and a task."""
    folder = tmp_path_factory.mktemp("prepared")
    save_checkpoint(folder / "a", "llama")
    save_checkpoint(folder / "b", "llama", seed=1)
    (folder / "text.txt").write_text(text_of(200), encoding="utf-8")
    for name in ("next_word.yaml", "next_word.jsonl"):
        shutil.copyfile(TASK / name, folder / name)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(prepared, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def test_it_prints_tables_and_writes_document_and_page(typed: Typed, folder: Path) -> None:
    given = ("--tasks", "next_word.yaml", "--perplexity", "mine:text.txt", "--window", "16", "--report", "p.html")
    code, out, err = typed("evaluate", "a", "b", *given, "--out", "r.json")
    assert code == 0
    record = check_evaluate(json.loads((folder / "r.json").read_text(encoding="utf-8")))
    assert (folder / "p.html").stat().st_size > 1_000_000
    shown = " ".join(out.split())
    for words in ("next_word, acc", "next_word, acc_norm", "accuracy", "falls by", "mine", "12 × 16", "do not overlap"):
        assert words in shown
    assert "With confidence 95 %, the accuracy of b on items like those of next_word" in shown
    assert "result written to r.json" in err
    rest = "perplexity on mine: 12 windows of 16 tokens; the last 8 tokens of the text do not fill one"
    assert record.notes == (rest,)
    assert rest in shown
    assert rest.removeprefix("p") in (folder / "p.html").read_text(encoding="utf-8")
    assert record.tasks[0].items == 30
    code, out, _ = typed("evaluate", "a", "b", *given[:-2], "--json")
    again = check_evaluate(json.loads(out))
    assert (code, again.tasks, again.texts) == (0, record.tasks, record.texts)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("a", "--tasks", "no_such_task_anywhere"), "error: there is no task 'no_such_task_anywhere' in lm-eval"),
        (("a", "--tasks", "lost.yaml"), "error: cannot read the task lost.yaml: no such file"),
        (("a", "--out", "text.txt"), "error: text.txt exists; use --overwrite"),
        (("a", "--out", "a/config.json", "--overwrite"), "error: a/config.json is a file of MODEL a"),
        (
            ("a", "--perplexity", "x:text.txt", "--out", "text.txt", "--overwrite"),
            "error: --out and --perplexity x:text",
        ),
        (("./nowhere",), "error: cannot read ./nowhere: no such file or directory"),
        (("a", "a"), "error: models has a twice"),
        (("a", "--perplexity", "x:lost.txt"), "error: cannot read text lost.txt"),
        ((), "error: Missing argument"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    typed: Typed, folder: Path, words: tuple[str, ...], sentence: str
) -> None:
    before = {path.name for path in folder.iterdir()}
    code, out, err = typed("evaluate", *words)
    lines = [line for line in err.splitlines() if not line.startswith("loading the data")]
    assert (code, out, len(lines)) == (2, "", 1)
    assert lines[0].startswith(sentence)
    assert {path.name for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["vit", "bart"])
def test_other_models_are_refused_without_advice_about_options_that_evaluate_lacks(
    typed: Typed, folder: Path, name: str
) -> None:
    {"vit": save_vision, "bart": save_paired}[name](folder / name, name)
    code, _, err = typed("evaluate", name, "--perplexity", "text.txt")
    assert code == 2
    assert f"{name} is a {name} model; this command needs a causal language model" in err
    assert "--images" not in err
    assert "--pairs" not in err


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_tables_fit_and_show_names_literally(width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in section_lines(evaluate_document(evaluation("./model", HOSTILE)).sections[0], width):
        console.print(part, highlight=False)
    console.file.close()
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "alert('x')" in text.replace("\n", " ")
    assert "[bold]" in text


def test_one_model_has_no_differences() -> None:
    text = [
        str(getattr(part, "title", part))
        for part in section_lines(evaluate_document(evaluation("./alone")).sections[0], 120)
    ]
    assert not any("With confidence" in line for line in text)
