"""The comparison of docs/results.md: several methods of removing 10, 25 and 40 % of the blocks, measured alike.

    python benchmarks/published.py MODEL --text a.txt b.txt c.txt --work results/published --out NAME.json
    python benchmarks/published.py --page docs/results.md benchmarks/results/{published,encoder}-*.json

The first command makes every shrunk model as a directory in `--work` and measures them all with one call of
`depthgauge.evaluate`: perplexity and bits per byte on the texts and on the built-in text, and the cloze task, on the
same windows and items for all. Two thirds of each text are for calibration, the rest for measuring (`divide_texts`).
Directories that exist are used again. The second command writes the page from the results of any number of models.
Speed is measured by speed_ratio.py. An encoder is shown by the `depthgauge.json` of its shrunk models, a file for each
number of removed blocks.

- ShortGPT, UIDL and SLEB choose blocks, without repair; see shrink_peers.py. SLEB is greedy removal by loss.
- depthgauge is `shrink` with `--effort quick` and the default, both without training, and the default with `--recover`
"""

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from shrink_peers import CHOICES, Dense, observe
from shrink_texts import divide_texts, windows_of_texts

import depthgauge as dg
from depthgauge.base.errors import DepthgaugeError, InputError
from depthgauge.base.progress import silent
from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.source.model_files import Source, find, weight_bytes
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_config, load_model, load_tokenizer
from depthgauge.results.evaluate_record import EvaluateRecord, check_evaluate
from depthgauge.surgery.extract import extract, shrunk_config
from depthgauge.surgery.gguf_layout import read_layout, shrunk_fields, write_gguf
from depthgauge.surgery.student import EFFORT
from depthgauge.surgery.write_model import written_model

