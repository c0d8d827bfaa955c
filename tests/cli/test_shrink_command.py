"""`depthgauge shrink` as a user meets it: which call it makes, what it prints, and what it refuses.

The workflow is replaced by one that records its arguments and returns a document.
"""

import copy
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from rich.cells import cell_len
from rich.console import Console
from shrink_documents import (
    ASSUMPTION,
    DOCUMENT,
    PLAN,
    encoder,
    limit_not_reached,
    not_certified,
    too_few_windows,
    with_limit,
)

from depthgauge.base.errors import InputError, InterruptedRunError
from depthgauge.cli.main import main
from depthgauge.cli.print_document import section_lines
from depthgauge.results.shrink_document import plan_section, shrink_document
from depthgauge.results.shrink_record import PlanRecord, ShrinkOptions, check_shrink, read_plan

pytestmark = pytest.mark.usefixtures("forked_verification")

ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Workflow:
    """Stands in for `depthgauge.workflows.shrink`: keeps the last call, and returns `document`."""

    def __init__(self) -> None:
        self.document: dict[str, Any] = copy.deepcopy(DOCUMENT)
        self.error: BaseException | None = None
        self.called, self.positional, self.given = "", (), {}

    def _call(self, name: str, *args: Any, **given: Any) -> None:
        self.called, self.positional, self.given = name, args, given
        if self.error is not None:
            raise self.error
        given["progress"](1, 2, "layer 3")
        given["message"]("about 5 minutes")

    def shrink(self, model: Any, options: Any = None, **given: Any) -> Any:
        self._call("shrink", model, options, **given)
        record = check_shrink(self.document)
        result = SimpleNamespace(record=record, to_json=record.to_json)
        result.sizes = (result,)
        return result

    def plan_shrink(self, model: Any, options: Any = None, **given: Any) -> PlanRecord:
        self._call("plan_shrink", model, options, **given)
        plan = check_shrink(self.document).plan
        Path(given["out"]).write_text(plan.dump(), encoding="utf-8")
        return plan


