"""Encoder–decoder models, gauged and shrunk on pairs: one stack at a time, or both."""

import copy
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_checkpoint
from tiny_pairs import KEYS, PAIRED, paired_model, save_paired, save_pairs
from trained_models import objective_of

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.blocks.probe import derived
from depthgauge.checkpoints.blocks.what_if import encoded
from depthgauge.checkpoints.inputs.found_data import FoundData, find_data
from depthgauge.checkpoints.inputs.windows import Samples, read_data
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.weights.families import Family, Sublayer
from depthgauge.checkpoints.weights.load import with_stack, wrap
from depthgauge.cli.main import main
from depthgauge.recovery.distillation import Trained, distil
from depthgauge.recovery.recover_model import Recovery
from depthgauge.recovery.training_data import RecoveryData
from depthgauge.results.gauge_record import GaugeOptions
from depthgauge.results.recover_record import Amount
from depthgauge.surgery import repair
from depthgauge.surgery.candidates import Candidates, Search, block_weights, put_weights, train
from depthgauge.surgery.student import EFFORT, Student

EACH = [(name, stack) for name in PAIRED for stack in ("decoder", "encoder")]
ALL = EACH + [(name, "both") for name in PAIRED]
SHRUNK = [("t5", "decoder"), ("t5", "both"), ("bart", "encoder")]
"""Blocks that cannot be removed, two stacks, and norms after sublayers; `make test-families` shrinks all."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    save_pairs(folder / "pairs.jsonl", 140)
    for name in PAIRED:
        save_paired(folder / name, name)
    save_checkpoint(folder / "llama", "llama")
    return folder


def pairs_of(place: Path) -> FoundData:
    return find_data(GaugeOptions(text=str(place / "pairs.jsonl")))


def samples_of(place: Path, name: str, count: int) -> Samples:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / name)
    config = paired_model(name).config
    return read_data(pairs_of(place), tokenizer, config, wanted=count, seed=0).inputs


def keys_of(name: str, stack: str) -> tuple[str, ...]:
    return tuple(KEYS[name, one] for one in (("encoder", "decoder") if stack == "both" else (stack,)))


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


@pytest.mark.parametrize(("name", "stack"), EACH)
def test_gauge_measures_the_loss_without_a_block(name: str, stack: str, place: Path) -> None:
    result = dg.gauge(place / name, text=place / "pairs.jsonl", stack=stack, samples=4, what_if="block", device="cpu")
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


@pytest.mark.parametrize(("name", "stack"), ALL)
def test_blocks_one_by_one_are_the_model_on_every_pair(name: str, stack: str, place: Path) -> None:
    """Pairs have different sources and padding; each window gets its own encoder states and masks."""
    checkpoint = with_stack(wrap(paired_model(name)), stack)
    assert checkpoint.layer_keys == keys_of(name, stack)
    samples = encoded(checkpoint, samples_of(place, name, 5))
    runner = BlockRunner(checkpoint, samples[:1])
    runner.batches.size = 2
    with torch.no_grad():
        states = runner.through(range(checkpoint.layers), runner.embed(samples), samples)
        made = runner.output(states, samples)
        expected = checkpoint.model(**samples.keywords(torch.device("cpu"), torch.float32)).logits
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "stack"), [pytest.param(*one, marks=() if one in SHRUNK else pytest.mark.families) for one in ALL]
)
@pytest.mark.usefixtures("forked_verification")
def test_shrink_writes_a_smaller_model(
    name: str,
    stack: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the command; transformers loads a model with the loss of the record, which generates the same with a cache."""
    from transformers import AutoModelForSeq2SeqLM

    out = tmp_path / "out"
    words = ["depthgauge", "shrink", place / name, "--data", place / "pairs.jsonl", "--out", out]
    words += ["--effort", "quick", "--device", "cpu"] + ([] if stack == "decoder" else ["--stack", stack])
    words += ["--remove-layers", "1,6"] if stack == "both" else ["--remove", "1"]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert ended.value.code in (0, None), shown.err
    kept, all_of = {"encoder": 3, "decoder": 2, "both": 5}[stack], {"encoder": 4, "decoder": 3, "both": 7}[stack]
    whose = "both stacks" if stack == "both" else f"the {stack}"
    assert f"{name}: {all_of} → {kept} layers of {whose}" in shown.out
    assert f"# {name} with {kept} of {all_of} layers of {whose}\n" in (out / "README.md").read_text()
    record = json.loads((out / "depthgauge.json").read_text())
    assert record["objective"] == "loss"
    assert record["layers_after"] == kept
    assert record["reload"]["generation"] == "equal with and without cache"
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (place / name, out))
    changed = {key for key in before if before[key] != after.get(key)} - {"transformers_version"}
    assert changed == {*keys_of(name, stack)}
    assert all(after[key] == before[key] - 1 for key in changed)
    assert not any("repair" in note and "not verified" in note for note in record["notes"])
    stages = ["least squares", "distillation"] if name == "t5" else ["distillation"]  # a norm follows each sublayer
    assert [stage["name"] for stage in record["stages"]] == stages
    if stack == "both":
        assert "blocks 0 to 3 are those of the encoder and 4 to 6 are those of the decoder" in record["notes"]
    elif name == "t5":
        assert 0 not in record["removed"]
        assert any("the search left out" in note and "block.0" in note for note in record["notes"])
    samples = samples_of(place, name, 132)[72:]
    made = AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    assert record["loss"]["shrunk"] == pytest.approx(float(plain_losses(made, samples).mean()), rel=1e-4)
    assert record["loss"]["dense"] == pytest.approx(float(plain_losses(paired_model(name), samples).mean()), rel=1e-4)
    assert "95 % of pairs like those of" in (out / "README.md").read_text()


