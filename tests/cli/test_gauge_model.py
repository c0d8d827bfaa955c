"""`depthgauge gauge` on a checkpoint as a user meets it."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forked import exit_code, forked
from tiny_checkpoints import save_checkpoint, text_of

from depthgauge.base.journal import journal_folder
from depthgauge.cli.main import main
from depthgauge.workflows import gauge_checkpoint


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
SMALL = ("--tokens", "48", "--window", "16", "--device", "cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    for name in ("llama", "mpnet", "mamba", "mixtral"):
        save_checkpoint(folder / name, name)
    (folder / "corpus.txt").write_text(text_of(100), encoding="utf-8")
    (folder / "short.txt").write_text(text_of(5), encoding="utf-8")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: Path) -> Run:
    monkeypatch.chdir(place)
    monkeypatch.delenv("DEPTHGAUGE_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "100")

    def command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["depthgauge", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return command


def test_tables(run: Run) -> None:
    outcome = run("gauge", "llama", "--text", "corpus.txt", *SMALL, "--what-if", "all")
    assert outcome.code == 0
    assert "llama: 3 layers × 4 heads (2 key–value), dim 16" in outcome.out
    for word in ("TV to uniform", "What if: loss added, nats per token (intact: ", "skip block", "parallel",
                 "Which layer score", "block influence (ShortGPT)",
                 "→ 3 layers; skipping layer "):  # fmt: skip
        assert word in outcome.out, word
    for word in ("η", "Theorem", "orders of magnitude"):  # of the papers: on the page and in the document
        assert word not in outcome.out
    # On a slow machine a line of progress may stand between these two.
    first, *said = outcome.err.splitlines()
    assert first == "reading corpus.txt as text"
    assert said[0].startswith("it fits: ")
    assert "loading llama" in said


def test_ctrl_c_says_how_to_continue_where_steps_were_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], gauge_checkpoint.what_if_losses

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(gauge_checkpoint, "what_if_losses", interrupted)
    command = ("gauge", "llama", "--text", "corpus.txt", *SMALL)
    code, _, err = run(*command, "--out", "stopped.json")
    assert code == 130
    last = err.splitlines()[-1]
    assert last.startswith("error: interrupted; the finished steps are kept in ")
    assert last.endswith("stopped.json.partial: run the same command again to continue")
    assert run(*command, "--out", "stopped.json").code == 0
    calls.clear()
    outcome = run(*command)
    assert (outcome.code, outcome.err.splitlines()[-1]) == (130, "error: interrupted")


def test_json_is_one_document(run: Run) -> None:
    outcome = run("gauge", "llama", *SMALL, "--what-if", "none", "--json", "--out", "r.json", "--text", "corpus.txt")
    document = json.loads(outcome.out)
    assert document == json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert document["schema"] == "depthgauge.gauge/1"
    assert document["settings"]["what_if"] == "none"
    assert document["settings"]["target"] == "llama"
    assert not journal_folder("r.json").exists()


def test_attention_that_is_not_observable(run: Run, place: Path) -> None:
    outcome = run("gauge", "mpnet", "--text", "corpus.txt", *SMALL, "--report", "mpnet.html")
    said = "ttention weights are not observable: MPNetModel bypasses transformers' attention interface: 0 of its 3"
    assert outcome.code == 0
    assert said in " ".join(outcome.out.split())
    assert said in outcome.err
    assert "skip attention" in outcome.out
    assert "TV to uniform" not in outcome.out
    assert said.replace("'", "&#39;") in (place / "mpnet.html").read_text("utf-8")


def test_a_model_without_attention(run: Run, place: Path) -> None:
    outcome = run("gauge", "mamba", "--text", "corpus.txt", *SMALL, "--report", "mamba.html")
    assert outcome.code == 0
    assert "mamba: 3 layers, dim 16" in outcome.out
    assert "attention weights are not observable: MambaForCausalLM has no attention heads" in outcome.out
    assert "skip block" in outcome.out
    assert "skip attention" not in outcome.out
    assert "MambaForCausalLM has no attention heads" in (place / "mamba.html").read_text("utf-8")


def test_experts(run: Run) -> None:
    outcome = run("gauge", "mixtral", "--text", "corpus.txt", *SMALL, "--what-if", "expert")
    assert outcome.code == 0
    assert "What if one expert adds nothing: loss added, nats per token" in outcome.out
    assert "% of tokens" in outcome.out
    assert "skip block" not in outcome.out


@pytest.mark.parametrize(("asked", "used"), [("100000", 96), ("98", 96), ("32", 32)])
def test_what_was_measured_is_said_where_there_is_less_than_asked_for(
    run: Run, place: Path, asked: str, used: int
) -> None:
    """The text has 100 tokens: 6 windows of 16, so that 98 tokens are as good as 96."""
    given = ("--tokens", asked, "--window", "16", "--device", "cpu", "--what-if", "none", "--overwrite")
    files = ("--out", "less.json", "--report", "less.html")
    outcome = run("gauge", "llama", "--text", "corpus.txt", *given, *files)
    said = "measured on 6 windows of 16 tokens, 96 tokens in all: corpus.txt has no more, and --tokens 100000 asks"
    assert outcome.code == 0
    (subject,) = json.loads((place / "less.json").read_text())["subjects"]
    assert subject["text"]["tokens"] == used
    page = (place / "less.html").read_text("utf-8")
    for shown in (" ".join(outcome.out.split()), " ".join(subject["notes"]), page):
        assert (said in shown) == (asked == "100000")


def test_progress_names_the_command_and_not_a_part_of_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first window, the model is timed and loaded, so nothing is measured yet."""
    monkeypatch.setattr("depthgauge.cli.output.START_DELAY", 0.0)
    outcome = run("gauge", "llama", "--data", "none", "--device", "cpu")
    assert outcome.err.startswith("gauging …\n")
    assert "measuring" not in outcome.err


