"""Claim: a what-if on all L layers costs at most L/2 + 3 forward passes, and little memory beyond the states.

The benchmark measures the what-ifs `block`, `attention` and `mlp` on every layer, in one pass over the blocks. For a
few layers it also times the naive method, a complete pass per layer, and checks that both methods agree. Peak memory
above the loaded model must be at most 1.5 times that of a plain forward pass, plus the states of the dense model and
three times those of L edited models; each is measured in a separate process.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from depthgauge.base.progress import silent
from depthgauge.checkpoints.blocks.attention_calls import Session, attending
from depthgauge.checkpoints.blocks.block_runner import BlockRunner, Stack, changed
from depthgauge.checkpoints.blocks.model_output import token_losses, window_losses
from depthgauge.checkpoints.blocks.what_if import DenseStates, layers_of
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_config, load_model, wrap
from depthgauge.results.labels import DEFAULT_WHAT_IFS
from depthgauge.workflows.gauge_checkpoint import what_if_losses

MEMORY = 1.5
AGREE = 1e-4
ROUNDS, PLAIN_PASSES = 3, 4
"""Timings are medians over ROUNDS. Each round times PLAIN_PASSES plain passes before and after the what-ifs, so that
other load on the machine affects both alike."""


def checkpoint_of(path: str | None) -> Checkpoint:
    """Load the checkpoint at a path, or make a random Llama with the share of head weights that a 7B model has."""
    if path is not None:
        source, placement = find(path), Placement(device="cpu")
        return load_model(source, load_config(source, placement), placement)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=1024, max_position_embeddings=1024,
    )  # fmt: skip
    return wrap(LlamaForCausalLM(config), "a random Llama")


def head_share(checkpoint: Checkpoint) -> float:
    """Return the number of weights in the output head, relative to head and blocks together."""
    stack = Stack(checkpoint, Session())
    head = checkpoint.model.get_output_embeddings()
    own = 0 if head is None else sum(p.numel() for p in head.parameters())
    return own / (own + sum(p.numel() for block in stack.blocks for p in block.parameters()))


def tokens_of(checkpoint: Checkpoint, count: int) -> torch.Tensor:
    """Draw random token ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, int(checkpoint.config.vocab_size), (1, count), generator=generator)


def naive(stack: Stack, ids: torch.Tensor, kind: str, layer: int) -> torch.Tensor:
    """Compute one what-if by a complete pass."""
    family = stack.checkpoint.family
    assert family is not None
    with ExitStack() as patches:
        if kind == "block":
            patches.enter_context(stack._passing(layer, None))
        else:
            path = family.attention if kind == "attention" else family.mlp
            patches.enter_context(changed(stack.blocks[layer].get_submodule(path), torch.zeros_like))
        return stack.run(ids)


