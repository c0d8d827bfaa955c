"""The speed of a smaller model relative to its source, measured several times.

    python benchmarks/speed_ratio.py [MODEL [SMALLER]] [--repeats 5] [--remove 3] [--dtype bfloat16]

Claim: of all measurements that settle, the 95 % intervals of prefill overlap each other, those of decode too, and those
of a model and a copy of it contain 1. MODEL and SMALLER are directories or GGUF files. Without SMALLER, the blocks
before the last one are removed; the speed does not depend on which. Without MODEL, it is a Llama with random weights
and the shape of SmolLM2-135M. Progress goes to standard error, and one JSON document to standard output.
"""

import argparse
import copy
import json
import os
import platform
import sys
import time
from typing import Any

import torch

from depthgauge.base.errors import DepthgaugeError
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.load import Placement, load_config, load_model, wrap
from depthgauge.surgery.extract import extract
from depthgauge.surgery.speed import compare_speed

WINDOW = 512
SMOLLM2 = {
    "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def load(path: str | None, placement: Placement) -> Any:
    """Load a model, or make a random one."""
    if path is not None:
        source = find(path)
        return load_model(source, load_config(source, placement), placement).model
    from transformers import LlamaConfig, LlamaForCausalLM

    device = placement.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**SMOLLM2))
    dtype = {"auto": torch.bfloat16 if device == "cuda" else torch.float32}.get(placement.dtype)
    return model.eval().to(dtype or getattr(torch, placement.dtype))


def measure(name: str, before: Any, after: Any) -> dict[str, Any]:
    """Measure once."""
    ids = torch.randint(before.config.get_text_config().vocab_size, (1, WINDOW))
    started = time.perf_counter()
    speed, memory, _ = compare_speed(before, after, ids)
    row = {"what": name, "seconds": time.perf_counter() - started, "load": os.getloadavg()[0]}
    row |= {"speed": speed.to_json(), "memory": memory.to_json()}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def problems(rows: list[dict[str, Any]]) -> list[str]:
    """Return what contradicts the claim."""
    found = []
    for part in ("prefill", "decode"):
        for name in ("smaller", "copy"):
            speeds = [row["speed"] for row in rows if row["what"] == name and row["speed"][part] is not None]
            low = max((one[f"{part}_low"] for one in speeds), default=0)
            high = min((one[f"{part}_high"] for one in speeds), default=2)
            if low > high:
                found.append(f"intervals of {part} of the {name} do not overlap: {low:.4f} > {high:.4f}")
            if name == "copy" and not low <= 1 <= high:
                found.append(f"an interval of {part} of the {name} does not contain 1")
    return found


def main() -> int:
    """Measure, print and return 1 if the claim is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="the source model, and a smaller one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--remove", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    options = parser.parse_args()
    placement = Placement(dtype=options.dtype, device=options.device)
    try:
        before = load((options.models or [None])[0], placement)
        layers = before.config.num_hidden_layers
        kept = [*range(layers - options.remove - 1), layers - 1]
        after = load(options.models[1], placement) if options.models[1:] else extract(wrap(before), kept)
        pairs = {"smaller": after.to(before.device), "copy": copy.deepcopy(before)}
        rows = [measure(name, before, one) for _ in range(options.repeats) for name, one in pairs.items()]
    except DepthgaugeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    is_gpu = before.device.type == "cuda"
    document = {
        "layers": [layers, after.config.num_hidden_layers], "dtype": str(before.dtype),
        "device": torch.cuda.get_device_name() if is_gpu else f"{os.cpu_count()} cores, {platform.machine()}",
        "threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows, "problems": problems(rows),
    }  # fmt: skip
    print(json.dumps(document, indent=1))
    return 1 if document["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
