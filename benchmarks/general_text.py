"""Which general text should a recovery add to the user's own: none, bare samples, or continuations; and how many?

    python benchmarks/general_text.py MODEL --remove 6,7,8,9 --text kjv.txt handbook.txt fortunes.txt

The first text is the user's: two thirds of it are trained on. The rest of it and the other texts are measured. The same
blocks are removed each time, and the same number of tokens is trained on; half of them are general:

- `none`: the user's text alone
- `bare`: samples that begin with a token drawn uniformly from the vocabulary
- `continued`: continuations of beginnings of passages, each used once; `continued / 2` and `continued / 4` have a half
  and a quarter of them, which are used two and four times

Printed are increases of the loss in nats per token, and the standard error of the difference to `continued`, window by
window. Each kind is trained once, so the spread over seeds is not in it.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from shrink_texts import divide_texts, windows_of_texts

from depthgauge.base.errors import DepthgaugeError
from depthgauge.checkpoints.blocks.model_output import WindowBatches, batch_size, model_output, token_losses
from depthgauge.checkpoints.inputs.text_files import TextFile
from depthgauge.checkpoints.inputs.windows import surround
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.tasks.language import measure_start, ordinary_tokens, plan_start, sample_windows
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_config, load_model, load_tokenizer, wrap
from depthgauge.recovery.recover_model import Recovery, trained_weights
from depthgauge.recovery.training_data import RecoveryData, training_data
from depthgauge.results.recover_record import amount_of
from depthgauge.surgery.extract import extract

WINDOW, MEASURED = 512, 64
SHARES = {"continued": 1, "continued / 2": 2, "continued / 4": 4}


@torch.no_grad()
def losses(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of every window."""
    batches = WindowBatches(batch_size(checkpoint.model, ids.shape[1], True))

    def measure(these: slice) -> torch.Tensor:
        part = ids[these]
        return token_losses(model_output(checkpoint, part), part).double().mean(1).cpu()

    return torch.cat(batches.map(measure, len(ids)))


def main() -> int:
    """Train once for each kind of general text, and print what it gains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--remove", required=True, help="the blocks that are removed: 6,7,8")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="the user's text, and others")
    parser.add_argument("--tokens", default="1M")
    parser.add_argument("--out", type=Path, default=Path("results/general_text.json"))
    options = parser.parse_args()
    placement, source = Placement(), find(options.model)
    teacher = load_model(source, load_config(source, placement), placement)
    tokenizer = load_tokenizer(source, placement)
    start = measure_start(plan_start("auto", source, tokenizer), teacher, tokenizer)
    removed, amount = {int(layer) for layer in options.remove.split(",")}, amount_of(options.tokens)
    kept = [layer for layer in range(teacher.layers) if layer not in removed]
    wanted = -(-amount.tokens // WINDOW)
    with tempfile.TemporaryDirectory() as folder:
        known, unseen = divide_texts(options.text, Path(folder))
        cut = {"checkpoint": teacher, "tokenizer": tokenizer, "window": WINDOW, "seed": 0}
        measured = windows_of_texts(unseen, count=MEASURED, **cut)
        own = TextFile(known[options.text[0].stem])
        select = windows_of_texts({own.name: own.path}, count=24, **cut)[own.name]
        common = {"start": start, "window": WINDOW, "wanted": wanted, "held": [select]}
        alone = training_data(teacher, tokenizer, [own], "none", **common)
        began = time.perf_counter()
        mixed = training_data(teacher, tokenizer, [own], None, **common)
        print(f"{len(mixed.windows) - mixed.own} windows continued in {time.perf_counter() - began:.0f} s", flush=True)
        began = time.perf_counter()
        bare = sample_windows(
            teacher, windows=wanted // 2, window=WINDOW - len(start.after), before=start.before, seed=0,
            starts=ordinary_tokens(teacher, tokenizer),
        )  # fmt: skip
        bare = surround(bare, (), start.after)
        print(f"{len(bare)} windows sampled in {time.perf_counter() - began:.0f} s", flush=True)
    arms = {"none": alone, "bare": RecoveryData(torch.cat([alone.windows, bare]), alone.own, {})}
    for name, share in SHARES.items():
        count = (len(mixed.windows) - mixed.own) // share
        arms[name] = RecoveryData(mixed.windows[: mixed.own + count], mixed.own, {})
    dense = {name: losses(teacher, ids) for name, ids in measured.items()}
    found, seconds = {}, {}
    for name, data in arms.items():
        student = wrap(extract(teacher, kept), name)
        made = Recovery(data, select, None, amount, 0).run(student, teacher, trained_weights(student))
        found[name] = {text: losses(student, ids) - dense[text] for text, ids in measured.items()}
        seconds[name] = made.seconds
        print(name, *(f"{text} {float(one.mean()):.4f}" for text, one in found[name].items()), flush=True)
    rows = []
    for name, increases in found.items():
        for text, one in increases.items():
            apart = one - found["continued"][text]
            row = {"general": name, "text": text, "increase": float(one.mean()), "difference": float(apart.mean()),
                   "error": float(apart.std()) / len(apart) ** 0.5, "seconds": seconds[name]}  # fmt: skip
            rows.append(row)
            numbers = f"{row['increase']:.4f}  {row['difference']:+.4f} ± {row['error']:.4f}"
            print(f"{name:14} {text:12} {numbers}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"name": teacher.name, "tokens": amount.tokens, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DepthgaugeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