@pytest.fixture
def workflow(monkeypatch: pytest.MonkeyPatch) -> Workflow:
    found = Workflow()
    for name in ("shrink", "plan_shrink"):
        monkeypatch.setattr(f"depthgauge.workflows.shrink.{name}", getattr(found, name))
    return found


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Outcome]:
    """The command with the real workflow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("corpus.txt", "b.txt", "b.json", "old.html"):
        (tmp_path / name).write_text("text")

    def typed(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["depthgauge", "shrink", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return typed


@pytest.fixture
def run(workflow: Workflow, command: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """The command with a workflow that only notes how it was called."""
    return command


Run = Callable[..., Outcome]
SHORT = ("./model", "--remove", "7", "--out", "smaller")


# --- interruptions ---------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_with_one_sentence(run: Run, workflow: Workflow) -> None:
    workflow.error = KeyboardInterrupt()
    assert run(*SHORT) == Outcome(130, "", "error: interrupted\n")
    workflow.error = InterruptedRunError("interrupted; run again")
    assert run(*SHORT) == Outcome(130, "", "error: interrupted; run again\n")


# --- from options to the call -----------------------------------------------------------------------------------------


def test_options_become_the_call(run: Run, workflow: Workflow) -> None:
    outcome = run(
        *(
            "model",
            "--text",
            "corpus.txt",
            "--text",
            "b.txt",
            "--remove",
            "25%",
            "--out",
            "smaller",
            "--effort",
            "high",
        ),
        *("--confidence", "0.9", "--sampled", "0.25", "--window", "128", "--recover", "2M", "--seed", "4"),
        *("--general", "web.txt", "--bos", "no", "--device", "spread", "--allow", "pickle,unread", "--overwrite"),
    )
    assert outcome.code == 0, outcome.err
    assert workflow.called == "shrink"
    model, options = workflow.positional
    assert model == "model"
    assert options == ShrinkOptions(
        text=("corpus.txt", "b.txt"), remove="25%", effort="high", confidence=0.9, sampled=0.25, window=128,
        recover="2M", general="web.txt", seed=4, bos="no", device="spread", allow="pickle,unread",
    )  # fmt: skip
    given = {name: value for name, value in workflow.given.items() if name not in ("progress", "message")}
    assert given == {"out": Path("smaller"), "report": None, "overwrite": True}


def test_what_is_not_given_is_none(run: Run, workflow: Workflow) -> None:
    assert run(*SHORT).code == 0
    assert workflow.positional[1] == ShrinkOptions(remove="7")
    assert workflow.given["overwrite"] is False


def test_a_limit_and_its_guarantee(run: Run, workflow: Workflow) -> None:
    workflow.document = with_limit()
    assert run("m", "--max-increase", "0.25", "--out", "s").code == 0
    assert workflow.positional[1] == ShrinkOptions(max_increase=0.25)


@pytest.mark.parametrize("document", [PLAN, DOCUMENT], ids=["a plan", "depthgauge.json"])
def test_a_plan_is_passed_on_and_can_be_read(
    run: Run, workflow: Workflow, tmp_path: Path, document: dict[str, Any]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert run("model", "--remove", "plan.json", "--out", "smaller", "--device", "cpu").code == 0
    assert workflow.positional[1] == ShrinkOptions(remove="plan.json", device="cpu")
    assert read_plan(tmp_path / "plan.json") == check_shrink(DOCUMENT).plan


def test_a_plan_as_output_only_searches(run: Run, workflow: Workflow, tmp_path: Path) -> None:
    outcome = run("model", "--remove", "7", "--out", "plan.json")
    assert outcome.code == 0, outcome.err
    assert workflow.called == "plan_shrink"
    assert workflow.given["out"] == Path("plan.json")
    assert read_plan(tmp_path / "plan.json") == check_shrink(DOCUMENT).plan
    assert "removed: 10, 12–14, 16, 21, 25." in outcome.out
    assert outcome.err == "about 5 minutes\nplan written to plan.json; use it with --remove plan.json\n"
    outcome = run("model", "--remove", "7", "--out", "plan.json", "--json", "--overwrite")
    assert json.loads(outcome.out) == json.loads((tmp_path / "plan.json").read_text())


# --- what is printed --------------------------------------------------------------------------------------------------


def test_json_has_the_keys_that_programs_rely_on(run: Run) -> None:
    outcome = run(*SHORT, "--json")
    assert outcome.err == "about 5 minutes\n"
    document = json.loads(outcome.out)
    assert document["schema"] == "depthgauge.shrink/1"
    types = {
        ("layers_before",): int, ("layers_after",): int, ("removed",): list, ("repaired",): bool,
        ("loss", "dense"): float, ("loss", "shrunk"): float, ("loss", "low"): float, ("loss", "high"): float,
        ("guarantee", "quantile", "increase"): float, ("guarantee", "quantile", "share"): float,
        ("guarantee", "quantile", "confidence"): float,
        ("speed", "prefill"): float, ("speed", "decode"): float, ("parameters", "before"): int,
        ("parameters", "after"): int, ("out",): str,
    }  # fmt: skip
    for way, kind in types.items():
        found = document
        for key in way:
            found = found[key]
        assert type(found) is kind, way
    assert document == check_shrink(DOCUMENT).to_json()
    assert document["layers_before"] - len(document["removed"]) == document["layers_after"]


def test_the_tables_say_what_matters(run: Run) -> None:
    outcome = run(*SHORT)
    words = " ".join(outcome.out.split())
    assert "SmolLM2-135M: 30 → 23 layers" in words
    assert "0 1 2 3 4 5 6 7 8 9 ▓ 11 ▓ ▓ ▓ 15 ▓ 17 18 19 20 ▓ 22 23 24 ▓ 26 27 28 29" in words
    for text in ("your text (corpus.txt)", "your text (more text.txt)", "sampled from the model", "built-in text"):
        assert text in words
    assert "0.388 [0.347, 0.431]" in words
    assert "on at least 95 % of windows of 512 tokens like those of corpus.txt" in words
    assert ASSUMPTION in words
    assert "│ prefill │ 812 ms │ 634 ms │ 0.781 [0.763, 0.8] │" in words
    assert "a new process without depthgauge loaded 23 layers" in words
    assert "recovery: 2,000,000 tokens in 2 minutes (all tokens) changed the objective" in words
    assert "note: the source is a quantized GGUF file" in words
    assert "→ 23 of 30 layers are kept; guaranteed, if future windows" in words


def test_without_a_guarantee_none_is_claimed(run: Run, workflow: Workflow) -> None:
    for document in (not_certified(), too_few_windows()):
        workflow.document = document
        outcome = run(*SHORT)
        assert outcome.code == 0
        words = " ".join(outcome.out.split())
        assert "measured only" in words
        assert "nothing is guaranteed" in words
        assert "at most 0.6" not in words
        assert ASSUMPTION not in words


def test_a_limit_that_is_not_reached_prints_the_result_and_fails(run: Run, workflow: Workflow, tmp_path: Path) -> None:
    workflow.document = limit_not_reached()
    for arguments in ((), ("--json",)):
        outcome = run("m", "--max-increase", "0.1", "--out", "s", "--overwrite", *arguments)
        assert outcome.code == 1
        assert outcome.err.splitlines()[-1] == (
            "error: no model was written: for no tested size is it guaranteed, with confidence 95 %, that the loss "
            "grows by at most 0.1 nats per token; closest was removing 1 layer, with a bound of 0.143"
        )
    assert json.loads(outcome.out)["out"] is None


@pytest.mark.parametrize(
    "make", [lambda: DOCUMENT, with_limit, limit_not_reached, encoder, too_few_windows, not_certified]
)
def test_narrow_terminals_show_the_numbers_of_wide_ones(make: Callable[[], dict[str, Any]]) -> None:
    record = check_shrink(make())

    def printed(width: int) -> str:
        console = Console(width=width, file=io.StringIO())
        for section in (shrink_document(record).sections[0], plan_section(record.plan)):
            for line in section_lines(section, width):
                console.print(line, highlight=False)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def numbers(text: str) -> set[str]:
        rows = [line for line in text.splitlines() if line.startswith("│")]
        return set(re.findall(r"-?\d[\d.,]*(?:e-?\d+)?", " ".join(rows)))

    wide = printed(200)
    assert len(numbers(wide)) > 8
    for width in (60, 80, 120):
        text = printed(width)
        assert max(map(cell_len, text.splitlines())) <= width
        assert "…" not in text
        assert numbers(text) == numbers(wide)


def test_names_cannot_change_the_terminal(run: Run, workflow: Workflow) -> None:
    workflow.document["name"] = "[red]\x1b[1m"
    workflow.document["texts"][0]["name"] = workflow.document["guarantee"]["about"] = "[b]\x1b[2J"
    workflow.document["notes"], workflow.document["speed"]["what"] = ["[i]\x1b"], "[u]\x1b"
    out = run(*SHORT).out
    assert "\x1b" not in out
    assert "[red]�[1m: 30" in out
    assert "[i]�" in out


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("m --remove 7", "Missing option '--out'"),
        ("m --remove 7 --report p.html", "Missing option '--out'"),
        ("m --remove 7 --out p.json --report r.html", "p.json is a plan, of which there is no page"),
        ("m --remove", "--remove"),
        ("--remove 7 --out s", "Missing argument 'MODEL'"),
    ],
)
def test_bad_requests_end_with_one_sentence(run: Run, workflow: Workflow, arguments: str, words: str) -> None:
    outcome = run(*arguments.split())
    assert (outcome.code, outcome.out, workflow.called) == (2, "", "")
    assert words in outcome.err
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("m --remove b.json --out s", "b.json is not a result document: it is not JSON"),
        ("m --remove none.json --out s", "cannot read none.json: No such file"),
        ("m --remove 7 --out s --report s/page.html", "--report s/page.html is inside --out"),
        ("m --remove 7 --out s --report corpus.txt --overwrite", "corpus.txt is not the name of one"),
        ("m --remove 7 --out s --report page", "give a name that ends with .html"),
        ("m --remove 7 --out s --report old.html", "old.html exists; use --overwrite"),
        (
            "m --remove 7 --text old.html --out s --report old.html --overwrite",
            "--report and --data old.html are the same file",
        ),
        ("old.html --remove 7 --out s --report old.html --overwrite", "--report and MODEL are the same file"),
        ("m --remove 7 --out b.json", "b.json exists; use --overwrite"),
        ("m --remove 7 --out no/plan.json", "there is no directory no"),
        ("m --remove 7 --out no/s", "there is no directory no"),
    ],
)
def test_files_are_checked_before_the_model_is_read(command: Run, arguments: str, words: str, tmp_path: Path) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    outcome = command(*arguments.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == before
    assert (tmp_path / "corpus.txt").read_text() == "text"


def test_errors_of_the_workflow_are_one_sentence(run: Run, workflow: Workflow) -> None:
    workflow.error = InputError("remove must be from 1 to 29, got 40; the model has 30 layers")
    assert run(*SHORT) == Outcome(2, "", "error: remove must be from 1 to 29, got 40; the model has 30 layers\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--max-increase 0.1 --out p.json", "use --remove"),
        ("--out s", "--max-bytes, --max-increase, got none of them"),
        ("--out s --remove 7 --max-increase 0.1", "got --remove and --max-increase"),
        ("--remove plan.json --seed 3 --out s", "--seed cannot be combined with a plan"),
        ("--remove 7 --effort hihg --out s", "effort must be one of quick, default, high, got 'hihg'"),
        ("--remove 7 --dtype Q8_0 --out s", "--dtype Q8_0 is a type of GGUF files"),
        ("--remove 7 --recover 2MB --out s", "recover must be a number of tokens such as 2M, a time such as 10min"),
        ("--remove 7 --confidence 2 --out s", "confidence must be a number from 0.5 to 0.9999, got 2.0"),
        ("--remove 7 --out s", "model is not a file or directory here, and it is not in the cache"),
    ],
)
def test_the_workflow_refuses_in_one_sentence(command: Run, tmp_path: Path, arguments: str, words: str) -> None:
    """With the real workflow, which finds these before it reads a model."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    outcome = command("model", *arguments.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1