SHARES = (0.10, 0.25, 0.40)
OURS = {
    "depthgauge, quick": {"effort": "quick", "recover": "off"},
    "depthgauge": {"recover": "off"},
    **{f"depthgauge, recovered {amount}": {"recover": amount} for amount in ("0.5M", "2M", "8M")},
}
LONG = "depthgauge, recovered 8M"
"""A method that is measured at the largest share alone."""
WINDOW, ITEMS, LETTERS = 512, 500, 200_000
"""Tokens per window of the perplexities, items of the cloze task, and letters that are used of each unseen text."""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make all models, measure them and return the document."""
    placement = Placement(dtype=options.dtype, device=options.device)  # the models are measured in float32
    source = find(options.model)
    checkpoint = load_model(source, load_config(source, placement), placement)
    tokenizer, layers = load_tokenizer(source, placement), checkpoint.layers
    counts = sorted({max(1, round(share * layers)) for share in SHARES})
    options.work.mkdir(parents=True, exist_ok=True)
    known, unseen = divide_texts(options.text, options.work)
    rows = [
        *_peers(checkpoint, tokenizer, known, counts, options),
        *_ours(checkpoint, tokenizer, known, counts, options),
    ]
    if options.only:
        return {}
    for path in unseen.values():
        path.write_text(path.read_text("utf-8")[:LETTERS], encoding="utf-8")
    mixed = options.work / "unseen.txt"
    mixed.write_text("\n\n".join(path.read_text("utf-8") for path in unseen.values()), encoding="utf-8")
    builtin = options.work / "built-in.txt"
    builtin.write_text(
        (Path(dg.__file__).parent / "checkpoints" / "inputs" / "text.txt").read_text("utf-8"), encoding="utf-8"
    )
    record = _evaluated(
        [options.model, *(row["folder"] for row in rows)], mixed, {**unseen, "built-in": builtin}, options
    )
    sizes = [_size(checkpoint, count, options) for count in counts]
    return {
        "name": options.name or checkpoint.name, "layers": layers, "parameters": checkpoint.describe().parameters,
        "bytes": weight_bytes(source), "made_in": options.dtype, "counts": counts, "sizes": sizes,
        "rows": [{key: value for key, value in row.items() if key != "folder"} for row in rows],
        "evaluation": _without_paths(record, ["dense", *(f"{row['method']}, {row['removed']}" for row in rows)]),
        "device": torch.cuda.get_device_name() if checkpoint.device.type == "cuda" else platform.machine(),
        "versions": record.versions,
    }  # fmt: skip


def _evaluated(models: list[str], mixed: Path, texts: dict[str, Path], options: argparse.Namespace) -> EvaluateRecord:
    """Measure all models on the same items and windows, or read what an earlier run of this command has measured."""
    found = options.work / "evaluation.json"
    if not found.exists():
        dg.evaluate(
            models, tasks="depthgauge_cloze", limit=ITEMS, text=str(mixed), window=WINDOW, dtype="float32",
            perplexity=[f"{name}:{path}" for name, path in texts.items()], device=options.device, out=found,
            message=print,
        )  # fmt: skip
    return check_evaluate(json.loads(found.read_text("utf-8")), str(found))


def _asked(methods: Mapping[str, Any], options: argparse.Namespace) -> list[tuple[str, Any]]:
    return [(method, how) for method, how in methods.items() if not options.only or method in options.only]


def _peers(
    checkpoint: Checkpoint, tokenizer: Any, known: dict[str, Path], counts: Sequence[int], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Write the models of the published choices of blocks, without repair."""
    dense: Dense | None = None
    for choice, choose in _asked(CHOICES, options):
        folders = [options.work / f"{choice}-{count}" for count in counts]
        if not all(folder.exists() for folder in folders):
            if dense is None:
                work = EFFORT["default"]
                cut = {"checkpoint": checkpoint, "tokenizer": tokenizer, "window": WINDOW, "seed": 0}
                read = windows_of_texts(known, count=-(-(work.fit + work.select) // len(known)), **cut)
                ids = torch.cat(list(read.values()))
                dense = observe(BlockRunner(checkpoint, ids[:1]), ids)
            for folder, removed in zip(folders, choose(dense, counts).values(), strict=True):
                model = extract(checkpoint, [layer for layer in range(checkpoint.layers) if layer not in removed])
                with written_model(model, checkpoint.source, tokenizer, folder, overwrite=True):
                    print(f"{choice}: removed {sorted(removed)}")
        for count, folder in zip(counts, folders, strict=True):
            yield {"method": choice, "removed": count, "folder": str(folder)}


def _ours(
    checkpoint: Checkpoint, tokenizer: Any, known: dict[str, Path], counts: Sequence[int], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Shrink as a user does; the sizes share one search."""
    for method, asked in _asked(OURS, options):
        sizes = counts[-1:] if method == LONG else counts
        folders = [options.work / f"{method.replace(', ', '-')}-{count}" for count in sizes]
        if not all(folder.exists() for folder in folders):
            texts = list(map(str, known.values()))
            made = dg.shrink(
                checkpoint.model, tokenizer=tokenizer, text=texts, remove=list(sizes), message=print, **asked
            )
            for folder, one in zip(folders, sorted(made.sizes, key=lambda one: len(one.record.removed)), strict=True):
                with written_model(one.model, checkpoint.source, tokenizer, folder, overwrite=True):
                    print(f"{method}: removed {one.record.removed}")
        for count, folder in zip(sizes, folders, strict=True):
            yield {"method": method, "removed": count, "folder": str(folder)}


def _size(checkpoint: Checkpoint, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the size of a model without the last blocks but one: it does not depend on which blocks are gone."""
    kept = [*range(checkpoint.layers - count - 1), checkpoint.layers - 1]
    parameters = sum(weight.numel() for weight in extract(checkpoint, kept).parameters())
    size = {"removed": count, "parameters": parameters}
    if checkpoint.source.gguf is not None:
        small = options.work / f"removed-{count}.gguf"
        if not small.exists():
            _write_gguf(checkpoint.source, checkpoint, kept, small)
        size["gguf_bytes"] = small.stat().st_size
    return size


def _write_gguf(source: Source, checkpoint: Checkpoint, kept: Sequence[int], path: Path) -> None:
    """Write the GGUF file of the kept blocks, which are copied as they are."""
    layout = read_layout(source, None, checkpoint.name)
    types = getattr(shrunk_config(checkpoint.config, kept), "layer_types", None)
    write_gguf(path, layout, kept, shrunk_fields(layout, kept, types), {}, silent)


def _without_paths(record: EvaluateRecord, names: Sequence[str]) -> dict[str, Any]:
    """Return the document of the evaluation with names instead of the paths of this machine."""
    document = record.to_json()
    for model, name in zip(document["models"], names, strict=True):
        model["name"] = name
    for text in document["texts"]:
        text["source"] = text["name"]
    document["settings"] |= {
        "text": "unseen parts of the texts",
        "perplexity": [text["name"] for text in document["texts"]],
    }
    document["notes"] = []
    return document


def main() -> int:
    """Parse the command line; return 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", help="a directory or a .gguf file; with --page, results of this program")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="text files to calibrate and measure on")
    parser.add_argument("--work", type=Path, default=Path("results/published"), help="folder of the shrunk models")
    parser.add_argument("--name", help="the name of the model on the page")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto", help="the dtype in which the models are made")
    parser.add_argument("--only", nargs="+", help="make the models of these methods and stop: for several at once")
    parser.add_argument("--out", type=Path, default=Path("results/published.json"))
    parser.add_argument("--page", type=Path, help="write the page from results")
    options = parser.parse_args()
    try:
        if options.page:
            from published_page import write_page  # draws with matplotlib, which measuring does not need

            documents = [json.loads(Path(path).read_text("utf-8")) for path in options.model]
            write_page(options.page, documents)
            return 0
        if len(options.model) != 1 or not options.text:
            raise InputError("give one model, and texts with --text")
        options.model = options.model[0]
        document = measure(options)
        if options.only:
            return 0
    except DepthgaugeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
