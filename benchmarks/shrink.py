"""Claim: `shrink` costs less than the published methods of removing blocks, on text it knows and on text it does not.

The mean increase of the loss in nats/token is measured on windows that nothing was fitted or selected on, 48 windows of
512 tokens of each of three texts, after 3, 7 and 11 blocks were removed. There are two settings. *Known*: calibrated on
other windows of all texts. *Unknown*: calibrated on one text, evaluated on the others. The peers are ShortGPT, UIDL and
SLEB, each without repair and with four repairs (see shrink_peers.py). All methods get the same calibration windows.
The claims:

- the increase is at most that of the best peer, on every text, in both settings, at every size
- known, at 7 and 11 blocks: the mean increase is at most 0.6 of the best peer's
- on SmolLM2-135M (30 blocks) the mean increase is at most what `TARGETS` in shrink_claims.py says

The texts are those of the Debian packages fortunes, debian-handbook and bible-kjv-text:

    python benchmarks/shrink.py --make-texts results/texts
    python benchmarks/shrink.py --checkpoint SmolLM2-135M --heal 200 --text results/texts/fortunes.txt \\
        --text results/texts/handbook.txt --text results/texts/kjv.txt

On a machine without tokenizers, give windows that `--save-windows data.pt` wrote elsewhere: `--windows data.pt`.
Without a checkpoint the program runs on a small random Llama and judges nothing.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from shrink_claims import HEALED, OURS, Row, claims, finite, show
from shrink_peers import CHOICES, REPAIRS, Dense, observe, shrunk_losses
from shrink_texts import require_windows, windows_of_file, windows_of_texts, write_debian_texts
from torch import Tensor

from depthgauge.checkpoints.layers import BlockRunner
from depthgauge.checkpoints.load import Checkpoint, Placement, load_config, load_model, wrap
from depthgauge.checkpoints.model_output import token_losses
from depthgauge.checkpoints.source import find
from depthgauge.errors import DepthgaugeError, InputError
from depthgauge.surgery.student import EFFORT

Losses = dict[str, Float[Tensor, " windows"]]
"""Text → loss of every evaluation window."""


@dataclass(frozen=True, eq=False)
class Setting:
    """One setting.

    - `name`: `known` or `unknown`
    - `source`: the text it was calibrated on, or `all`
    - `checkpoint`: the dense model
    - `calibration`: text → token ids of the calibration windows
    - `evaluation`: text → the dense model on the evaluation windows
    - `counts`: numbers of blocks to remove, increasing
    """

    name: str
    source: str
    checkpoint: Checkpoint
    calibration: Mapping[str, Int[Tensor, "windows n"]]
    evaluation: Mapping[str, Dense]
    counts: tuple[int, ...]

    @property
    def title(self) -> str:
        """The name and the calibration text."""
        return self.name if self.source == "all" else f"{self.name} (calibrated on {self.source})"


# --- OUR METHOD: the only function that knows how `shrink` is called -------------------------------------------------


def ours(setting: Setting, *, effort: str, heal: int, seed: int) -> dict[str, dict[int, Losses]]:
    """Shrink the model of a setting with depthgauge and return the losses of the results.

    The calibration windows are used for fitting and selection, in the proportion that the effort asks for, together
    with half as many windows that are sampled from the model.

    Args:
        setting: the model, the calibration windows and the numbers of blocks to remove.
        effort: `quick`, `default` or `high`.
        heal: number of healing steps; 0 means no healing.
        seed: seed of the samples and of the healing.

    Returns:
        Method (`OURS` and, with healing, `HEALED`) → number of removed blocks → losses of the evaluation windows.
    """
    from depthgauge.results.shrink_options import ShrinkOptions
    from depthgauge.surgery.candidates import Candidates
    from depthgauge.surgery.model_samples import sample_windows
    from depthgauge.surgery.shrinker import Shrinker
    from depthgauge.surgery.shrunk_model import make_model

    work, known = EFFORT[effort], list(setting.calibration.values())
    first = known[0][0, 0]
    before = [int(first)] if all(bool((ids[:, 0] == first).all()) for ids in known) else []
    total = sum(len(ids) for ids in known)
    sampled = sample_windows(setting.checkpoint, windows=total // 2, window=known[0].shape[1], before=before, seed=seed)
    parts: dict[str, list[Tensor]] = {"fit": [], "select": []}
    for ids in [*known, sampled]:
        cut = max(1, round(len(ids) * work.select / (work.fit + work.select)))
        parts["select"].append(ids[:cut])
        parts["fit"].append(ids[cut:])
    fit, select = torch.cat(parts["fit"]), torch.cat(parts["select"])
    select = select[torch.randperm(len(select), generator=torch.Generator().manual_seed(seed))]
    found: dict[str, dict[int, Losses]] = {OURS: {}} | ({HEALED: {}} if heal else {})
    with Shrinker(setting.checkpoint, fit, select, effort=work) as shrinker:
        candidates = Candidates(shrinker, seed)
        for count in setting.counts:
            shrinker.remove_until(count)
            sets = shrinker.sets(count)
            for method, steps in ((OURS, None), (HEALED, str(heal))):
                if method in found:
                    options = ShrinkOptions(remove=str(count), heal=steps, seed=seed)
                    made = make_model(candidates, sets, options, None)
                    found[method][count] = model_losses(made.model, setting.evaluation)
        parts_of_time = ", ".join(f"{name} {value:.0f} s" for name, value in shrinker.durations.seconds.items())
    print(f"(ours: {parts_of_time})", flush=True)
    return found


# --- end of our method -----------------------------------------------------------------------------------------------


@torch.no_grad()
def model_losses(model: Any, evaluation: Mapping[str, Dense]) -> Losses:
    """Return the loss of every evaluation window, from the model's own forward pass."""
    found = {}
    for text, dense in evaluation.items():
        parts = []
        for part in dense.ids.split(dense.runner.batch):
            ids = part.to(dense.runner.device)
            parts.append(token_losses(model(input_ids=ids, use_cache=False).logits, ids).double().mean(1).cpu())
        found[text] = torch.cat(parts)
    return found