# --- help and documentation -------------------------------------------------------------------------------------------


def test_help_teaches_by_examples(run: Run) -> None:
    outcome = run("--help-all")
    assert outcome.code == 0
    words = " ".join(outcome.out.split())
    for example in ("--remove 25%", "--max-increase 0.1", "--out plan.json", "--remove plan.json"):
        assert example in words
    for panel in ("Size and guarantee", "Data", "Model"):
        assert f"─ {panel} ─" in words
    assert "list[Path]" not in words


def test_the_documentation_names_every_flag(run: Run) -> None:
    reference = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    section = reference.split("\n## `depthgauge shrink", 1)[1].split("\n## ")[0]
    flags = set(re.findall(r"--[a-z][a-z-]+", run("--help-all").out.split("─ Options ─")[1])) - {"--help", "--help-all"}
    assert 20 <= len(flags) <= 26
    assert {flag for flag in flags if f"`{flag}" not in section} == set()


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {
            key for name, v in value.items() if name not in ("files", "versions", "data") for key in keys_of(v)
        }
    return {key for inner in value for key in keys_of(inner)} if isinstance(value, list) else set()


def test_the_documentation_names_every_key_of_the_document() -> None:
    formats = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    section = formats.split("\n## Shrink result", 1)[1].split("\n## ")[0]
    written = keys_of(check_shrink(with_limit()).to_json())
    assert {"quantile", "tested", "decode_before", "effort", "bos_reason", "candidates", "durations"} <= written
    assert written - set(re.findall(r"`([^`\n]+)`", section)) == set()
