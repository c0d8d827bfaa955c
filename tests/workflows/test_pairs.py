"""Encoder–decoder models, gauged and shrunk on pairs, one stack at a time."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_checkpoint
from tiny_pairs import KEYS, PAIRED, paired_model, save_paired, save_pairs

import depthgauge as dg
from depthgauge.checkpoints.found_inputs import find_pairs
from depthgauge.checkpoints.layers import BlockRunner, with_stack
from depthgauge.checkpoints.load import wrap
from depthgauge.checkpoints.pair_files import read_pairs
from depthgauge.checkpoints.samples import Samples
from depthgauge.cli.main import main
from depthgauge.errors import InputError
from depthgauge.surgery.student import encoded

BOTH = [(name, stack) for name in PAIRED for stack in ("decoder", "encoder")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    save_pairs(folder / "pairs.jsonl", 140)
    for name in PAIRED:
        save_paired(folder / name, name)
    save_checkpoint(folder / "llama", "llama")
    return folder


def samples_of(place: Path, name: str, count: int) -> Samples:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / name)
    config = paired_model(name).config
    return read_pairs(find_pairs(place / "pairs.jsonl"), tokenizer, config, wanted=count, longest=128, seed=0).inputs


def plain_losses(model: Any, samples: Samples) -> torch.Tensor:
    """Return the loss that transformers computes, pair by pair, without padding."""
    found = []
    with torch.no_grad():
        for row in range(len(samples)):
            one = samples[row : row + 1]
            real = one.inputs["attention_mask"].bool()
            labels = one.targets[one.targets != -100][None]
            found.append(model(input_ids=one.inputs["input_ids"][real][None], labels=labels).loss)
    return torch.stack(found).double()


def listed(model: Any, stack: str) -> torch.nn.ModuleList:
    root = model.get_encoder() if stack == "encoder" else model.get_decoder()
    return next(one for one in root.modules() if isinstance(one, torch.nn.ModuleList))


@pytest.mark.parametrize(("name", "stack"), BOTH)
def test_gauge_measures_the_loss_without_a_block(name: str, stack: str, place: Path) -> None:
    result = dg.gauge(place / name, pairs=place / "pairs.jsonl", stack=stack, samples=4, what_if="block", device="cpu")
    subject = result.subjects[0]
    model, samples = paired_model(name), samples_of(place, name, 4)
    intact = plain_losses(model, samples)
    assert subject.baseline is not None
    assert subject.baseline.loss == pytest.approx(float(intact.mean()), rel=1e-4)
    assert len(subject.layers) == {"encoder": 4, "decoder": 3}[stack]
    assert subject.model.stack == stack
    assert subject.unobserved is None or "their calls are not told apart" in subject.unobserved
    assert subject.text is not None
    assert (subject.text.kind, subject.text.windows) == ("pairs", 4)
    for layer in range(1, len(subject.layers)):  # block 0 of T5 computes the biases of the others
        smaller = copy.deepcopy(model)
        del listed(smaller, stack)[layer]
        added = float((plain_losses(smaller, samples) - intact).mean())
        assert subject.layers[layer].what_if["block"].loss == pytest.approx(added, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("name", "stack"), BOTH)
def test_blocks_one_by_one_are_the_model_on_every_pair(name: str, stack: str, place: Path) -> None:
    """Pairs have different sources and padding; each window gets its own encoder states and masks."""
    checkpoint = with_stack(wrap(paired_model(name)), stack)
    assert checkpoint.layer_key == KEYS[name, stack]
    samples = encoded(checkpoint, samples_of(place, name, 5))
    runner = BlockRunner(checkpoint, samples[:1])
    runner.batch = 2
    with torch.no_grad():
        states = runner.through(range(checkpoint.layers), runner.embed(samples), samples)
        made = runner.output(states, samples)
        expected = checkpoint.model(**samples.keywords(torch.device("cpu"), torch.float32)).logits
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "stack"), BOTH)
def test_shrink_writes_one_stack_smaller(
    name: str,
    stack: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the command; a new process has the loss of the record and generates the same with and without a cache."""
    out = tmp_path / "out"
    words = ["depthgauge", "shrink", place / name, "--pairs", place / "pairs.jsonl", "--remove", "1", "--out", out]
    words += ["--effort", "quick", "--device", "cpu"] + (["--stack", stack] if stack == "encoder" else [])
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code in (0, None), shown.err
    kept = {"encoder": 3, "decoder": 2}[stack]
    assert f"{name}: {kept + 1} → {kept} layers of the {stack}" in shown.out
    assert f"# {name} with {kept} of {kept + 1} layers of the {stack}\n" in (out / "README.md").read_text()
    record = json.loads((out / "depthgauge.json").read_text())
    assert record["objective"] == "loss"
    assert record["layers_after"] == kept
    assert record["reload"]["generation"] == "equal with and without cache"
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (place / name, out))
    changed = {key for key in before if before[key] != after.get(key)} - {"transformers_version"}
    assert changed == {KEYS[name, stack]}
    if stack == "decoder":
        assert not record["repaired"]
        assert any("blocks are removed without repair" in note for note in record["notes"])
    if name == "t5":
        assert 0 not in record["removed"]
        assert any("the search left out" in note and "block.0" in note for note in record["notes"])
    samples = samples_of(place, name, 132)[72:]
    torch.save((dict(samples.inputs), samples.targets), tmp_path / "certify.pt")
    script = (
        "import sys, torch, transformers\n"
        "inputs, targets = torch.load(sys.argv[2])\n"
        "model = transformers.AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1]).eval()\n"
        "logits = model(**inputs).logits\n"
        "print(sum(float(torch.nn.functional.cross_entropy(a, b)) for a, b in zip(logits, targets)) / len(targets))\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, out, tmp_path / "certify.pt"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert record["loss"]["shrunk"] == pytest.approx(float(done.stdout), rel=1e-4)
    assert record["loss"]["dense"] == pytest.approx(float(plain_losses(paired_model(name), samples).mean()), rel=1e-4)
    assert "95 % of pairs like those of" in (out / "README.md").read_text()


@pytest.mark.parametrize(("settings", "start"), [({}, 0), ({"bos_token_id": 1}, 1), ({"decoder_start_token_id": 2}, 2)])
def test_targets_follow_the_token_after_which_the_model_generates(
    settings: dict[str, int], start: int, place: Path
) -> None:
    from transformers import AutoTokenizer

    config = SimpleNamespace(pad_token_id=0, **settings)
    tokenizer = AutoTokenizer.from_pretrained(place / "t5")
    found = read_pairs(find_pairs(place / "pairs.jsonl"), tokenizer, config, wanted=3, longest=8, seed=0)
    assert found.inputs.inputs["decoder_input_ids"][:, 0].tolist() == [start] * 3


def test_a_model_in_memory_takes_pairs(place: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "bart")
    result = dg.shrink(paired_model("bart"), pairs=place / "pairs.jsonl", tokenizer=tokenizer, remove=1, effort="quick")
    assert result.model.config.decoder_layers == 2
    assert result.model.config.encoder_layers == 4
    with pytest.raises(InputError, match="a model in memory needs its tokenizer"):
        dg.gauge(paired_model("bart"), pairs=place / "pairs.jsonl")


def _lines(folder: Path, *lines: str) -> list[str]:
    (folder / "p.jsonl").write_text("\n".join(lines))
    return ["--pairs", str(folder / "p.jsonl")]


_GOOD = '{"source": "w1 w2", "target": "w3"}'
BAD: dict[str, tuple[str, Any, str]] = {
    "no target": ("t5", lambda f: _lines(f, _GOOD, '{"source": "w1"}'), "line 2 of .* no text in the field 'target'"),
    "empty source": ("t5", lambda f: _lines(f, '{"source": " ", "target": "w1"}'), "line 1 .* in the field 'source'"),
    "no JSON": ("t5", lambda f: _lines(f, "w1"), "line 1 of .* is not JSON"),
    "no pairs": ("t5", lambda f: _lines(f, "", ""), "contains no pairs"),
    "no file": ("t5", lambda _: ["--pairs", "gone.jsonl"], "cannot read the pairs gone.jsonl: No such file"),
    "text": ("t5", lambda _: [], "is an encoder–decoder model; give it pairs .* with --pairs FILE.jsonl"),
    "decoder": ("llama", lambda f: _lines(f, _GOOD), "is no encoder–decoder model, so it reads no pairs"),
    "stack": ("t5", lambda f: [*_lines(f, _GOOD), "--stack", "both"], "stack must be one of decoder, encoder"),
    "stack alone": ("t5", lambda _: ["--stack", "encoder"], "--stack is for encoder–decoder models"),
    "bos": ("t5", lambda f: [*_lines(f, _GOOD), "--bos", "no"], "--bos is about text, and --pairs gives pairs"),
    "images": ("t5", lambda f: [*_lines(f, _GOOD), "--images", "d"], "inputs of different models"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("verb", ["gauge", "shrink"])
def test_bad_pairs_are_one_sentence(
    case: str, verb: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model, words, said = BAD[case]
    out = tmp_path / "out.json"
    command = ["depthgauge", verb, str(place / model), *words(tmp_path), "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command + (["--remove", "1"] if verb == "shrink" else []))
    with pytest.raises(SystemExit) as ended:
        main()
    error = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2
    assert re.search(said, error), error
    assert error.startswith("error: ")
    assert not out.exists()


def test_too_few_pairs_and_too_many_blocks(place: Path, tmp_path: Path) -> None:
    few = save_pairs(tmp_path / "few.jsonl", 20)
    with pytest.raises(InputError, match="has 20 different pairs, and 376 are needed; give more pairs, or use"):
        dg.shrink(place / "t5", pairs=few, remove=1, device="cpu")
    with pytest.raises(InputError, match="remove must be from 1 to 2 blocks, got 3"):
        dg.shrink(place / "bart", pairs=place / "pairs.jsonl", remove=3, effort="quick", device="cpu")
