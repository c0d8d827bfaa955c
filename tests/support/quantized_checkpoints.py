"""Tiny quantized checkpoints, made by hand: FP8 with a scale per matrix, and MXFP4 with a scale per 32 entries."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_checkpoint, save_tokenizer
from tiny_models import DERIVED
from torch import Tensor

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of a 4-bit number; its highest bit is the sign."""


def add_quantization(folder: Path, quantization: dict[str, Any]) -> None:
    """Write a quantization to the config.json of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def save_fp8(folder: Path) -> dict[str, Tensor]:
    """Save a Llama with projections in FP8; return the weights that its files stand for."""
    save_checkpoint(folder, "llama")
    stored, expected = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = expected[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().max() / 448
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
            expected[name] = stored[name].float() * scale
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    add_quantization(folder, FP8)
    return expected


def save_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Save a gpt-oss with experts in MXFP4; return the weights that its files stand for."""
    import transformers

    _, _, settings = DERIVED["gpt_oss"]
    config = transformers.GptOssConfig(**settings | {"hidden_size": 32, "intermediate_size": 32})
    transformers.GptOssForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder, special=False)
    draw, stored, expected = torch.Generator().manual_seed(0), {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = expected[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        codes = torch.randint(16, (experts, outputs, inputs // 32, 32), generator=draw, dtype=torch.uint8)
        exponents = torch.randint(121, 126, (experts, outputs, inputs // 32), generator=draw, dtype=torch.uint8)
        stored[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{name}_scales"] = exponents
        values = FP4[(codes % 8).long()] * (1 - 2 * (codes // 8).float())
        values = values * torch.exp2(exponents.float() - 127)[..., None]
        expected[name] = values.flatten(2).transpose(1, 2)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    add_quantization(folder, {"quant_method": "mxfp4"})
    return expected