def settings_of(
    runner: BlockRunner,
    windows: Mapping[str, Int[Tensor, "windows n"]],
    *,
    evaluated: int,
    calibrated: int,
    counts: Sequence[int],
    unknown: Sequence[str],
) -> list[Setting]:
    """Return the settings: one known, and one unknown for each text in `unknown`.

    The first `evaluated` windows of every text are evaluated; calibration windows come after them.

    Args:
        runner: the dense model.
        windows: text → token ids, in random order.
        evaluated: evaluation windows of each text.
        calibrated: calibration windows in total; several texts share them as evenly as possible.
        counts: numbers of blocks to remove.
        unknown: texts that the unknown settings are calibrated on.
    """
    if not 1 <= min(counts) <= max(counts) <= len(runner) - 2:
        raise InputError(
            f"--remove must name numbers from 1 to {len(runner) - 2} for {runner.checkpoint.name}, got "
            f"{', '.join(map(str, counts))}; SLEB keeps the first and the last block"
        )
    dense = {name: observe(runner, ids[:evaluated]) for name, ids in windows.items()}
    each, more = divmod(calibrated, len(windows))
    shares = {name: each + (index < more) for index, name in enumerate(windows)}
    mixed = {name: ids[evaluated : evaluated + shares[name]] for name, ids in windows.items()}
    sizes, checkpoint = tuple(sorted(set(counts))), runner.checkpoint
    made = [Setting("known", "all", checkpoint, mixed, dense, sizes)]
    for source in unknown:
        own = {source: windows[source][evaluated : evaluated + calibrated]}
        others = {name: one for name, one in dense.items() if name != source}
        made.append(Setting("unknown", source, checkpoint, own, others, sizes))
    return made


def peers(runner: BlockRunner, setting: Setting) -> list[Row]:
    """Measure every choice of blocks with every repair."""
    calibration = observe(runner, torch.cat(list(setting.calibration.values())))
    rows = []
    for choice, choose in CHOICES.items():
        for count, removed in choose(calibration, setting.counts).items():
            for name, fit in REPAIRS.items():
                repair = fit(calibration, removed)
                losses = {text: shrunk_losses(dense, removed, repair) for text, dense in setting.evaluation.items()}
                method = choice if name == "none" else f"{choice} + {name}"
                rows.append(row_of(setting, method, count, losses, removed))
    return rows


def row_of(setting: Setting, method: str, count: int, losses: Losses, removed: tuple[int, ...] | None = None) -> Row:
    """Return the row for the losses of a shrunk model."""
    increase = {text: float((losses[text] - dense.dense_losses).mean()) for text, dense in setting.evaluation.items()}
    return Row(setting.name, setting.source, method, count, increase, removed)


