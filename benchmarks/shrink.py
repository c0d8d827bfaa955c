"""Claim: `shrink` costs less than the published methods of removing blocks, on text it knows and on text it does not.

The mean increase of the loss in nats/token is measured on 48 windows of 512 tokens of each text that nothing was fitted
or selected on. There are several settings: calibrated on all texts, and for each `--source` on this text alone. The
peers are ShortGPT, UIDL and SLEB, each without repair and with four repairs (see shrink_peers.py); all methods read the
same part of each text. Our method is called as a user calls it. The claims, for the best of all peers:

- on every text, in every setting and at every size, the increase is at most that of the best peer
- where at least a fifth of the blocks is removed, the mean increase is at most 0.6 of the best peer's on the texts of
  the calibration, and at most 0.75 of it on the others (0.6 for 7 blocks of SmolLM2-135M)
- on Gemma-3-270m (18 blocks) and SmolLM2-135M (30 blocks) it is at most what `TARGETS` in shrink_claims.py says

The texts are those of the Debian packages fortunes, debian-handbook and bible-kjv-text:

    python benchmarks/shrink.py --make-texts results/texts
    python benchmarks/shrink.py --checkpoint gemma-3-270m --remove 4 --source kjv --text results/texts/*.txt \\
        --recover 2M
    python benchmarks/shrink.py --checkpoint SmolLM2-135M --remove 3 7 11 --source fortunes --text results/texts/*.txt

Without a checkpoint the program runs on a small random Llama and judges nothing.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from shrink_claims import OURS, RECOVERED, Row, claims, finite, show
from shrink_peers import CHOICES, Dense, observe, repairs_of, shrunk_losses
from shrink_texts import divide_texts, windows_of_texts, write_debian_texts, write_random_texts
from torch import Tensor

import depthgauge as dg
from depthgauge.base.errors import DepthgaugeError, InputError
from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.blocks.model_output import token_losses
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_config, load_model, load_tokenizer, wrap
from depthgauge.surgery.student import EFFORT

Losses = dict[str, Float[Tensor, " windows"]]
"""Text → loss of every evaluation window."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What is calibrated on: the name of one text, or `all`; and these texts' files, by name."""

    source: str
    files: Mapping[str, Path]


def ours(
    checkpoint: Checkpoint,
    tokenizer: Any,
    setting: Setting,
    options: Mapping[str, Any],
    evaluation: Mapping[str, Dense],
) -> tuple[dict[int, Losses], dict[str, float]]:
    """Shrink a model as a user does.

    Returns:
        Number of removed blocks → losses of the evaluation windows, and the seconds of each stage.
    """
    made = dg.shrink(checkpoint.model, tokenizer=tokenizer, text=list(map(str, setting.files.values())), **options)
    found = {len(one.record.removed): model_losses(one.model, evaluation) for one in made.sizes}
    return found, made.record.durations | {"total": made.record.seconds}


@torch.no_grad()
def model_losses(model: Any, evaluation: Mapping[str, Dense]) -> Losses:
    """Return the loss of every evaluation window, from the model's own forward pass."""
    found = {}
    for text, dense in evaluation.items():
        parts = []
        for part in dense.ids.split(dense.runner.batches.size):
            ids = part.to(dense.runner.device)
            parts.append(token_losses(model(input_ids=ids, use_cache=False).logits, ids).double().mean(1).cpu())
        found[text] = torch.cat(parts)
    return found


def peers(calibration: Dense, setting: Setting, counts: Sequence[int], evaluation: Mapping[str, Dense]) -> list[Row]:
    """Measure every choice of blocks with every repair that the family of the model allows."""
    rows = []
    for choice, choose in CHOICES.items():
        for count, removed in choose(calibration, counts).items():
            for name, fit in repairs_of(calibration.runner.checkpoint).items():
                repair = fit(calibration, removed)
                losses = {text: shrunk_losses(dense, removed, repair) for text, dense in evaluation.items()}
                method = choice if name == "none" else f"{choice} + {name}"
                rows.append(row_of(setting, method, count, losses, evaluation, removed))
    return rows


def row_of(
    setting: Setting,
    method: str,
    count: int,
    losses: Losses,
    evaluation: Mapping[str, Dense],
    removed: tuple[int, ...] | None = None,
) -> Row:
    """Return the row for the losses of a shrunk model."""
    increase = {text: float((losses[text] - dense.dense_losses).mean()) for text, dense in evaluation.items()}
    return Row(setting.source, tuple(setting.files), method, count, increase, removed)


