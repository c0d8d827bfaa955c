"""Write a tiny GGUF file: a random Llama or Qwen2 decoder with a byte-level tokenizer and chosen metadata."""

from pathlib import Path

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
    path: Path, *, add_bos: bool | None, family: str = "llama", layers: int = 3, seed: int = 0, most: int = 0
) -> None:
    """Write the file.

    Args:
        path: the file to write.
        add_bos: the value of `tokenizer.ggml.add_bos_token`; None leaves the key out.
        family: `llama` or `qwen2`.
        layers: number of blocks.
        seed: seed of the weights.
        most: largest number of tensors in one file; if it is not 0, there are several files `NAME-00001-of-….gguf`.
    """
    import gguf

    dim, heads, kv_heads, hidden = 32, 4, 2, 64
    writer = gguf.GGUFWriter(path, family, split_max_tensors=most)
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(dim)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
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
        writer.add_tensor(name, (scale * torch.randn(*shape, generator=generator)).numpy())

    def ones(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, dtype=np.float32))

    key = dim // heads * kv_heads
    add("token_embd.weight", 259, dim, scale=1.0)
    add("output.weight", 259, dim)
    ones("output_norm.weight", dim)
    for k in range(layers):
        ones(f"blk.{k}.attn_norm.weight", dim)
        ones(f"blk.{k}.ffn_norm.weight", dim)
        for part, out, into in (("attn_q", dim, dim), ("attn_k", key, dim), ("attn_v", key, dim),
                                ("attn_output", dim, dim), ("ffn_gate", hidden, dim), ("ffn_up", hidden, dim),
                                ("ffn_down", dim, hidden)):  # fmt: skip
            add(f"blk.{k}.{part}.weight", out, into)
        if family == "qwen2":
            for part, size in (("attn_q", dim), ("attn_k", key), ("attn_v", key)):
                add(f"blk.{k}.{part}.bias", size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