@pytest.mark.parametrize(("settings", "start"), [({}, 0), ({"bos_token_id": 1}, 1), ({"decoder_start_token_id": 2}, 2)])
def test_targets_follow_the_token_after_which_the_model_generates(
    settings: dict[str, int], start: int, place: Path
) -> None:
    from transformers import AutoTokenizer

    config = SimpleNamespace(pad_token_id=0, **settings)
    config.get_text_config = lambda: config
    tokenizer = AutoTokenizer.from_pretrained(place / "t5")
    found = read_data(pairs_of(place), tokenizer, config, wanted=3, window=8, seed=0)
    assert found.inputs.inputs["decoder_input_ids"][:, 0].tolist() == [start] * 3


# Written by hand from the source of transformers.
DECODERS = {
    "t5": Family(
        "layer.0.SelfAttention", "layer.2.DenseReluDense", "layer.0.SelfAttention.o", "layer.2.DenseReluDense.wo",
        between=(Sublayer("layer.1.EncDecAttention", "layer.1.EncDecAttention.o"),),
    ),
    "bart": Family(
        "self_attn", "fc2", "self_attn.out_proj", "fc2", order="post",
        attention_norm="self_attn_layer_norm", mlp_norm="final_layer_norm",
        between=(Sublayer("encoder_attn", "encoder_attn.out_proj", "encoder_attn_layer_norm"),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRED)
def test_blocks_with_three_sublayers_are_derived(name: str, place: Path) -> None:
    samples = samples_of(place, name, 2)
    both = derived(with_stack(wrap(paired_model(name)), "both"), samples)
    assert both.families[4:] == (DECODERS[name],) * 3
    encoder = derived(with_stack(wrap(paired_model(name)), "encoder"), samples)
    assert both.families[:4] == encoder.families
    assert all(family is not None and family.between == () for family in encoder.families)


def test_a_sublayer_that_is_multiplied_by_another_number_is_refused(place: Path) -> None:
    model = paired_model("t5")
    for block in model.decoder.block:
        block.layer[1].EncDecAttention.register_forward_hook(lambda module, args, out: (2 * out[0], *out[1:]))
        block.layer[1].dropout.register_forward_hook(lambda module, args, out: 0.5 * out)
    found = derived(with_stack(wrap(model), "decoder"), samples_of(place, "t5", 2))
    assert set(found.families) == {None}
    assert "by different numbers" in found.underived


@pytest.mark.parametrize("stack", ["decoder", "both"])
def test_least_squares_changes_the_map_between_the_others(
    stack: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is what a block computes with another output map of its cross-attention."""
    monkeypatch.setattr(repair, "RIDGE", 1e-6)
    monkeypatch.setattr(repair, "RIDGE_PER_RATIO", 0.0)
    samples = samples_of(place, "t5", 40)
    checkpoint = derived(with_stack(wrap(paired_model("t5")), stack), samples)
    runner, layer = BlockRunner(checkpoint, samples[:1]), checkpoint.layers - 1
    states = runner.through(range(layer), runner.embed(samples), samples)
    dense = runner.through([layer], states, samples)
    parts, family = runner.blocks[layer].layer, checkpoint.families[layer]
    maps = (parts[0].SelfAttention.o, parts[1].EncDecAttention.o, parts[2].DenseReluDense.wo)
    assert repair.output_maps(runner.blocks[layer], family) == maps
    with torch.no_grad():
        maps[1].weight.add_(0.1 * torch.randn(maps[1].weight.shape, generator=torch.Generator().manual_seed(0)))
    weights = [one.weight.detach().clone() for one in maps]

    def left(known: Family) -> float:
        """Return the error after the refit of the output maps of a family."""
        put_weights([one.weight for one in maps], weights)
        runner.checkpoint = replace(checkpoint, families=(known,) * checkpoint.layers)
        repair.refit_block(runner, layer, states, dense, samples)
        return float((runner.through([layer], states, samples) - dense).norm())

    off = float((runner.through([layer], states, samples) - dense).norm())
    assert left(family) < off / 5
    assert left(family) < left(replace(family, between=())) / 2


def test_the_training_repairs_all_output_maps(place: Path) -> None:
    samples = samples_of(place, "bart", 6)
    checkpoint = derived(with_stack(wrap(paired_model("bart")), "both"), samples)
    student = Student(checkpoint, samples[:3], samples[3:], effort=EFFORT["quick"])
    student.keep_all_but((1, 5))
    found = {id(weight) for weight in Candidates(student).changed_weights}
    model = checkpoint.model.model
    for block in (model.decoder.layers[0], model.decoder.layers[2]):
        assert {id(one.weight) for one in (block.self_attn.out_proj, block.encoder_attn.out_proj, block.fc2)} <= found
    for block in (model.encoder.layers[0], model.encoder.layers[3]):
        assert {id(block.self_attn.out_proj.weight), id(block.fc2.weight)} <= found
    assert id(model.decoder.layers[1].fc2.weight) not in found


@pytest.mark.parametrize(("stack", "removed"), [("decoder", (1,)), ("both", (1, 5))])
def test_a_recovered_t5_keeps_its_position_biases(
    stack: str, removed: tuple[int, ...], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are weights of block 0 that all blocks read; what the other blocks were given would not follow them."""

    def gaining(*arguments: Any, **keywords: Any) -> Trained:
        made = distil(*arguments, **keywords)
        return replace(made, before=made.before + 100)  # so that it is kept

    monkeypatch.setattr("depthgauge.recovery.recover_model.distil", gaining)
    model, samples = paired_model("t5"), samples_of(place, "t5", 12)
    checkpoint = derived(with_stack(wrap(model), stack), samples)
    student = Student(checkpoint, samples[:8], samples[8:], effort=EFFORT["quick"])
    biases = [root.block[0].layer[0].SelfAttention.relative_attention_bias.weight for root in checkpoint.roots.values()]
    assert student.runner.shared == {*biases}
    student.keep_all_but(removed)
    before = [weight.detach().clone() for weight in biases]
    data = RecoveryData(samples[:8], 8, {"pairs": samples[:8].main.numel()})
    recovery = Recovery(data, samples[8:], None, Amount(tokens=3 * samples.main.shape[1]), 0)
    losses, record = train(student, student.losses(), block_weights(student), recovery)
    assert record.kept
    assert all(torch.equal(*pair) for pair in zip(biases, before, strict=True))
    assert objective_of(student, student.model()) == pytest.approx(float(losses.mean()), rel=1e-5)


def test_the_search_in_both_stacks_of_t5_finds_what_generates(place: Path) -> None:
    """transformers generates with a T5 only if the encoder has as many blocks as the decoder, or more."""
    checkpoint, samples = with_stack(wrap(paired_model("t5")), "both"), samples_of(place, "t5", 6)
    search = Search(Student(checkpoint, samples[:1], samples[1:], effort=EFFORT["quick"], repair=False))
    search.remove_until(6)
    removed = [step.layer for step in search.steps]
    assert {*removed} == {1, 2, 3, 5, 6}  # block 0 of each stack has the position biases of the others
    for count in range(1, 6):
        encoder = sum(layer < 4 for layer in removed[:count])
        assert 4 - encoder >= 3 - (count - encoder)
    said = "with 2 blocks in its encoder and 3 blocks in its decoder, model cannot generate in transformers"
    assert said in str(search.why_not((1, 2)))
    assert "at least one of 3 layers of the decoder must be kept" in str(search.why_not((4, 5, 6)))


@pytest.mark.parametrize("stack", ["decoder", "encoder", "both"])
def test_a_model_that_would_not_generate_is_refused_before_the_work(stack: str, place: Path) -> None:
    """A T5 with equal numbers of blocks can lose blocks of the decoder first."""
    from transformers import AutoTokenizer

    model = paired_model("t5")
    del model.encoder.block[3]
    model.config.num_layers = 3
    given = {"text": place / "pairs.jsonl", "tokenizer": AutoTokenizer.from_pretrained(place / "t5")}
    options = {"stack": stack, "effort": "quick", "recover": "none"}
    if stack == "encoder":
        with pytest.raises(CheckpointError, match=r"with 2 blocks in its encoder, .* cannot generate in transformers"):
            dg.shrink(model, remove=1, **given, **options)
    else:
        made = dg.shrink(model, remove=1, **given, **options)
        assert (made.model.config.num_layers, made.model.config.num_decoder_layers) == (3, 2)


def test_a_model_in_memory_takes_pairs(place: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "bart")
    result = dg.shrink(paired_model("bart"), text=place / "pairs.jsonl", tokenizer=tokenizer, remove=1, effort="quick")
    assert result.model.config.decoder_layers == 2
    assert result.model.config.encoder_layers == 4
    with pytest.raises(InputError, match="a model in memory needs its tokenizer"):
        dg.gauge(paired_model("bart"), text=place / "pairs.jsonl")


def _lines(folder: Path, *lines: str) -> list[str]:
    (folder / "p.jsonl").write_text("\n".join(lines))
    return ["--data", str(folder / "p.jsonl")]


_GOOD = '{"source": "w1 w2", "target": "w3"}'
BAD: dict[str, tuple[str, Any, str]] = {
    "no target": (
        "t5",
        lambda f: _lines(f, _GOOD, '{"source": "w1"}'),
        "line 2 of .* lacks source or target",
    ),
    "empty source": (
        "t5",
        lambda f: _lines(f, '{"source": " ", "target": "w1"}'),
        "line 1 of .* lacks source or target",
    ),
    "no JSON": ("t5", lambda f: _lines(f, "w1"), "line 1 of .* is not JSON"),
    "no pairs": ("t5", lambda f: _lines(f, "", ""), "which reads pairs of a source .*p.jsonl has text"),
    "no file": ("t5", lambda _: ["--data", "gone.jsonl"], "cannot read text gone.jsonl: No such file"),
    "text": ("t5", lambda _: [], "which reads pairs of a source and a target; give it .* with --data FILE.jsonl"),
    "decoder": ("llama", lambda f: _lines(f, _GOOD), "which reads text; .* has pairs of a source and a target"),
    "stack": ("t5", lambda f: [*_lines(f, _GOOD), "--stack", "all"], "stack must be one of decoder, encoder"),
    "stack alone": ("t5", lambda _: ["--stack", "encoder"], "--stack is for encoder–decoder models"),
    "bos": ("t5", lambda f: [*_lines(f, _GOOD), "--bos", "no"], "--bos is about text, and .* has pairs of a source"),
}


@pytest.mark.parametrize(("case", "verb"), [*((case, "gauge") for case in BAD), ("no target", "shrink")])
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


def test_too_few_pairs_and_too_many_blocks(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = save_pairs(tmp_path / "few.jsonl", 20)
    with pytest.raises(
        InputError,
        match="has 20 different pairs, and 376 are needed; give more pairs, or use --effort quick, which needs 132",
    ):
        dg.shrink(place / "t5", text=few, remove=1, device="cpu")
    monkeypatch.setattr(
        "depthgauge.checkpoints.weights.described.load_model", lambda *_: pytest.fail("the weights were loaded")
    )
    with pytest.raises(InputError, match="remove must be from 1 to 2 blocks, got 3"):
        dg.shrink(place / "bart", text=place / "pairs.jsonl", remove=3, effort="quick", device="cpu")