def timed(checkpoint: Checkpoint, count: int) -> dict[str, Any]:
    """Time a plain pass, every kind of what-if and the naive method, and check that both methods agree."""
    ids, L = tokens_of(checkpoint, count), checkpoint.layers
    rows, agree = [], True
    with attending(checkpoint.model) as session:
        stack = BlockRunner(checkpoint, ids, session)
        stack.run(ids)
        for kind in DEFAULT_WHAT_IFS:
            before = stack.evaluations
            losses = whole_kind(stack, ids, kind)
            evaluations = (stack.evaluations - before) / L
            rounds = [timed_round(stack, ids, kind) for _ in range(ROUNDS)]
            plain, seconds = (statistics.median(column) for column in zip(*rounds, strict=True))
            ratio = statistics.median(kind_seconds / pass_seconds for pass_seconds, kind_seconds in rounds)
            checked = sorted({0, L // 2, L - 1})
            intact, slow = stack.run(ids), 0.0
            own = window_losses(checkpoint.objective, intact, ids, intact)
            for layer in checked:
                took, output = _seconds(lambda kind=kind, layer=layer: naive(stack, ids, kind, layer))
                slow += took
                lost = float(window_losses(checkpoint.objective, output, ids, intact) - own)
                agree &= abs(lost - losses[layer]) < AGREE * max(1.0, abs(losses[layer]))
            rows.append(
                {"kind": kind, "seconds": seconds, "passes": ratio, "block_passes": evaluations,
                 "expected_block_passes": passes(kind, range(L), L) + 1,
                 "plain_way_passes": slow / len(checked) / plain * L}
            )  # fmt: skip
    return {"plain_seconds": plain, "rows": rows, "agree": agree, "layers": L}


def passes(kind: str, on: Sequence[int], layers: int) -> float:
    """Return the cost of a what-if on some of L layers in forward passes, (block evaluations)/L ≤ (L + 1)/2."""
    first_run = {"block": 1, "parallel": 1}.get(kind, 0)
    return sum(layers - layer - first_run for layer in on) / layers


def timed_round(stack: BlockRunner, ids: torch.Tensor, kind: str) -> tuple[float, float]:
    """Return the mean seconds of the plain passes around the what-ifs of a kind, and the seconds of the what-ifs."""
    several = [_seconds(lambda: measured_pass(stack, ids))[0] for _ in range(PLAIN_PASSES)]
    seconds, _ = _seconds(lambda: whole_kind(stack, ids, kind))
    several += [_seconds(lambda: measured_pass(stack, ids))[0] for _ in range(PLAIN_PASSES)]
    return statistics.mean(several), seconds


def measured_pass(stack: Stack, ids: torch.Tensor) -> float:
    """Run the intact model once and return its loss, or 0 for an encoder."""
    output = stack.run(ids)
    return float(token_losses(output, ids).mean()) if stack.checkpoint.objective == "loss" else 0.0


def whole_kind(runner: BlockRunner, ids: torch.Tensor, kind: str) -> list[float]:
    """Run the intact pass that keeps the states, then the what-if on every layer."""
    dense = DenseStates(runner, ids)
    return what_if_losses(dense, kind, layers_of(kind, runner.checkpoint.families), silent)[0]


def memory(mode: str, checkpoint: Checkpoint, count: int) -> dict[str, int]:
    """Return the peak bytes above the loaded model, for a plain pass or one what-if, and the bytes of the states."""
    ids = tokens_of(checkpoint, count)
    with attending(checkpoint.model) as session:
        stack = BlockRunner(checkpoint, ids, session)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before, states = _status("VmRSS"), 0
        if mode == "plain":
            measured_pass(stack, ids)
        else:
            whole_kind(stack, ids, "attention")
            width = next(checkpoint.model.parameters()).element_size()
            states = (4 * len(stack) + 1) * count * int(checkpoint.config.hidden_size) * width
    return {"peak": _status("VmHWM") - before, "states": states}


def _status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _seconds(work: Any) -> tuple[float, Any]:
    """Return processor seconds, which exclude other processes, and the result."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def main() -> int:
    """Run the benchmark, print and save the results; return 1 if a claim is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a directory or .gguf file; by default a random Llama with 16 layers")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/what_if.json"))
    parser.add_argument("--memory", choices=["plain", "what-if"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint = checkpoint_of(options.checkpoint)
    if options.memory:
        print(json.dumps(memory(options.memory, checkpoint, options.tokens)))
        return 0
    found = timed(checkpoint, options.tokens)
    if not found["agree"]:
        print("error: one pass over the blocks and complete passes disagree; no timings are reported")
        return 1
    L, most = found["layers"], found["layers"] / 2 + 3
    share = head_share(checkpoint)
    print(f"{checkpoint.name}: {L} layers, {options.tokens} tokens, one pass {found['plain_seconds'] * 1e3:.0f} ms, "
          f"{share:.0%} of its weights are in the output head, which every what-if computes")  # fmt: skip
    print(f"{'what-if':10} {'passes (time)':>14} {'passes (blocks)':>16} {'naive':>10} {'claim':>7}")
    for row in found["rows"]:
        print(f"{row['kind']:10} {row['passes']:14.1f} {row['block_passes']:16.1f} {row['plain_way_passes']:10.1f} "
              f"{most:7.1f}")  # fmt: skip
    peaks = {mode: _child(mode, options) for mode in ("plain", "what-if")}
    allowed = MEMORY * peaks["plain"]["peak"] + peaks["what-if"]["states"]
    print(f"peak above the model: plain pass {peaks['plain']['peak'] / 1e6:.0f} MB, what-ifs "
          f"{peaks['what-if']['peak'] / 1e6:.0f} MB, of which states {peaks['what-if']['states'] / 1e6:.0f} MB; "
          f"allowed {allowed / 1e6:.0f} MB")  # fmt: skip
    quick = all(row["passes"] <= most and row["block_passes"] <= most for row in found["rows"])
    light = peaks["what-if"]["peak"] <= allowed
    print(f"claim at most L/2 + 3 passes: {'met' if quick else 'NOT MET'}; memory: {'met' if light else 'NOT MET'}")
    record = found | {
        "claim": "a what-if on all layers costs at most L/2 + 3 passes, and 1.5 times a pass's memory plus the states",
        "met": quick and light, "head_share": share, "memory": peaks, "model": checkpoint.describe(),
        "tokens": options.tokens, "threads": options.threads, "python": platform.python_version(),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if quick and light else 1


def _child(mode: str, options: argparse.Namespace) -> dict[str, int]:
    arguments = ["--memory", mode, "--tokens", str(options.tokens), "--threads", str(options.threads)]
    arguments += ["--checkpoint", options.checkpoint] if options.checkpoint else []
    # Every tensor gets its own pages, so that freed memory is returned to the system and the peak is exact.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    sys.exit(main())
