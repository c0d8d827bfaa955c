"""`shrink` from end to end on tiny checkpoints."""

import json
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from forked import exit_code, forked
from safetensors.torch import load_file, save_file
from tiny_checkpoints import text_of
from tiny_shrinks import LAYERS, quick, save

from depthgauge.base.errors import InputError, InterruptedRunError
from depthgauge.base.journal import journal_folder
from depthgauge.checkpoints.source.library import quiet
from depthgauge.results.shrink_record import ShrinkOptions, make_shrink_options
from depthgauge.workflows.shrink import ShrinkResult, plan_shrink, shrink

pytestmark = pytest.mark.usefixtures("forked_verification")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(text_of(4000))
    return path


@pytest.fixture(scope="module")
def removed_two(llama: Path, text: Path) -> ShrinkResult:
    return quick(llama, text, remove=2)


@pytest.fixture(scope="module")
def removed_three(llama: Path, text: Path) -> ShrinkResult:
    return quick(llama, text, remove=3)


@pytest.fixture(scope="module")
def limited(llama: Path, text: Path) -> ShrinkResult:
    """The result of a limit that all sizes keep, so that three blocks are removed."""
    return quick(llama, text, max_increase=50.0)


def test_the_written_model_is_the_one_described(tmp_path: Path, text: Path) -> None:
    """A bfloat16 checkpoint: the dtype is kept, and the documents hold what a fresh process measured."""
    source = save(tmp_path / "model", "llama", torch.bfloat16)
    out = tmp_path / "out"
    messages: list[str] = []
    result = quick(source, text, remove="50%", out=out, message=messages.append)
    needed = (
        r"it fits: .* of memory \(weights .*, states .*, training .*\), and .* are free; .* on disk, and .* are free"
    )
    assert re.fullmatch(needed, messages[0])
    assert messages[-1] == f"model written to {out}"
    record = json.loads((out / "depthgauge.json").read_text())
    assert record == result.to_json()
    assert {"loading", "search", "writing", "check in a new process"} <= {*record["durations"]}
    assert record["layers_before"] == 4
    assert record["layers_after"] == 2 == json.loads((out / "config.json").read_text())["num_hidden_layers"]
    weights = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert record["reload"]["layers"] == 2
    assert record["loss"]["shrunk"] == pytest.approx(record["texts"][0]["shrunk"])
    assert record["texts"][0]["increase"] == pytest.approx(record["loss"]["shrunk"] - record["loss"]["dense"])
    assert {one["kind"] for one in record["texts"]} == {"text", "sampled", "built-in"}
    assert record["guarantee"]["quantile"]["increase"] >= record["texts"][0]["increase"]
    windows = [one["windows"] for one in record["texts"] if one["kind"] == "text"]
    assert [record["guarantee"]["quantile"]["windows"]] == windows
    assert record["parameters"]["after"] < record["parameters"]["before"]
    card = (out / "README.md").read_text()
    assert record["guarantee"]["assumption"] in card
    assert str(tmp_path) not in card
    assert "base_model" not in card
    assert not journal_folder(out).exists()


def test_a_plan_gives_the_same_weights(tmp_path: Path, llama: Path, text: Path, removed_two: ShrinkResult) -> None:
    plan = plan_shrink(llama, window=16, effort="quick", text=text, remove=2)
    (tmp_path / "plan.json").write_text(plan.dump())
    direct, followed = removed_two, shrink(llama, remove=tmp_path / "plan.json")
    assert followed.record.removed == direct.record.removed == plan.removed
    ours, theirs = direct.model.state_dict(), followed.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert followed.record.loss == direct.record.loss
    with pytest.raises(InputError, match=r"is the name of a plan, which plan_shrink\(\) writes"):
        quick(llama, text, remove=2, out=tmp_path / "other.json")


def test_a_plan_is_refused_for_other_weights(tmp_path: Path, llama: Path, text: Path) -> None:
    plan = plan_shrink(llama, window=16, effort="quick", text=text, remove=1, recover="none")
    other = save(tmp_path / "other", "llama")
    weights = load_file(other / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 1}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="other weights"):
        shrink(other, plan=plan)
    with pytest.raises(InputError, match=r"--remove cannot be combined with a plan"):
        shrink(llama, plan=plan, remove=2)


def test_no_repair_changes_no_weight(tmp_path: Path, llama: Path, text: Path) -> None:
    result = quick(llama, text, remove=2, recover="none")
    assert not result.record.repaired
    dense = load_file(llama / "model.safetensors")
    kept = [layer for layer in range(LAYERS) if layer not in result.record.removed]
    for name, tensor in result.model.state_dict().items():
        parts = name.split(".")
        if "layers" in parts:
            place = parts.index("layers") + 1
            parts[place] = str(kept[int(parts[place])])
        if ".".join(parts) in dense:
            assert torch.equal(tensor, dense[".".join(parts)])


