"""Quantized checkpoints: dequantized exactly where transformers can do it, and refused before any weight is read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import add_quantization, save_fp8, save_mxfp4
from tiny_checkpoints import save_checkpoint, text_of
from tiny_shrinks import quick
from torch import Tensor

import depthgauge as dg
from depthgauge.checkpoints.source.hub import resolve
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.weights.load import Placement, load_config, load_model

SAVED = {"fp8": save_fp8, "mxfp4": save_mxfp4}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize("method", SAVED)
def test_weights_are_dequantized(method: str, tmp_path: Path) -> None:
    save: Callable[[Path], dict[str, Tensor]] = SAVED[method]
    expected, placement = save(tmp_path), Placement("float32", "cpu")
    source = resolve(tmp_path)
    found = load_model(source, load_config(source, placement), placement).model.state_dict()
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=0, msg=name)


@pytest.mark.usefixtures("forked_verification")
@pytest.mark.parametrize("method", SAVED)
def test_a_quantized_model_is_gauged_and_shrunk(method: str, tmp_path: Path) -> None:
    SAVED[method](tmp_path / "model")
    (tmp_path / "text.txt").write_text(text_of(4000))
    dg.gauge(tmp_path / "model", text=tmp_path / "text.txt", tokens=64, window=16, what_if="block", allow="unread")
    result = quick(tmp_path / "model", tmp_path / "text.txt", remove=1, out=tmp_path / "smaller", allow="unread")
    assert any(f"are quantized ({method})" in note for note in result.record.notes)
    written = json.loads((tmp_path / "smaller" / "config.json").read_text())
    assert "quantization_config" not in written
    assert written["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        (GPTQ, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"load_in_8bit": True}, "an unnamed method"),
    ],
)
def test_other_methods_are_refused_before_weights_are_read(
    quantization: dict[str, object], named: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, "llama")
    add_quantization(tmp_path, quantization)
    (tmp_path / "model.safetensors").write_bytes(b"is not read")
    with pytest.raises(CheckpointError, match=rf"is quantized with {named}, .*; give the checkpoint that it was made"):
        dg.gauge(tmp_path)
    with pytest.raises(CheckpointError, match=f"is quantized with {named}"):
        dg.shrink(tmp_path, remove=1)
