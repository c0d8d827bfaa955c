"""The command as a user meets it: exit codes, one sentence on standard error, one document on standard output."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from rich.console import Console

import depthgauge as dg
import depthgauge.workflows.gauge_network
import depthgauge.workflows.target
from depthgauge.cli.main import GONE, main
from depthgauge.cli.print_document import part_lines
from depthgauge.results.gauge_document import network_profile
from depthgauge.results.gauge_record import NetworkDescription, NetworkSubject, PrintedTheorem
from depthgauge.theory.network.random_networks import uniform_inputs

ROOT = Path(__file__).parents[2]


def little_pair() -> tuple[dg.SelfAttentionNetwork, dg.SelfAttentionNetwork]:
    """In place of the built-in pair, which takes its time; with LayerNorm nothing is proved, which is quick."""
    pair = dg.random_network(2, 1, 3, 0.002, norm="pre"), dg.random_network(2, 1, 3, 0.2, norm="pre")
    pair[0].name, pair[1].name = "small weights", "large weights"
    return pair


def untimed(value: Any) -> Any:
    """A document without how long things took."""
    if isinstance(value, dict):
        return {key: untimed(inner) for key, inner in value.items() if key not in ("seconds", "attack_seconds")}
    return [untimed(inner) for inner in value] if isinstance(value, list) else value


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    # Proofs and attacks are tested elsewhere; keep them short here.
    monkeypatch.setattr(depthgauge.workflows.gauge_network, "ATTACK", {"starts": 1, "steps": 1})
    monkeypatch.setattr(depthgauge.workflows.gauge_network, "TOLERANCES", (1e-1,))
    monkeypatch.setattr(depthgauge.workflows.target, "built_in_pair", little_pair)
    monkeypatch.delenv("DEPTHGAUGE_DEBUG", raising=False)

    def command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["depthgauge", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return command


def real(*arguments: str, cwd: Path, **environment: str) -> Outcome:
    """Run the command as a process of its own."""
    finished = subprocess.run(
        [sys.executable, "-m", "depthgauge", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        timeout=120,
        check=False,
    )
    return Outcome(finished.returncode, finished.stdout, finished.stderr)


def is_one_sentence(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1 and text.endswith("\n") and "Traceback" not in text


@pytest.fixture
def network_file(tmp_path: Path) -> Path:
    dg.save_network(dg.random_network(2, 2, 4, 0.03, norm="pre", seed=1), tmp_path / "n.safetensors")
    return tmp_path / "n.safetensors"


# --- random ----------------------------------------------------------------------------------------------------------


def test_random_writes_the_network_asked_for(run: Run) -> None:
    outcome = run(
        "random", "--layers", "3", "--heads", "2", "--dim", "5", "--key-dim", "3", "--eta", "0.25", "--mlp", "7",
        "--activation", "gelu", "--norm", "pre", "--no-skip", "--causal", "--distribution", "sign", "--seed", "4",
        "--out", "n.safetensors",
    )  # fmt: skip
    assert outcome.code == 0
    assert outcome.out == ""
    assert outcome.err.startswith("wrote n.safetensors: 3 layers × 2 heads, dim 5")
    network = dg.load_network("n.safetensors")
    expected = dg.random_network(
        3,
        2,
        5,
        0.25,
        key_dim=3,
        mlp=7,
        activation="gelu",
        norm="pre",
        skip=False,
        causal=True,
        distribution="sign",
        seed=4,
    )
    assert network.describe() == expected.describe()
    assert all((a == b).all() for a, b in zip(network.parameters(), expected.parameters(), strict=True))


def test_random_describes_what_it_wrote_as_json(run: Run) -> None:
    outcome = run("random", "--layers", "1", "--dim", "4", "--out", "n.safetensors", "--json")
    assert outcome.code == 0
    document = json.loads(outcome.out)
    assert document == {"out": "n.safetensors", "network": dg.load_network("n.safetensors").describe()}
    assert outcome.err == ""


# --- gauge -----------------------------------------------------------------------------------------------------------


def test_gauge_prints_a_table_of_every_layer(run: Run, network_file: Path) -> None:
    outcome = run("gauge", str(network_file), "--tokens", "6")
    assert outcome.code == 0
    assert "2 layers × 2 heads, dim 4" in outcome.out
    for row in ("input", "0", "1"):
        assert re.search(rf"│ +{row} │", outcome.out)
    assert outcome.err == ""


def test_gauge_prints_what_was_proved_and_the_verdict(run: Run) -> None:
    dg.save_network(dg.random_network(2, 1, 2, 0.03), "n.safetensors")
    outcome = run("gauge", "n.safetensors", "--tokens", "3")
    assert outcome.code == 0
    for method in ("identity", "last-layer", "parallel", "mean-field", "corrected"):
        assert method in outcome.out
    assert "Effective depth" in outcome.out
    assert "→ 2 layers; 1 is enough within" in outcome.out


def test_gauge_json_is_the_document_and_nothing_else(run: Run, network_file: Path) -> None:
    outcome = run(
        "gauge", str(network_file), "--tokens", "6", "--samples", "2", "--radius", "0.5", "--seed", "3", "--json"
    )
    assert outcome.code == 0
    expected = dg.gauge(network_file, tokens=6, samples=2, radius=0.5, seed=3).to_json()
    assert untimed(json.loads(outcome.out)) == untimed(json.loads(json.dumps(expected)))
    assert outcome.err == ""


def test_gauge_writes_the_same_document_to_a_file(run: Run, network_file: Path) -> None:
    outcome = run("gauge", str(network_file), "--tokens", "6", "--json", "--out", "r.json")
    assert outcome.code == 0
    assert json.loads(outcome.out) == json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert outcome.err == "result written to r.json\n"


def test_gauge_without_a_target_takes_the_built_in_pair(run: Run) -> None:
    outcome = run("gauge", "--tokens", "8", "--samples", "1")
    assert outcome.code == 0
    assert "small weights: 2 layers" in outcome.out
    assert "large weights: 2 layers" in outcome.out


def test_the_table_of_a_network_with_nothing_to_show(run: Run) -> None:
    dg.save_network(dg.random_network(1, 1, 2, 0.1, causal=True, norm="pre"), "n.safetensors")
    outcome = run("gauge", "n.safetensors", "--tokens", "1", "--samples", "1")
    assert outcome.code == 0
    assert "causal" in outcome.out
    assert re.search(r"│ +0 │ +0 │.*│ +– │ +– │", outcome.out)


def test_the_built_in_profiles_fit_eighty_columns() -> None:
    lines: list[str] = []
    for network in depthgauge.workflows.target.built_in_pair():
        profile = dg.measure(network, uniform_inputs(1, 32, network.dim))
        subject = NetworkSubject(
            name=network.name,
            verdict="",
            network=msgspec.convert(network.describe(), NetworkDescription),
            radius=1.0,
            input=profile.input_record(),
            layers=profile.layer_records(),
            collapse=(),
            depth=(),
            printed=PrintedTheorem(printed_bound=None, printed_log10=None, printed_applies=False),
        )
        console = Console(width=80, file=io.StringIO())
        for part in part_lines(network_profile(subject), 80):
            console.print(part)
        lines += console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    assert sum(bool(re.match(r"│ +\d+ │", line)) for line in lines) == 24  # a line a layer: nothing is wrapped


def test_names_from_a_file_cannot_steer_the_terminal(run: Run) -> None:
    network = dg.random_network(1, 1, 2, 0.1, norm="pre")
    network.name = "[red]evil[/red] \x1b]0;title\x07\x1b[31m"
    dg.save_network(network, "n.safetensors")
    outcome = run("gauge", "n.safetensors", "--tokens", "2")
    assert outcome.code == 0
    assert "[red]evil[/red]" in outcome.out
    assert "\x1b" not in outcome.out
    assert "\x07" not in outcome.out


# --- errors ----------------------------------------------------------------------------------------------------------


def truncated(folder: Path) -> str:
    dg.save_network(dg.random_network(2, 2, 4, 0.3), folder / "t.safetensors")
    content = (folder / "t.safetensors").read_bytes()
    (folder / "t.safetensors").write_bytes(content[:300])
    return "t.safetensors"


BAD_INPUT: dict[str, tuple[list[str], str]] = {
    "unknown verb": (["frobnicate"], "No such command 'frobnicate'"),
    "unknown flag": (["gauge", "--bogus"], "No such option: --bogus"),
    "flag without a value": (["gauge", "--tokens"], "--tokens"),
    "not a number": (["random", "--layers", "x", "--out", "n"], "--layers"),
    "no output file": (["random"], "Missing option '--out'"),
    "too many arguments": (["gauge", "a", "b"], "unexpected extra argument"),
    "no such file": (["gauge", "missing.safetensors"], "cannot read missing.safetensors: No such file or directory"),
    "a directory": (["gauge", "."], "is a directory"),
    "zero layers": (["random", "--layers", "0", "--out", "n"], "layers must be a whole number of at least 1, got 0"),
    "negative radius": (["gauge", "--radius", "-1"], "radius must be a positive number, got -1.0; it is the largest"),
    "radius not a number": (["gauge", "--radius", "nan"], "radius must be a positive number, got nan"),
    "zero samples": (["gauge", "--samples", "0"], "samples must be"),
    "huge seed": (["random", "--seed", "99999999999999999999", "--out", "n"], "seed must be"),
    "negative seed": (["gauge", "--seed", "-1"], "seed must be"),
    "unknown distribution": (["random", "--distribution", "unifrom", "--out", "n"], "did you mean 'uniform'?"),
    "unknown norm": (["random", "--norm", "batch", "--out", "n"], "norm must be one of none, pre, post"),
    "two sources of inputs": (
        ["gauge", "--input", "x.safetensors", "--tokens", "3"],
        "--tokens describes random inputs",
    ),
    "no such inputs": (["gauge", "--input", "x.safetensors"], "cannot read inputs from x.safetensors"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_exit_two_and_one_sentence(case: str, run: Run) -> None:
    arguments, complaint = BAD_INPUT[case]
    outcome = run(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert is_one_sentence(outcome.err)
    assert complaint in outcome.err
    assert list(Path().iterdir()) == []


def test_a_truncated_file_is_exit_two_and_one_sentence(run: Run, tmp_path: Path) -> None:
    outcome = run("gauge", truncated(tmp_path), "--json")
    assert outcome.code == 2
    assert outcome.out == ""
    assert is_one_sentence(outcome.err)
    assert "t.safetensors ends too early: 300 bytes" in outcome.err


def test_usage_errors_point_to_the_help_of_their_verb(run: Run) -> None:
    assert run("gauge", "--bogus").err.endswith("see `depthgauge gauge --help`\n")
    assert run("bogus").err.endswith("see `depthgauge --help`\n")


def test_every_former_option_names_its_successor(run: Run) -> None:
    for flag, sentence in GONE.items():
        assert run("shrink", "model", flag, "x") == Outcome(2, "", f"error: {sentence}\n")


def test_an_output_that_cannot_be_a_file_is_exit_two(run: Run) -> None:
    for arguments in (["random", "--out", "."], ["random", "--out", ""], ["gauge", "--tokens", "2", "--out", "."]):
        outcome = run(*arguments)
        assert outcome.code == 2
        assert is_one_sentence(outcome.err)
        assert "it is a directory; give the name of a file" in outcome.err


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BaseException], None]]:
    def breaks(error: BaseException) -> None:
        def measure(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(depthgauge.workflows.gauge_network, "measure", measure)

    return breaks


def test_what_nobody_expected_is_exit_one_and_one_sentence(
    run: Run, broken: Callable[[BaseException], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(RuntimeError("two\nlines"))
    outcome = run("gauge")
    assert outcome.code == 1
    assert is_one_sentence(outcome.err)
    assert "unexpected RuntimeError: two lines (set DEPTHGAUGE_DEBUG=1" in outcome.err
    on_cpu = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried")
    for error in (torch.OutOfMemoryError("tried to allocate 2 GiB"), on_cpu, MemoryError()):
        broken(error)
        outcome = run("gauge")
        assert (outcome.code, is_one_sentence(outcome.err)) == (2, True)
        assert "memory ran out: use fewer or shorter inputs, or --device stream, which keeps one block" in outcome.err
    broken(KeyboardInterrupt())
    assert run("gauge") == Outcome(130, "", "error: interrupted\n")
    broken(RuntimeError("in full"))
    monkeypatch.setenv("DEPTHGAUGE_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["depthgauge", "gauge"])
    with pytest.raises(RuntimeError, match="in full"):
        main()


# --- help and version ------------------------------------------------------------------------------------------------


def test_help_shows_every_verb_and_examples(run: Run) -> None:
    overview = run("--help")
    assert overview.code == 0
    assert overview.err == ""
    assert run() == overview == run("-h")
    for verb in ("gauge", "random"):
        assert verb in overview.out
        outcome = run(verb, "--help")
        assert outcome.code == 0
        assert "Examples" in outcome.out
        assert f"depthgauge {verb}" in outcome.out
        assert "--json" in outcome.out


@pytest.mark.parametrize("verb", ["gauge", "shrink", "recover", "evaluate"])
def test_the_short_help_has_few_options_and_names_the_long_one(
    verb: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, long = run(verb, "--help"), run(verb, "--help-all")
    assert (short.code, long.code) == (0, 0)
    assert short.out.rstrip().endswith(f"depthgauge {verb} --help-all shows all options.")
    few, all_of_them = (len(re.findall(r"^│ .{0,5}--[a-z]", text, re.MULTILINE)) for text in (short.out, long.out))
    assert few <= 16 < all_of_them <= {"shrink": 26, "gauge": 20}.get(verb, 19)
    assert len(short.out.splitlines()) <= 48  # two screens of 24 lines
    assert run(verb, "--help") == short  # the long one leaves no trace


def test_version(run: Run) -> None:
    assert run("--version") == Outcome(0, f"depthgauge {dg.__version__}\n", "")


HEAVY = {
    "torch", "numpy", "scipy", "pandas", "matplotlib", "plotly", "safetensors", "flint", "jaxtyping", "joblib", "dask",
    "transformers", "triton",
}  # fmt: skip


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    typed = [["--help"], ["gauge", "--help"], ["random", "--help"], ["--version"], ["bogus"]]
    script = (
        "import sys\n"
        "from depthgauge.cli.main import main\n"
        f"for words in {typed}:\n"
        "    sys.argv = ['depthgauge', *words]\n"
        "    try:\n        main()\n"
        "    except SystemExit: pass\n"
        f"    print('HEAVY', words, sorted({HEAVY} & set(sys.modules)))\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = [line for line in finished.stdout.splitlines() if line.startswith("HEAVY")]
    assert found == [f"HEAVY {words} []" for words in typed]


def test_the_public_names_are_all_there_and_lazy() -> None:
    assert set(dg.__all__) <= set(dir(dg))
    for name in dg.__all__:
        assert getattr(dg, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'collapsee'"):
        _ = dg.collapsee
    code = "import sys, depthgauge; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# --- as a process of its own -----------------------------------------------------------------------------------------


def without_progress(err: str) -> list[str]:
    """Return the lines on standard error, except those that a slow machine prints because the work takes long."""
    return [line for line in err.splitlines() if not line.endswith("…")]


def test_from_drawing_to_gauging_as_processes(tmp_path: Path) -> None:
    made = real("random", "--layers", "2", "--heads", "2", "--dim", "4", "--eta", "0.05", "--seed", "1",
                "--distribution", "sign", "--norm", "pre", "--out", "n.safetensors", cwd=tmp_path)  # fmt: skip
    assert made == Outcome(
        0, "", "wrote n.safetensors: 2 layers × 2 heads, dim 4, largest weight η = 0.05, skip, pre-norm\n"
    )
    shown = real("gauge", "n.safetensors", "--json", cwd=tmp_path)
    assert (shown.code, without_progress(shown.err)) == (0, [])
    assert len(json.loads(shown.out)["subjects"][0]["layers"]) == 2


def test_the_installed_script_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("depthgauge")
    finished = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert finished.stdout == f"depthgauge {dg.__version__}\n"


def test_a_terminal_that_knows_only_ascii(tmp_path: Path, network_file: Path) -> None:
    for arguments in (["gauge", str(network_file)], ["report", "nöwhere"], []):
        outcome = real(*arguments, cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
        assert outcome.code == (2 if "nöwhere" in arguments else 0)
        assert "Traceback" not in outcome.err
        assert outcome.out.isascii()


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path, network_file: Path) -> None:
    command = f"{sys.executable} -m depthgauge gauge {network_file} --json | head -c 1"
    finished = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.stdout == "{"
    assert without_progress(finished.stderr) == []


# --- the reference pages ----------------------------------------------------------------------------------------------


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        # The conditions of a theorem are named by themselves.
        return set(value) | {key for name, v in value.items() if name != "printed_conditions" for key in keys_of(v)}
    if isinstance(value, list):
        return {key for inner in value for key in keys_of(inner)}
    return set()


def test_the_documentation_names_every_key_of_the_document(network_file: Path, run: Run) -> None:
    documented = set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")))
    plain = dg.random_network(2, 1, 2, 0.03)
    written = keys_of([dg.gauge(target, tokens=4).to_json() for target in (network_file, plain)])
    assert {"score_range", "upper", "refused", "kept"} <= written
    assert written - documented == set()