def random_llama() -> tuple[Checkpoint, Any]:
    """Return a small random Llama with 6 blocks, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({"?": 0} | {f"w{index}": index for index in range(1, 64)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrap(LlamaForCausalLM(config), "a random Llama"), PreTrainedTokenizerFast(tokenizer_object=words)


def prepare(options: argparse.Namespace, folder: Path) -> tuple[Checkpoint, Any, list[Path]]:
    """Return the model, its tokenizer and the files of the texts."""
    if options.checkpoint is None:
        return *random_llama(), write_random_texts(folder)
    if len(options.text) < 2:
        raise InputError(f"at least two texts are needed, got {len(options.text)}; give them with --text")
    source, placement = find(options.checkpoint), Placement(dtype="float32", device=options.device)
    checkpoint = load_model(source, load_config(source, placement), placement)
    return checkpoint, load_tokenizer(source, placement), options.text


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Run the benchmark and return the exit code."""
    tiny, work = options.checkpoint is None, EFFORT[options.effort]
    checkpoint, tokenizer, texts = prepare(options, folder)
    layers, counts = checkpoint.layers, sorted({*options.remove})
    if not 1 <= counts[0] <= counts[-1] <= layers - 2:
        raise InputError(
            f"--remove must name numbers from 1 to {layers - 2} for {checkpoint.name}, got "
            f"{', '.join(map(str, counts))}; SLEB keeps the first and the last block"
        )
    window, evaluated = (16, 4) if tiny else (512, options.evaluation)
    known, unseen = divide_texts(texts, folder)
    for name in options.source:
        if name not in known:
            raise InputError(f"--source must name one of {', '.join(known)}, got {name}")
    cut = {"checkpoint": checkpoint, "tokenizer": tokenizer, "window": window, "seed": options.seed}
    windows = windows_of_texts(unseen, count=evaluated, **cut)
    runner = BlockRunner(checkpoint, next(iter(windows.values()))[:1])
    evaluation = {name: observe(runner, ids) for name, ids in windows.items()}
    rows, seconds = [], {}
    for setting in [Setting("all", known), *(Setting(name, {name: known[name]}) for name in options.source)]:
        if options.only not in (None, setting.source):
            continue
        if not options.no_peers:
            started = time.perf_counter()
            each = -(-(work.fit + work.select) // len(setting.files))
            read = windows_of_texts(setting.files, count=each, **cut)
            rows += peers(observe(runner, torch.cat(list(read.values()))), setting, counts, evaluation)
            seconds[f"{setting.source}, peers"] = {"total": time.perf_counter() - started}
        for method, amount in ((OURS, "off"), (RECOVERED, options.recover)):
            if amount is not None:
                asked = {"remove": counts, "effort": options.effort, "recover": amount, "seed": options.seed}
                asked |= {"window": window, "allow": "unread"} if tiny else {}
                losses, took = ours(checkpoint, tokenizer, setting, asked, evaluation)
                rows += [row_of(setting, method, count, losses[count], evaluation) for count in losses]
                seconds[f"{setting.source}, {method}"] = took
        show([row for row in rows if row.source == setting.source])
    for name, took in seconds.items():
        total = took["total"]
        shares = ", ".join(f"{stage} {100 * part / total:.0f} %" for stage, part in took.items() if stage != "total")
        print(f"{name}: {total:.0f} s" + (f" ({shares})" if shares else ""))
    judged = [] if tiny else claims(rows, layers, options.effort)
    for claim in judged:
        print(f"{'met' if claim.met else 'NOT MET':8} {claim.value:8.4f} ≤ {claim.limit:8.4f}  {claim.text}")
    met = all(claim.met for claim in judged)
    record = {
        "claim": __doc__.splitlines()[0], "met": met if judged else None, "rows": [row.to_json() for row in rows],
        "claims": [
            {"claim": one.text, "value": finite(one.value), "limit": finite(one.limit), "met": one.met}
            for one in judged
        ],
        "name": checkpoint.name, "layers": layers, "effort": options.effort, "recover": options.recover,
        "evaluation_windows": evaluated, "seed": options.seed, "seconds": seconds,
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if met else 1


def main() -> int:
    """Parse the command line; return 1 if a claim is not met and 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a directory or .gguf file; by default a small random Llama")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="text files, at least two")
    parser.add_argument("--make-texts", type=Path, help="write the texts of the Debian packages to a folder and stop")
    parser.add_argument("--remove", type=int, nargs="+", default=[2], help="numbers of blocks to remove")
    parser.add_argument("--source", nargs="*", default=[], help="names of texts that are calibrated on alone")
    parser.add_argument("--only", help="measure one setting alone: all, or the name of a text")
    parser.add_argument("--evaluation", type=int, default=48, help="evaluation windows of each text")
    parser.add_argument("--effort", choices=list(EFFORT), default="default")
    parser.add_argument("--no-peers", action="store_true", help="measure our own method alone")
    parser.add_argument("--recover", help="also measure our method with this much training: 2M tokens, or 10min")
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/shrink.json"))
    options = parser.parse_args()
    try:
        if options.make_texts:
            print(*write_debian_texts(options.make_texts), sep="\n")
            return 0
        with tempfile.TemporaryDirectory() as folder:
            return measure(options, Path(folder))
    except DepthgaugeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
