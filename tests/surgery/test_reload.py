"""Written models in a fresh process without depthgauge: they load, compute the same, and generate with a cache."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import check_in_forks
from layered_models import LAYERS, layered_model, output_of, skipping
from safetensors.torch import load_file
from tiny_models import DECODERS, MODELS, cross_entropy, some_families, tokens
from written_models import write_model

from depthgauge.base.errors import InputError, VerificationError
from depthgauge.checkpoints.blocks.model_output import relative_distance
from depthgauge.checkpoints.source.model_files import find, weight_bytes
from depthgauge.checkpoints.weights.families import find_blocks
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.results.shrink_record import ReloadRecord
from depthgauge.surgery import verify
from depthgauge.surgery.extract import extract
from depthgauge.surgery.verify import tolerance_of, verify_reload

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # bfloat16 on some CPUs
KEPT = (0, 3, 5)
# An independent user of the written models: it knows transformers and nothing else. Generation without cache runs the
# whole sequence again for every token.
USER = """
import sys
import torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
torch.set_num_threads(1)
folder, decoders = Path(sys.argv[1]), sys.argv[2].split(",")
ids, found = load_file(folder / "ids.safetensors")["ids"], {}
for path in sorted(p for p in folder.iterdir() if p.is_dir()):
    is_decoder = path.name in decoders
    model = (AutoModelForCausalLM if is_decoder else AutoModel).from_pretrained(path, local_files_only=True).eval()
    found[path.name + ".layers"] = torch.tensor(model.config.num_hidden_layers)
    with torch.no_grad():
        out = model(input_ids=ids)
        found[path.name + ".output"] = (out.logits if is_decoder else out.last_hidden_state).contiguous()
        if not is_decoder:
            continue
        cached = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16,
                                min_new_tokens=16, pad_token_id=0, use_cache=True)
        plain = ids
        for _ in range(16):
            logits = model(input_ids=plain, use_cache=False).logits[:, -1]
            logits[:, model.config.eos_token_id] = -torch.inf
            plain = torch.cat([plain, logits.argmax(-1, keepdim=True)], dim=1)
        found[path.name + ".cached"], found[path.name + ".plain"] = cached, plain
save_file(found, folder / "found.safetensors")
assert "depthgauge" not in sys.modules
"""


@dataclass(frozen=True)
class Written:
    """Shrunk models on disk, what they compute, and what a fresh process found."""

    folder: Path
    models: dict[str, Any]
    expected: dict[str, torch.Tensor]
    found: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The families that were selected, and those that tests without a parameter need."""
    from safetensors.torch import save_file

    parameters = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = {"llama", "gemma3", "bert"} | {one.params["name"] for one in parameters if one and "name" in one.params}
    folder = tmp_path_factory.mktemp("written")
    ids = tokens(13)
    removed = [layer for layer in range(LAYERS) if layer not in KEPT]
    models, expected = {}, {}
    for name in sorted(names):
        dense = layered_model(name, dtype=torch.float32)
        expected[name] = skipping(dense, find_blocks(dense, LAYERS), removed, ids)
        models[name] = extract(wrap(dense), KEPT)
        write_model(models[name], None, None, folder / name, {}, overwrite=False)
    save_file({"ids": ids}, folder / "ids.safetensors")
    subprocess.run([sys.executable, "-I", "-W", "ignore", "-c", USER, str(folder), ",".join(DECODERS)], check=True)
    return Written(folder, models, expected, load_file(folder / "found.safetensors"))


@pytest.mark.parametrize("name", some_families(MODELS))
def test_a_reloaded_model_equals_the_dense_one_with_blocks_skipped(name: str, written: Written) -> None:
    expected, found = written.expected[name], written.found[f"{name}.output"]
    assert (found - expected).abs().max() <= tolerance_of(torch.float32) * expected.abs().max()
    assert int(written.found[f"{name}.layers"]) == len(KEPT)


@pytest.mark.parametrize("name", some_families(DECODERS))
def test_generation_with_cache_equals_generation_without(name: str, written: Written) -> None:
    assert torch.equal(written.found[f"{name}.cached"], written.found[f"{name}.plain"])
    assert written.found[f"{name}.cached"].shape[1] == 13 + 16


