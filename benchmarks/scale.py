"""Time and memory of `gauge` and `shrink` on models of several billion parameters.

    python benchmarks/scale.py --work /scratch --out scale.json [--rows resident,gauge] [--shape 7b]

The models have random weights and the shapes of published ones, so these rows show time and memory, not quality. The
checkpoint is made once in `--work`. Every row is a command in a process of its own, as a user types it. Its peak of GPU
memory is what all processes took from the device while it ran, its peak of RAM what the process held apart from files
that it mapped.
`--shape 70b` writes four blocks, and `--rows step` measures one removal step on them.
"""

import argparse
import json
import shutil
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
WRITTEN = {"70b": 4}
"""Blocks that are written of models that do not fit on the disk."""
TEXT = ("--allow", "unread", "--text", "TEXT", "--out", "OUT")
QUICK = ("shrink", "MODEL", "--remove", "25%", "--effort", "quick", *TEXT)
RECOVER = ("shrink", "MODEL", "--remove", "8", "--effort", "quick", "--recover", "2M", *TEXT)
STEP = ("shrink", "MODEL", "--remove", "1", "--effort", "quick", "--device", "stream", *TEXT)
ROWS = {
    "resident": QUICK,
    "limited": QUICK,
    "stream": (*QUICK, "--device", "stream"),
    "recover": RECOVER,
    "recover-limited": (*RECOVER, "--recover", "60k"),
    "gauge": ("gauge", "MODEL", *TEXT),
    "gauge-stream": ("gauge", "MODEL", *TEXT, "--device", "stream"),
    "step": STEP,
}
LIMITS = {
    "limited": lambda weights: 1.3 * weights,
    "stream": lambda _: 24e9,
    "recover-limited": lambda _: 48e9,
    "gauge-stream": lambda _: 24e9,
    "step": lambda _: 40e9,
}
"""Rows in which only so many bytes of GPU memory are left to the command; the rest is taken before it starts."""
WATCHED = """
import json, os, sys, threading, time
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # as the command line does, before torch begins
import torch
from depthgauge.cli.main import main

def anonymous():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(lines["RssAnon"].split()[0]) * 1024

def free():
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0

def watch():
    while True:
        peak[:] = max(peak[0], anonymous()), min(peak[1], free())
        time.sleep(0.05)

limit = int(sys.argv[1])
if limit and free() > limit:
    rest = torch.empty(free() - limit, dtype=torch.uint8, device="cuda")
most, peak = free(), [0, free()]
threading.Thread(target=watch, daemon=True).start()
began = time.perf_counter()
try:
    sys.argv = ["depthgauge", *sys.argv[2:]]
    code = main()
except SystemExit as ended:
    code = ended.code
found = {"code": code or 0, "seconds": time.perf_counter() - began, "ram": peak[0], "gpu": most - peak[1]}
open("SEEN", "w").write(json.dumps(found))
"""


def make_model(shape: str, folder: Path, device: str) -> None:
    """Write a checkpoint with random weights in bfloat16, and a tokenizer of bytes."""
    fewer = {"num_hidden_layers": WRITTEN.get(shape, SHAPES[shape]["num_hidden_layers"])}
    config = LlamaConfig(**(SHAPES[shape] | fewer), max_position_embeddings=4096, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=device)
    for name, weight in model.named_parameters():
        torch.nn.init.ones_(weight) if "norm" in name else torch.nn.init.normal_(weight, std=0.02)
    for name, buffer in LlamaForCausalLM(LlamaConfig(**(SHAPES[shape] | {"num_hidden_layers": 0}))).named_buffers():
        model.get_buffer(name).copy_(buffer)
    model.save_pretrained(folder, max_shard_size="2GB")
    del model
    torch.cuda.empty_cache()
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: k for k, one in enumerate(bytes_)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def command_of(row: str, model: Path, text: Path, out: Path) -> list[str]:
    """Return the words of a command."""
    places = {"MODEL": model, "TEXT": text, "OUT": out.with_suffix(".json") if ROWS[row][0] == "gauge" else out}
    return [str(places.get(part, part)) for part in ROWS[row]]


def measure(row: str, model: Path, text: Path, work: Path, weights: int) -> dict[str, Any]:
    """Run one row; return its seconds, peaks of memory and durations."""
    out, seen = work / f"{row}.out", work / "seen.json"
    limit = int(LIMITS.get(row, lambda _: 0)(weights))
    began = time.perf_counter()
    program = WATCHED.replace("SEEN", str(seen))
    command = [sys.executable, "-c", program, str(limit), *command_of(row, model, text, out)]
    code = subprocess.run(command).returncode
    found = json.loads(seen.read_text("utf-8")) if seen.exists() else {"code": code}
    seen.unlink(missing_ok=True)
    if code or found["code"]:
        raise RuntimeError(f"{row} ended with exit code {code or found['code']}")
    record = json.loads((out / "depthgauge.json" if out.is_dir() else out.with_suffix(".json")).read_text("utf-8"))
    known = {name: record.get(name) for name in ("durations", "notes", "stages")}
    shutil.rmtree(out, ignore_errors=True)
    return found | known | {"row": row, "whole": time.perf_counter() - began}


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
        one = measure(row, model, options.text, options.work, weights) | {"shape": options.shape, "weights": weights}
        found.append(one)
        share = one["gpu"] / weights
        print(
            f"{row}: {one['whole']:.0f} s, GPU {one['gpu'] / 1e9:.1f} GB "
            f"({share:.2f} of the weights), RAM {one['ram'] / 1e9:.1f} GB",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
