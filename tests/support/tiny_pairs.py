"""Tiny encoder–decoder models, and files of pairs for them."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tiny_checkpoints import WORDS, save_tokenizer

from depthgauge.checkpoints.source.library import quiet

_SPECIAL = {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 2}
# name → (model class, configuration class, settings); both have 4 blocks in the encoder and 3 in the decoder
PAIRED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", _SPECIAL | {
        "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 4, "num_decoder_layers": 3, "num_heads": 4,
        "decoder_start_token_id": 0,
    }),
    "bart": ("BartForConditionalGeneration", "BartConfig", _SPECIAL | {
        "d_model": 16, "encoder_layers": 4, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64,
        "bos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    }),
}  # fmt: skip
KEYS = {
    ("t5", "encoder"): "num_layers", ("t5", "decoder"): "num_decoder_layers",
    ("bart", "encoder"): "encoder_layers", ("bart", "decoder"): "decoder_layers",
}  # fmt: skip


def paired_model(name: str) -> Any:
    """Return an encoder–decoder model with random weights, in evaluation mode."""
    import transformers

    architecture, config, settings = PAIRED[name]
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(getattr(transformers, config)(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(noise * 0.3 if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model


def save_paired(folder: Path, name: str) -> Any:
    """Save a model with a tokenizer that adds special tokens."""
    model = paired_model(name)
    with quiet():
        model.save_pretrained(folder)
    save_tokenizer(folder, special=True)
    return model


def save_pairs(path: Path, count: int) -> Path:
    """Save pairs of different lengths: a target is the end of its source, reversed."""
    draw, lines = random.Random(0), []
    for _ in range(count):
        source = draw.choices(WORDS, k=draw.randint(5, 9))
        target = source[: -draw.randint(3, 6) : -1]
        lines.append(json.dumps({"source": " ".join(source), "target": " ".join(target)}))
    path.write_text("\n".join(lines) + "\n")
    return path