# --- verify_reload ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("forked_verification")
def test_an_encoder_is_verified_with_its_states(written: Written) -> None:
    ids, model = tokens(9, batch=3), written.models["bert"]
    dense = output_of(layered_model("bert", dtype=torch.float32), ids)
    reload, outputs = verify_reload(written.folder / "bert", ids, model)
    torch.testing.assert_close(outputs, output_of(model, ids))
    assert float(relative_distance(outputs, dense).min()) > 0.01
    assert reload.generation == "not applicable"


@pytest.mark.usefixtures("forked_verification")
def test_a_configuration_with_other_layers_is_caught(written: Written, tmp_path: Path) -> None:
    """The weights are right; only the kinds of two layers are exchanged, as a wrong index would do."""
    out = tmp_path / "out"
    write_model(written.models["gemma3"], None, None, out, {}, overwrite=False)
    config = json.loads((out / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * 3
    config["layer_types"] = ["full_attention"] * 2 + ["sliding_attention"]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        VerificationError, match="does not compute what the model in memory computes: the outputs differ"
    ):
        verify_reload(out, tokens(13), written.models["gemma3"])


@dataclass(frozen=True)
class Reply:
    """A written decoder and the reply of one process that has read it, to be altered."""

    out: Path
    ids: torch.Tensor
    model: Any
    result: dict[str, Any]
    outputs: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def replied(tmp_path_factory: pytest.TempPathFactory) -> Reply:
    """A decoder in bfloat16, in shards, from a model whose rotary frequencies were cast along with the weights."""
    dense = layered_model("llama", dtype=torch.bfloat16)
    assert dense.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    model = extract(wrap(dense), KEPT)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    out, ids = tmp_path_factory.mktemp("replied") / "out", tokens(20, batch=3)
    write_model(model, None, None, out, {}, overwrite=False, max_shard="10KB")
    found, check = [], verify.FreshProcess.check
    with pytest.MonkeyPatch.context() as patch:
        check_in_forks(patch)
        patch.setattr(verify.FreshProcess, "check", lambda *given: found.append(check(*given)) or found[0])
        verify_reload(out, ids, model, new_tokens=4)
    return Reply(out, ids, model, *found[0])


Alter = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def altered(
    monkeypatch: pytest.MonkeyPatch, replied: Reply, alter: Alter, **keywords: Any
) -> tuple[ReloadRecord, torch.Tensor]:
    result = json.loads(json.dumps(replied.result))
    outputs = {name: value.clone() for name, value in replied.outputs.items()}
    alter(result, outputs)
    process = SimpleNamespace(check=lambda *_: (result, outputs))
    monkeypatch.setattr(verify, "FreshProcess", lambda _: nullcontext(process))
    return verify_reload(replied.out, replied.ids, replied.model, **keywords)


def test_a_decoder_is_verified_with_its_losses(monkeypatch: pytest.MonkeyPatch, replied: Reply) -> None:
    reload, losses = altered(monkeypatch, replied, lambda result, outputs: None)
    assert (reload.layers, reload.difference) == (3, 0.0)
    assert set(replied.result["digests"]) == set(replied.model.state_dict())
    expected = [cross_entropy(output_of(replied.model, window[None]), window[None]) for window in replied.ids]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert reload.generation == "equal with and without cache"
    assert len(replied.result["cached"]) == 4
    assert replied.result["cache_difference"] <= tolerance_of(torch.bfloat16) == 8 * 2**-7


def _flip(result: dict[str, Any], outputs: Any) -> None:
    result["digests"]["lm_head.weight"][2] = "0" * 64


def _cast(result: dict[str, Any], outputs: Any) -> None:
    result["digests"]["lm_head.weight"][0] = "torch.float16"


def _lose(result: dict[str, Any], outputs: Any) -> None:
    del result["digests"]["lm_head.weight"]


def _add(result: dict[str, Any], outputs: Any) -> None:
    result["digests"]["other.weight"] = ["torch.float32", "[2]", "0" * 64]


def _miss(result: dict[str, Any], outputs: Any) -> None:
    result["missing"] = ["model.norm.weight"]


def _unused(result: dict[str, Any], outputs: Any) -> None:
    result["unexpected"] = ["model.layers.7.weight"]


def _layers(result: dict[str, Any], outputs: Any) -> None:
    result["layers"] = [6]


def _output(result: dict[str, Any], outputs: Any) -> None:
    outputs["1"][5, 3] += 0.1 * outputs["1"].abs().max()


def _nan(result: dict[str, Any], outputs: Any) -> None:
    outputs["0"][0, 0] = math.nan


def _cache(result: dict[str, Any], outputs: Any) -> None:
    result["cache_difference"] = 0.1


def _token(result: dict[str, Any], outputs: Any) -> None:
    result["cached"][2], result["gap"] = result["cached"][2] + 1, 0.1


@pytest.mark.parametrize(
    ("alter", "complaint"),
    [
        (_flip, "the tensor lm_head.weight of .* is not the one in memory"),
        (_cast, "the tensor lm_head.weight of .* is not the one in memory"),
        (_lose, "the tensor lm_head.weight of .* is not the one in memory"),
        (_add, "the tensor other.weight of .* is not the one in memory"),
        (_miss, "1 are missing and 0 are not used, such as model.norm.weight"),
        (_unused, "0 are missing and 1 are not used, such as model.layers.7.weight"),
        (_layers, r"has the wrong layers after loading: \[6\] instead of \[3\]"),
        (_output, "the outputs differ by 0.1"),
        (_nan, "the outputs differ by nan"),
        (_cache, "generates other text with the key–value cache than without it: the logits differ by 0.1"),
        (_token, "generates other text with the key–value cache than without it"),
    ],
)
def test_every_difference_is_an_error(
    alter: Alter, complaint: str, monkeypatch: pytest.MonkeyPatch, replied: Reply
) -> None:
    with pytest.raises(VerificationError, match=complaint):
        altered(monkeypatch, replied, alter)


@pytest.mark.parametrize(("largest", "is_accepted"), [(0.06, True), (0.04, False)])
def test_the_source_model_is_measured_on_several_prompts(
    largest: float, is_accepted: bool, monkeypatch: pytest.MonkeyPatch, replied: Reply
) -> None:
    """A difference of 0.1 is accepted if the source has more than half of it on any of its prompts."""
    seen: list[list[int]] = []

    def measured(model: Any, prompt: dict[str, torch.Tensor], new_tokens: int) -> dict[str, float]:
        seen.append(prompt["input_ids"][0].tolist())
        return {"cache_difference": largest if len(seen) == 2 else 1e-3}

    monkeypatch.setattr(verify, "generations", measured)
    with nullcontext() if is_accepted else pytest.raises(VerificationError, match=r"differ by 0\.1"):
        altered(monkeypatch, replied, _cache, like=wrap(replied.model))
    assert seen == replied.ids.tolist()


def test_two_tokens_with_equal_logits_are_accepted_and_said(monkeypatch: pytest.MonkeyPatch, replied: Reply) -> None:
    def tie(result: dict[str, Any], outputs: Any) -> None:
        result["cached"][2], result["gap"] = result["cached"][2] + 1, 1e-3

    reload, _ = altered(monkeypatch, replied, tie)
    assert reload.generation.startswith(
        "generation with and without cache agrees for 2 tokens; then two tokens have logits"
    )


def test_a_process_that_fails_is_reported(written: Written, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verify.sys, "executable", "/bin/false")
    with pytest.raises(VerificationError, match=r"a fresh process cannot run .*llama: exit code 1"):
        verify_reload(written.folder / "llama", tokens(13), written.models["llama"])
    with pytest.raises(InputError, match="at least one window must be compared"):
        verify_reload(written.folder / "llama", tokens(13)[:0], written.models["llama"])


def test_weight_bytes_are_those_of_the_files(written: Written) -> None:
    folder = written.folder / "llama"
    assert weight_bytes(find(folder)) == (folder / "model.safetensors").stat().st_size