def test_weights_only(run: Run) -> None:
    outcome = run("gauge", "llama", "--data", "none", "--device", "cpu")
    assert outcome.code == 0
    assert "from the weights alone" in outcome.out
    assert "Dong's β" in outcome.out
    assert "orders of magnitude" not in outcome.out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.gguf"], "cannot read nowhere.gguf: no such file"),
        (["llama", "--text", "short.txt"], "short.txt has 5 tokens, but one window needs 16"),
        (["llama", "--text", "missing.txt"], "cannot read text missing.txt"),
        (["llama", "--radius", "1"], "--radius applies to network files; llama is a checkpoint"),
        (["llama", "--what-if", "blok"], "did you mean 'block'?"),
        (["llama", "--depth", "0.1"], "No such option: --depth"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(run: Run, arguments: list[str], complaint: str) -> None:
    outcome = run("gauge", *arguments, *SMALL)
    assert outcome.code == 2
    assert outcome.out == ""
    last = outcome.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert complaint in last
    assert "Traceback" not in outcome.err


def test_flags_for_checkpoints_are_refused_elsewhere(run: Run) -> None:
    outcome = run("gauge", "--what-if", "all")
    assert outcome.code == 2
    assert outcome.err == (
        "error: --what-if applies to checkpoints (directories, .gguf files, hub names); the built-in pair is a "
        "network. Leave it out\n"
    )


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in keys_of(inner)}
    return {key for inner in value for key in keys_of(inner)} if isinstance(value, list) else set()


def test_the_documentation_names_every_key_of_the_document(run: Run) -> None:
    formats = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    outcome = run("gauge", "llama", "--text", "corpus.txt", *SMALL, "--what-if", "all", "--json")
    weights = run("gauge", "llama", "--data", "none", "--device", "cpu", "--json")
    experts = run("gauge", "mixtral", "--text", "corpus.txt", *SMALL, "--what-if", "expert", "--json")
    written = set[str]().union(*(keys_of(json.loads(one.out)) for one in (outcome, weights, experts)))
    assert {"static_best", "share", "parallel", "spearman", "corrected_orders"} <= written
    assert written - set(re.findall(r"`([^`\n]+)`", formats)) == set()


def test_a_killed_gauging_is_resumed(place: Path, run: Run) -> None:
    """The process is killed as soon as something was kept; the same command ends with the whole result."""
    arguments = ["gauge", "llama", "--text", "corpus.txt", *SMALL, "--what-if", "all", "--out", "killed.json"]
    child = forked(lambda: run(*arguments))
    partial = journal_folder(place / "killed.json") / "journal.json"
    deadline = time.monotonic() + 120
    while not partial.exists():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    assert partial.exists()  # it was in the middle
    assert run(*arguments).code == 0
    assert not partial.parent.exists()
    assert run(*[*arguments[:-1], "whole.json"]).code == 0
    killed, whole = (json.loads((place / name).read_text()) for name in ("killed.json", "whole.json"))
    assert killed["subjects"] == whole["subjects"]
