"""Claim: all what-ifs of one kind cost at most L/2 + 3 forward passes, and little memory beyond the cached states.

Every layer of a checkpoint is skipped once (then its attention, then its MLP), prefix states cached. The plain way, a
whole pass for every layer, is timed beside it for a few layers, and both must agree. Peak memory above the loaded model
is held to 1.5 times that of a plain forward pass plus the cached states; each is a process of its own.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from depthgauge.checkpoints.interface import Session, attending
from depthgauge.checkpoints.layers import Stack, changed
from depthgauge.checkpoints.load import Checkpoint, Placement, find, load_config, load_model, wrap
from depthgauge.checkpoints.what_if import KINDS, cross_entropy, layers_of, objective, passes, what_if

MEMORY = 1.5
AGREE = 1e-4
ROUNDS, BESIDE = 3, 4
"""Timings are medians over rounds, each with so many plain passes before and after: other work on the machine is met by
both alike."""


def checkpoint_of(path: str | None) -> Checkpoint:
    """The checkpoint at a path, or a random Llama whose head has the share it has in one of 7 billion weights."""
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
    """The head's weights over those of head and blocks."""
    stack = Stack(checkpoint, Session())
    head = checkpoint.model.get_output_embeddings()
    own = 0 if head is None else sum(p.numel() for p in head.parameters())
    return own / (own + sum(p.numel() for block in stack.blocks for p in block.parameters()))


def tokens_of(checkpoint: Checkpoint, count: int) -> torch.Tensor:
    """Random token ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, int(checkpoint.config.vocab_size), (1, count), generator=generator)


def plainly(stack: Stack, ids: torch.Tensor, kind: str, layer: int) -> torch.Tensor:
    """One what-if by a whole pass."""
    family = stack.checkpoint.family
    assert family is not None
    with ExitStack() as patches:
        if kind == "block":
            patches.enter_context(stack._passing(stack.blocks[layer], None))
        else:
            path = family.attention if kind == "attention" else family.mlp
            patches.enter_context(changed(stack.blocks[layer].get_submodule(path), torch.zeros_like))
        return stack.run(ids)


def timed(checkpoint: Checkpoint, count: int) -> dict[str, Any]:
    """Seconds of a plain pass, of every kind's what-ifs, and of the plain way; whether the two ways agree."""
    ids, L = tokens_of(checkpoint, count), checkpoint.layers
    rows, agree = [], True
    with attending(checkpoint.model) as session:
        stack = Stack(checkpoint, session)
        stack.run(ids)
        for kind in KINDS:
            before = stack.evaluations
            losses = whole_kind(stack, ids, kind)
            evaluations = (stack.evaluations - before) / L
            rounds = [beside(stack, ids, kind) for _ in range(ROUNDS)]
            plain, seconds = (statistics.median(column) for column in zip(*rounds, strict=True))
            ratio = statistics.median(kind_seconds / pass_seconds for pass_seconds, kind_seconds in rounds)
            checked = sorted({0, L // 2, L - 1})
            lost = objective(checkpoint.objective, ids, stack.run(ids))
            slow = 0.0
            for layer in checked:
                took, output = _seconds(lambda kind=kind, layer=layer: plainly(stack, ids, kind, layer))
                slow += took
                agree &= abs(lost(output) - losses[layer]) < AGREE * max(1.0, abs(losses[layer]))
            rows.append(
                {"kind": kind, "seconds": seconds, "passes": ratio, "block_passes": evaluations,
                 "expected_block_passes": passes(kind, L) + 1, "plain_way_passes": slow / len(checked) / plain * L}
            )  # fmt: skip
    return {"plain_seconds": plain, "rows": rows, "agree": agree, "layers": L}


def beside(stack: Stack, ids: torch.Tensor, kind: str) -> tuple[float, float]:
    """Seconds of a plain pass, the mean of several before and after, and of a kind's what-ifs between them."""
    several = [_seconds(lambda: measured_pass(stack, ids))[0] for _ in range(BESIDE)]
    seconds, _ = _seconds(lambda: whole_kind(stack, ids, kind))
    several += [_seconds(lambda: measured_pass(stack, ids))[0] for _ in range(BESIDE)]
    return statistics.mean(several), seconds


def measured_pass(stack: Stack, ids: torch.Tensor) -> float:
    """What there is to know of an intact model: one pass, and its loss where it has one."""
    output = stack.run(ids)
    return cross_entropy(output, ids) if stack.checkpoint.objective == "loss" else 0.0


def whole_kind(stack: Stack, ids: torch.Tensor, kind: str) -> list[float]:
    """Everything one kind needs: the intact pass whose states are kept, then every layer."""
    base = stack.full(ids)
    lost, states = objective(stack.checkpoint.objective, ids, base.output), base.states
    del base
    return [lost(what_if(stack, ids, states, kind, layer)) for layer in layers_of(kind, len(stack))]


def memory(mode: str, checkpoint: Checkpoint, count: int) -> dict[str, int]:
    """Peak bytes above the loaded model, of a plain pass or of one kind's what-ifs, and the bytes of cached states."""
    ids = tokens_of(checkpoint, count)
    with attending(checkpoint.model) as session:
        stack = Stack(checkpoint, session)
        stack.run(ids[:, :8])
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before, states = _status("VmRSS"), 0
        if mode == "plain":
            measured_pass(stack, ids)
        else:
            whole_kind(stack, ids, "attention")
            width = next(checkpoint.model.parameters()).element_size()
            states = (len(stack) + 1) * count * int(checkpoint.config.hidden_size) * width
    return {"peak": _status("VmHWM") - before, "states": states}


def _status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def _seconds(work: Any) -> tuple[float, Any]:
    """Processor seconds, which do not count what else the machine is doing."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def main() -> int:
    """Run, print, save; exit 1 when a claim is not met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a directory or .gguf file; by default a random Llama of 16 layers")
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
        print("refusing to report: suffix passes and whole passes disagree")
        return 1
    L, most = found["layers"], found["layers"] / 2 + 3
    share = head_share(checkpoint)
    print(f"{checkpoint.name}: {L} layers, {options.tokens} tokens, one pass {found['plain_seconds'] * 1e3:.0f} ms, "
          f"{share:.0%} of its weights in the head, which every what-if needs")  # fmt: skip
    print(f"{'what-if':10} {'passes (time)':>14} {'passes (blocks)':>16} {'plain way':>10} {'claim':>7}")
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
        "claim": "what-ifs of a kind cost at most L/2 + 3 passes, and 1.5 times a pass's memory plus states",
        "met": quick and light, "head_share": share, "memory": peaks, "model": checkpoint.describe(),
        "tokens": options.tokens, "threads": options.threads, "python": platform.python_version(),
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if quick and light else 1


def _child(mode: str, options: argparse.Namespace) -> dict[str, int]:
    arguments = ["--memory", mode, "--tokens", str(options.tokens), "--threads", str(options.threads)]
    arguments += ["--checkpoint", options.checkpoint] if options.checkpoint else []
    # Every tensor in pages of its own, so that what is freed is seen to be free.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    sys.exit(main())