def random_llama() -> Checkpoint:
    """Return a small random Llama with 6 blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    return wrap(LlamaForCausalLM(config), "a random Llama")


def prepare(options: argparse.Namespace, needed: int) -> tuple[Checkpoint, dict[str, Tensor]]:
    """Return the model and the windows of every text."""
    if options.checkpoint is None:
        generator = torch.Generator().manual_seed(options.seed)
        return random_llama(), {name: torch.randint(3, 64, (needed, 32), generator=generator) for name in "abc"}
    source, placement = find(options.checkpoint), Placement(dtype="float32", device=options.device)
    checkpoint = load_model(source, load_config(source, placement), placement)
    if (options.windows is None) == (options.text is None):
        raise InputError("give either --text, once for each text, or --windows")
    if options.windows is not None:
        return checkpoint, windows_of_file(options.windows)
    return checkpoint, windows_of_texts(checkpoint, options.text, needed, options.seed)


def measure(options: argparse.Namespace) -> int:
    """Run the benchmark and return the exit code."""
    tiny = options.checkpoint is None
    effort = "quick" if tiny else options.effort
    work = EFFORT[effort]
    calibrated = options.calibration or (work.fit + work.select) * 2 // 3
    evaluated = 4 if tiny else options.evaluation
    checkpoint, windows = prepare(options, evaluated + calibrated)
    require_windows(windows, evaluated + calibrated)
    if options.save_windows:
        torch.save({name: ids.int() for name, ids in windows.items()}, options.save_windows)
        print(f"wrote {options.save_windows}")
        return 0
    runner = BlockRunner(checkpoint, next(iter(windows.values()))[:1])
    runner.batch = options.batch or runner.batch
    rows: list[Row] = []
    seconds: dict[str, dict[str, float]] = {}
    for setting in settings_of(
        runner, windows, evaluated=evaluated, calibrated=calibrated, counts=(1, 2) if tiny else options.remove,
        unknown=list(windows) if options.each else list(windows)[:1],
    ):  # fmt: skip
        if options.setting not in ("both", setting.name):
            continue
        started = time.perf_counter()
        own = [] if options.no_peers else peers(runner, setting)
        between = time.perf_counter()
        if not options.peers_only:
            made = ours(setting, effort=effort, heal=options.heal, seed=options.seed)
            own += [row_of(setting, method, count, made[method][count]) for method in made for count in made[method]]
        seconds[setting.title] = {"peers": between - started, "ours": time.perf_counter() - between}
        show(setting.title, own)
        took = ", ".join(f"{name} {value:.0f} s" for name, value in seconds[setting.title].items())
        print(f"({took})", flush=True)
        rows += own
    judged = [] if tiny else claims(rows, checkpoint.layers)
    print()
    for claim in judged:
        print(f"{'met' if claim.met else 'NOT MET':8} {claim.value:8.4f} ≤ {claim.limit:8.4f}  {claim.text}")
    met = all(claim.met for claim in judged)
    record = {
        "claim": __doc__.splitlines()[0], "met": met if judged else None, "rows": [row.to_json() for row in rows],
        "claims": [
            {"claim": one.text, "value": finite(one.value), "limit": finite(one.limit), "met": one.met}
            for one in judged
        ],
        "model": checkpoint.describe(), "name": checkpoint.name, "effort": effort,
        "objective": "loss", "heal": options.heal,
        "calibration_windows": calibrated, "evaluation_windows": evaluated, "seed": options.seed, "seconds": seconds,
        "python": platform.python_version(), "torch": torch.__version__,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if met else 1


def main() -> int:
    """Parse the command line; return 1 if a claim is not met and 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a directory or .gguf file; by default a small random Llama")
    parser.add_argument("--text", type=Path, action="append", help="a text file; give it once for each text")
    parser.add_argument("--windows", type=Path, help="a .pt file: name → token ids, instead of --text")
    parser.add_argument("--save-windows", type=Path, help="write the windows of the texts to a .pt file and stop")
    parser.add_argument("--make-texts", type=Path, help="write the texts of the Debian packages to a folder and stop")
    parser.add_argument("--remove", type=int, nargs="+", default=[3, 7, 11], help="numbers of blocks to remove")
    parser.add_argument("--calibration", type=int, help="calibration windows  [default: what --effort uses]")
    parser.add_argument("--evaluation", type=int, default=48, help="evaluation windows of each text")
    parser.add_argument("--each", action="store_true", help="one unknown setting for each text, not for the first only")
    parser.add_argument("--setting", choices=["both", "known", "unknown"], default="both")
    parser.add_argument("--peers-only", action="store_true", help="measure the peers alone")
    parser.add_argument("--effort", choices=list(EFFORT), default="default")
    parser.add_argument("--no-peers", action="store_true", help="measure our own method alone")
    parser.add_argument("--heal", type=int, default=0, help="healing steps")
    parser.add_argument("--batch", type=int, help="windows computed together")
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/shrink.json"))
    options = parser.parse_args()
    try:
        if options.make_texts:
            print(*write_debian_texts(options.make_texts), sep="\n")
            return 0
        return measure(options)
    except DepthgaugeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