def test_a_limit_is_kept_on_the_certify_windows(llama: Path, text: Path, limited: ShrinkResult) -> None:
    assert limited.record.layers_after == 1
    assert limited.record.guarantee is not None
    assert limited.record.guarantee.quantile.increase == 50.0
    assert [one.passed for one in limited.record.guarantee.tested] == [True] * 3
    strict = quick(llama, text, max_increase=1e-9)
    assert strict.model is None
    assert strict.record.removed == ()
    assert strict.record.guarantee is not None
    assert [one.passed for one in strict.record.guarantee.tested] == [False]
    with pytest.raises(InputError, match="no model to write"):
        strict.save("nowhere")


def test_the_dense_loss_of_a_limit_is_that_of_the_source(limited: ShrinkResult, removed_three: ShrinkResult) -> None:
    """The repair changes layers of the model in memory, which must not change what the result is compared with."""
    assert any(stage.kept for stage in limited.record.stages)
    assert removed_three.plan.calibration.sha256 == limited.plan.calibration.sha256
    assert limited.record.loss.dense == removed_three.record.loss.dense


def test_a_plan_of_a_limited_run_counts_the_sizes_that_were_tested(
    llama: Path, limited: ShrinkResult, removed_three: ShrinkResult
) -> None:
    """The certify windows chose the size, so a run that follows its plan has a bound at a higher confidence."""
    followed, once = shrink(llama, plan=limited.plan).record, removed_three.record
    assert followed.removed == once.removed
    assert followed.guarantee is not None
    assert once.guarantee is not None
    assert followed.guarantee.limit is None
    assert followed.guarantee.quantile.increase is None  # 60 windows are too few for this confidence
    assert any("3 sizes may have been measured on these certify windows" in note for note in followed.notes)
    assert once.guarantee.quantile.increase is not None


