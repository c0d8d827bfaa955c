"""Time and memory of `gauge` and `shrink` on models of several billion parameters.

    python benchmarks/scale.py --work /scratch --out scale.json [--rows resident,gauge] [--shape 7b]

The models have random weights and the shapes of published ones, so these rows show time and memory, not quality. The
checkpoint is made once in `--work`. Every row is a command in a process of its own, as a user types it; its peak of GPU
memory is what torch reserved, its peak of RAM what the process held apart from files that it mapped.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SHAPES = {
    "tiny": {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
             "vocab_size": 512},
    "1.5b": {"num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 32000},
    "7b": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
           "vocab_size": 32000},
    "70b": {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 32000},
}  # fmt: skip
TEXT = ("--force", "--text", "TEXT", "--out", "OUT")
QUICK = ("shrink", "MODEL", "--remove", "25%", "--effort", "quick", *TEXT)
ROWS = {"resident": QUICK, "stream": (*QUICK, "--stream"), "gauge": ("gauge", "MODEL", *TEXT)}
LIMITS = {"stream": 24 * 10**9}
"""Rows in which only so many bytes of GPU memory are left to the command; the rest is taken before it starts."""
WATCHED = """
import json, sys, threading, time, torch
from depthgauge.cli.main import main

def anonymous():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(lines["RssAnon"].split()[0]) * 1024

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.1)

limit, taken, peak = int(sys.argv[1]), 0, [0]
if limit and torch.cuda.is_available():
    taken = max(0, torch.cuda.mem_get_info()[0] - limit)
    rest = torch.empty(taken, dtype=torch.uint8, device="cuda")
threading.Thread(target=watch, daemon=True).start()
began = time.perf_counter()
try:
    sys.argv = ["depthgauge", *sys.argv[2:]]
    code = main()
except SystemExit as ended:
    code = ended.code
found = {"code": code or 0, "seconds": time.perf_counter() - began, "ram": peak[0]}
found["gpu"] = torch.cuda.max_memory_reserved() - taken if torch.cuda.is_available() else 0
open("SEEN", "w").write(json.dumps(found))
"""


def make_model(shape: str, folder: Path, device: str) -> None:
    """Write a checkpoint with random weights in bfloat16, and a tokenizer of bytes."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=4096, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=device)
    for name, weight in model.named_parameters():
        torch.nn.init.ones_(weight) if "norm" in name else torch.nn.init.normal_(weight, std=0.02)
    for name, buffer in LlamaForCausalLM(LlamaConfig(**(SHAPES[shape] | {"num_hidden_layers": 0}))).named_buffers():
        model.get_buffer(name).copy_(buffer)
    model.save_pretrained(folder, max_shard_size="2GB")
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: k for k, one in enumerate(bytes_)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def measure(row: str, model: Path, text: Path, work: Path) -> dict[str, Any]:
    """Run one row; return its seconds, peaks of memory and exit code."""
    out, seen = work / f"{row}.out", work / "seen.json"
    places = {"MODEL": model, "TEXT": text, "OUT": out.with_suffix(".json") if row == "gauge" else out}
    command = [str(places.get(part, part)) for part in ROWS[row]]
    began = time.perf_counter()
    program = WATCHED.replace("SEEN", str(seen))
    code = subprocess.run([sys.executable, "-c", program, str(LIMITS.get(row, 0)), *command]).returncode
    found = json.loads(seen.read_text("utf-8")) if seen.exists() else {"code": code}
    seen.unlink(missing_ok=True)
    if code or found["code"]:
        raise RuntimeError(f"{row} ended with exit code {code or found['code']}")
    return found | {"row": row, "whole": time.perf_counter() - began}


def main() -> int:
    """Parse the command line, make the model, run the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("results/scale"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model = options.work / options.shape
    if not (model / "config.json").exists():
        make_model(options.shape, model, "cuda" if torch.cuda.is_available() else "cpu")
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    found = []
    for row in options.rows.split(","):
        one = measure(row, model, options.text, options.work) | {"shape": options.shape, "weights": weights}
        found.append(one)
        share = one["gpu"] / weights
        print(
            f"{row}: {one['whole']:.0f} s, GPU {one['gpu'] / 1e9:.1f} GB ({share:.2f} of the weights), "
            f"RAM {one['ram'] / 1e9:.1f} GB",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
