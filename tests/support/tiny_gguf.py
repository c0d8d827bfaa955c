"""Write a tiny GGUF file: a random Llama, Qwen2 or Gemma 3 decoder with a byte-level tokenizer and chosen metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

BOS, EOS = 257, 258


def byte_tokens() -> list[str]:
    """Return the 256 byte symbols of GPT-2's byte-level tokenizer, then `ab`, <s> and </s>."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, extra = {}, 0
    for byte in range(256):
        if byte in printable:
            symbols[byte] = chr(byte)
        else:
            symbols[byte] = chr(256 + extra)
            extra += 1
    return [*(symbols[byte] for byte in range(256)), "ab", "<s>", "</s>"]


def write_gguf(
    path: Path,
    *,
    add_bos: bool | None,
    family: str = "llama",
    layers: int = 3,
    seed: int = 0,
    most: int = 0,
    hidden: int = 64,
    types: Mapping[str, str] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write the file.

    Args:
        path: the file to write.
        add_bos: the value of `tokenizer.ggml.add_bos_token`; None leaves the key out.
        family: `llama`, `qwen2` or `gemma3`.
        layers: number of blocks.
        seed: seed of the weights.
        most: largest number of tensors in one file; if it is not 0, there are several files `NAME-00001-of-….gguf`.
        hidden: width of the MLP.
        types: part of a block, such as `ffn_down` → type of its matrices; float32 by default.
        fields: further metadata, or other values for keys of the architecture, after its name.
    """
    import gguf

    dim, heads, kv_heads = 32, 4, 2
    width = (
        256 if family == "gemma3" else dim // heads
    )  # transformers has one scale of the scores for all Gemma 3 files
    writer = gguf.GGUFWriter(path, family, split_max_tensors=most)
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(dim)
    given = {"feed_forward_length": hidden, "attention.head_count_kv": kv_heads} | dict(fields or {})
    for key, value in given.items():
        put = writer.add_array if isinstance(value, list) else writer.add_uint32
        put(f"{family}.{key}" if not key.startswith("split.") else key, value)
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    if family == "gemma3":
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_sliding_window(8)
    else:
        writer.add_rope_dimension_count(dim // heads)
    writer.add_vocab_size(259)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(byte_tokens())
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    generator = torch.Generator().manual_seed(seed)

    def add(name: str, *shape: int, scale: float = 0.3) -> None:
        values = (scale * torch.randn(*shape, generator=generator)).numpy()
        part = name.removesuffix(".weight").split(".")[2:]  # empty outside the blocks; a bias has one more
        kind = gguf.GGMLQuantizationType[(types or {}).get(".".join(part), "F32")]
        data = k_quant_bytes(*shape, seed) if kind.name == "Q4_K" else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, dtype=np.float32))

    query, key = width * heads, width * kv_heads
    add("token_embd.weight", 259, dim, scale=0.2 if family == "gemma3" else 1.0)
    if family != "gemma3":
        add("output.weight", 259, dim)
    ones("output_norm.weight", dim)
    for k in range(layers):
        ones(f"blk.{k}.attn_norm.weight", dim)
        ones(f"blk.{k}.ffn_norm.weight", dim)
        if family == "gemma3":
            for part, size in (("attn_q_norm", width), ("attn_k_norm", width),
                               ("post_attention_norm", dim), ("post_ffw_norm", dim)):  # fmt: skip
                ones(f"blk.{k}.{part}.weight", size)
        for part, out, into in (("attn_q", query, dim), ("attn_k", key, dim), ("attn_v", key, dim),
                                ("attn_output", dim, query), ("ffn_gate", hidden, dim), ("ffn_up", hidden, dim),
                                ("ffn_down", dim, hidden)):  # fmt: skip
            add(f"blk.{k}.{part}.weight", out, into)
        if family == "qwen2":
            for part, size in (("attn_q", query), ("attn_k", key), ("attn_v", key)):
                add(f"blk.{k}.{part}.bias", size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def k_quant_bytes(rows: int, columns: int, seed: int) -> np.ndarray:
    """Return random weights of the type Q4_K, which gguf-py cannot write: two scales, then smaller scales and codes."""
    made = np.random.default_rng(seed).integers(0, 256, (rows, columns // 256, 144), dtype=np.uint8)
    made[..., :4] = np.array([0.001, 0.007], dtype=np.float16).view(np.uint8)
    return made.reshape(rows, -1)