def test_half_precision_is_certified_as_it_is_reported(llama: Path, text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(llama).save_pretrained(half)
    limited = quick(half, text, max_increase=50.0)
    assert limited.model.dtype == torch.bfloat16
    (last,) = (one for one in limited.record.guarantee.tested if one.removed == len(limited.record.removed))
    certifier = limited.certifier
    assert last.bound == pytest.approx(certifier.bound(certifier.measure(limited.model)).increase, rel=1e-9)


def test_another_text_is_not_mixed_into_a_resumed_run(llama: Path, text: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text(text.read_text())

    def interrupt(done: int, total: int, label: str) -> None:
        if label.startswith("removal 2"):
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(InterruptedRunError, match="run the same command again"):
        quick(llama, own, remove=2, out=out, progress=interrupt)
    words = own.read_text().split()
    own.write_text(" ".join(words[7:] + words[:7]))
    with pytest.raises(InputError, match="was started with digest of the calibration windows"):
        quick(llama, own, remove=2, out=out)
    (out.with_name("out.partial") / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"mine\.txt was not left there by an interrupted run"):
        quick(llama, own, remove=2, out=out, overwrite=True)
    assert (out.with_name("out.partial") / "mine.txt").read_text() == "mine"


def test_a_plan_is_refused_for_another_model_in_memory(llama: Path, text: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer, model = AutoTokenizer.from_pretrained(llama), AutoModelForCausalLM.from_pretrained(llama)
    plan = plan_shrink(model, tokenizer=tokenizer, window=16, effort="quick", text=text, remove=1)
    config = model.config.__class__.from_dict(model.config.to_dict() | {"num_hidden_layers": 2, "layer_types": None})
    with pytest.raises(InputError, match="of 4 layers, and this is a llama model of 2 layers"):
        shrink(LlamaForCausalLM(config), tokenizer=tokenizer, plan=plan)


def test_the_dtype_of_the_files_is_kept_if_the_config_names_none(llama: Path, text: Path, tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama", torch.float16)
    config = json.loads((source / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    (source / "config.json").write_text(json.dumps(config))
    assert quick(source, text, remove=1).model.dtype == torch.float16


def test_a_bare_decoder_is_measured_by_its_states(text: Path, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    source = save(tmp_path / "llama", "llama")
    bare, tokenizer = AutoModel.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    result = quick(bare, text, remove=LAYERS - 1, tokenizer=tokenizer)
    assert repr(result).endswith(f"{LAYERS} → 1 layer)")
    assert (result.record.objective, result.record.layers_after) == ("states", 1)
    assert type(result.model) is type(bare)


def test_weights_that_are_loaded_on_demand_are_not_repaired(llama: Path, text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    places: dict[str, str] = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    places |= {f"model.layers.{layer}": "disk" if layer % 2 else "cpu" for layer in range(LAYERS)}
    model = AutoModelForCausalLM.from_pretrained(llama, device_map=places, offload_folder=tmp_path / "offload")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    with pytest.raises(InputError, match="cannot be repaired; use more devices, or --recover none"):
        quick(model, text, remove=1, tokenizer=tokenizer)
    assert quick(model, text, remove=1, tokenizer=tokenizer, recover="none").record.layers_after == LAYERS - 1


def test_streamed_weights_need_a_text_only_where_text_would_be_sampled() -> None:
    ShrinkOptions(remove="1", text=("photos",), device="stream").check()
    ShrinkOptions(remove="1", text=("corpus.txt",), device="stream").check()
    with pytest.raises(InputError, match="give --text, or leave --device stream out"):
        ShrinkOptions(remove="1", device="stream").check()


def test_a_share_of_samples_needs_a_text(llama: Path) -> None:
    with pytest.raises(InputError, match="give a text, or leave --sampled out"):
        quick(llama, None, remove=1, sampled=0.3)
    with pytest.raises(InputError, match="a share from 0 to 1"):
        quick(llama, None, remove=1, sampled=7.0)


def test_without_text_the_samples_are_used(llama: Path) -> None:
    record = quick(llama, None, remove=1).record
    assert record.guarantee is not None
    assert record.guarantee.about == "sampled"
    assert {source.kind for source in record.plan.calibration.sources} == {"sampled", "built-in"}


def test_a_model_in_memory_is_left_as_it_was(llama: Path, text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(llama)
        tokenizer = AutoTokenizer.from_pretrained(llama)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = quick(model, text, remove=1, tokenizer=tokenizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    record = result.save(tmp_path / "out")
    assert record.out == str(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    with pytest.raises(InputError, match="needs its tokenizer"):
        quick(model, text, remove=1)


BAD = {
    "more than there is": ({"remove": 4}, "remove must be from 1 to 3 blocks, got 4"),
    "none": ({"remove": 0}, "remove must be a number of blocks from 1 on"),
    "not a number": ({"remove": "some"}, "a number of blocks from 1 on, or a share of them below 100%"),
    "no size": ({}, "say how much to remove"),
    "two sizes": ({"remove": 1, "max_increase": 0.1}, "exactly one of .*, got --remove and --max-increase"),
    "ranges": ({"remove_layers": "3-1"}, "is not a block or an increasing range"),
    "layers": ({"remove_layers": "1,4"}, "remove-layers: 4 is not a block"),
    "all layers": ({"remove_layers": "0-3"}, "names all 4 blocks"),
    "keep and remove": ({"remove_layers": "1", "keep": "2"}, "nothing for --keep"),
    "kept": ({"remove": 3, "keep": "0,1"}, "--keep leaves 2 of 4"),
    "sizes": ({"remove": "1;2"}, "remove must be a number of blocks"),
    "one size twice": ({"remove": "1,25%"}, "remove: 1 and 25% are 1 of .*; leave one of them out"),
    "bytes": ({"max_bytes": "much"}, "max-bytes must be a size"),
    "few bytes": ({"max_bytes": "1kB"}, "max-bytes 1 kB is too small"),
    "negative limit": ({"max_increase": -1.0}, "max-increase must be a positive number"),
    "confidence": ({"remove": 1, "confidence": 2.0}, "confidence must be a number"),
    "effort": ({"remove": 1, "effort": "huge"}, "effort must be one of quick, default, high"),
    "removed options": ({"remove": 1, "objective": "kl"}, "option of shrink must be one of"),
    "recovery": ({"remove": 1, "recover": "much"}, "a time such as 10min, auto, off or none, got 'much'"),
    "general": ({"remove": 1, "general": "none", "recover": "off"}, "leave one out"),
    "option": ({"remove": 1, "sample": 3}, "did you mean 'sampled'"),
    "window": ({"remove": 1, "window": 1000}, "window must be at most"),
}


TOO_MANY = {
    "a number": ({"remove": 4}, "remove must be from 1 to 3 blocks, got 4; .* has 4 blocks"),
    "sizes": ({"remove": "1,4"}, "remove must be from 1 to 3 blocks, got 4"),
    "blocks": ({"remove_layers": "1,4"}, "remove-layers: 4 is not a block"),
    "all blocks": ({"remove_layers": "0-3"}, "names all 4 blocks"),
    "what is kept": ({"remove": 1, "keep": "4"}, "keep: 4 is not a block"),
    "too much is kept": ({"remove": 3, "keep": "0,1"}, "3 blocks cannot be removed from .*: --keep leaves 2 of 4"),
    "sizes and too much kept": ({"remove": "1,3", "keep": "0,1"}, "--keep leaves 2 of 4"),
    "everything is kept": ({"max_increase": 0.1, "keep": "0-3"}, "1 block cannot be removed from .*: --keep leaves 0"),
    "few bytes": ({"max_bytes": "1kB"}, "max-bytes 1 kB is too small"),
    "many bytes": ({"max_bytes": "1GB"}, "max-bytes 1 GB removes nothing, because .*; give a smaller size"),
}


@pytest.mark.parametrize("case", TOO_MANY)
def test_numbers_of_blocks_are_checked_before_the_weights(
    case: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text is needed for this either, which would be sampled from the model."""
    changes, words = TOO_MANY[case]
    monkeypatch.setattr(
        "depthgauge.checkpoints.weights.described.load_model", lambda *_: pytest.fail("the weights were loaded")
    )
    with pytest.raises(InputError, match=words):
        quick(llama, None, **changes)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case: str, llama: Path, text: Path) -> None:
    changes, words = BAD[case]
    with pytest.raises(InputError, match=words) as caught:
        quick(llama, text, **changes)
    assert "\n" not in str(caught.value)


def test_an_empty_text_and_a_file_are_refused(llama: Path, tmp_path: Path, text: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="tokens"):
        quick(llama, tmp_path / "empty.txt", remove=1)
    with pytest.raises(InputError, match=r"inside the model directory"):
        quick(llama, text, remove=1, out=llama / "out")
    with pytest.raises(InputError, match="is not a checkpoint"):
        quick(text, text, remove=1)


def test_an_encoder_has_no_loss_to_limit(tmp_path: Path, text: Path) -> None:
    source = save(tmp_path / "model", "bert")
    with pytest.raises(InputError, match=r"--max-increase limits the loss.*encoder"):
        quick(source, text, max_increase=0.1)


def test_shares_are_rounded_down() -> None:
    assert ShrinkOptions(remove="25%").counts(30, "m") == {7: "25%"}
    assert {*ShrinkOptions(remove="1%").counts(30, "m"), *ShrinkOptions(remove="10%").counts(4, "m")} == {1}
    with pytest.raises(InputError, match="at least one must stay"):
        ShrinkOptions(remove="30").counts(30, "m")
    with pytest.raises(InputError, match="a share of them below 100%"):
        ShrinkOptions(remove="100%").counts(30, "m")
    with pytest.raises(InputError, match=r"remove must be from 1 to 1 block, got 2; m has 2 blocks"):
        ShrinkOptions(remove="2").counts(2, "m")
    with pytest.raises(InputError, match=r"m has one block, .* no block can be removed"):
        ShrinkOptions(remove="1").counts(1, "m")


@pytest.mark.parametrize("layers", [3, 4, 12, 30, 49])
def test_a_share_may_be_a_number_between_0_and_1(layers: int) -> None:
    for count in range(1, layers):
        remove = make_shrink_options(None, {"remove": count / layers}).remove
        assert remove is not None
        assert remove.endswith("%")
        assert [*ShrinkOptions(remove=remove).counts(layers, "m")] == [count]
    assert make_shrink_options(None, {"remove": 0.25}).remove == "25%"
    assert make_shrink_options(None, {"remove": torch.tensor(1e-9).item()}).remove == "0.0000001%"
    for wrong in (0.0, 1.0, 2.5, -0.25, float("nan"), True, [True]):
        with pytest.raises(InputError, match=r"remove must be a number of blocks or a share.*write remove=7 for 7"):
            make_shrink_options(None, {"remove": wrong})


def test_options_are_a_record() -> None:
    assert ShrinkOptions(remove="7").given() == {"remove": "7"}


def kill_at(phase: str, run: Callable[..., ShrinkResult]) -> None:
    """Run in a forked process, which kills itself when progress names the phase. Nothing can clean up after that."""

    def progress(done: int, total: int, label: str) -> None:
        if phase in label:
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(forked(partial(run, progress=progress))) == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.parametrize("phase", ["removal 2", "recovery", "fresh process"])
def test_a_killed_run_is_resumed_with_the_same_plan(
    phase: str, llama: Path, text: Path, removed_two: ShrinkResult, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_at(phase, partial(quick, llama, text, remove=2, out=out))
    assert not out.exists()
    resumed = quick(llama, text, remove=2, out=out)
    assert resumed.plan.removed == removed_two.plan.removed
    ours, theirs = removed_two.model.state_dict(), load_file(out / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
