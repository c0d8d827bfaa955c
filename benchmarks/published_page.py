"""The page and the figure of published.py, from stored results."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from depthgauge.papers.reproduce.style import BLUE, DASHED, FAINT, FIVE, GREEN, INK, VERMILION, figure_style
from depthgauge.results.evaluate_record import EvaluateRecord, check_evaluate
from depthgauge.results.labels import objective_label
from depthgauge.results.shrink_record import ShrinkRecord, check_shrink

RECOVERED = "depthgauge, recovered"
STYLES = {
    "ShortGPT": (FAINT, DASHED), "UIDL": (INK, DASHED), "SLEB": (FIVE[1], DASHED),
    "depthgauge, quick": (BLUE, "-"), "depthgauge": (GREEN, "-"),
    "depthgauge, recovered 0.5M": (VERMILION, ":"), "depthgauge, recovered 2M": (VERMILION, "--"),
    "depthgauge, recovered 8M": (VERMILION, "-"),
}  # fmt: skip
"""Colour and line of each method."""
QUARTER = 0.25
"""The share of the blocks in the summary."""
TOP = 2.2
"""Bits per byte at the upper end of the figure; a model that needs more has lost the language."""


def write_page(path: Path, documents: Sequence[dict[str, Any]]) -> None:
    """Write docs/results.md, and its figure into the folder `figures` beside it."""
    encoders = [check_shrink(one, path.name) for one in documents if "curve" in one]
    documents = [one for one in documents if "curve" not in one]
    sections = [*(line for one in documents for line in _section(one)), *_encoders(encoders)]
    lines = [*INTRODUCTION.splitlines(), "", *_summary(documents), *sections, *METHODS.splitlines()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with figure_style():
        _drawn(documents).savefig(path.parent / "figures" / "results.png", dpi=200, facecolor="white")
        _front(documents).savefig(path.parent / "figures" / "removed.png", dpi=200, facecolor="white")


def _front(documents: Sequence[dict[str, Any]]) -> Figure:
    """Return the figure of the README: loss against removed blocks of the model with the longest recovery."""
    document = max(documents, key=lambda one: sum(row["method"].startswith(RECOVERED) for row in one["rows"]))
    record, rows = check_evaluate(document["evaluation"], document["name"]), document["rows"]
    losses = [sum(text.results[k].loss for text in record.texts) / len(record.texts) for k in range(len(rows) + 1)]
    trained = [row["method"] for row in rows if row["method"].startswith(RECOVERED)]
    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    panel = figure.subplots()
    for method, words, color in (
        ("SLEB", "greedy removal by loss (SLEB)", FAINT), ("depthgauge", "depthgauge, not trained", BLUE),
        (trained[-1], f"{trained[-1]} tokens", VERMILION),
    ):  # fmt: skip
        points = [
            (0, losses[0]),
            *((row["removed"], losses[k]) for k, row in enumerate(rows, 1) if row["method"] == method),
        ]
        panel.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, label=words)
    panel.axhline(losses[0], color=INK, linewidth=0.7, linestyle=DASHED)
    panel.annotate("all blocks", (points[-1][0], losses[0]), (0, 3), textcoords="offset points", ha="right", fontsize=7)
    panel.set(title=document["name"], xlabel=f"removed blocks of {document['layers']}", ylabel="loss, nats per token")
    panel.legend(loc="upper left")
    return figure


def _drawn(documents: Sequence[dict[str, Any]]) -> Figure:
    """Return the figure: bits per byte against removed blocks, a panel per model and a line per method."""
    figure = Figure(figsize=(3.8 * len(documents), 3.3), layout="constrained")
    panels = figure.subplots(1, len(documents), squeeze=False)[0]
    for panel, document in zip(panels, documents, strict=True):
        bits, rows = _bits(check_evaluate(document["evaluation"], document["name"])), document["rows"]
        for method in dict.fromkeys(row["method"] for row in rows):
            color, style = STYLES[method]
            line: dict[str, Any] = {"linestyle": style, "color": color}
            points = [(0, bits[0])]
            points += [(row["removed"], bits[k]) for k, row in enumerate(rows, 1) if row["method"] == method]
            panel.plot(*zip(*points, strict=True), **line, marker="o", markersize=3.5, label=method)
        panel.set(title=document["name"], xlabel=f"removed blocks of {document['layers']}", ylim=(bits[0] - 0.05, TOP))
    panels[0].set_ylabel("bits per byte, mean over the texts")
    lines = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4)
    return figure


def _bits(record: EvaluateRecord) -> list[float]:
    """Return the bits per byte of every model, the mean over the texts."""
    by_model = zip(*([result.bits_per_byte for result in text.results] for text in record.texts), strict=True)
    return [sum(values) / len(values) for values in by_model]


INTRODUCTION = """\
# Results

What is left of a model when 10, 25 and 40 % of its blocks are removed. All methods are calibrated on the same two
thirds of three texts and measured on the rest, which none of them has read, and on the built-in text.

![Bits per byte against the number of removed blocks, by method](figures/results.png)
"""
METHODS = """
## How it was measured

- **ShortGPT, UIDL, SLEB** choose blocks and repair nothing, as published. SLEB is greedy removal by loss. Published
  repairs are compared in `benchmarks/shrink.py`.
- **depthgauge** is `shrink` with `--effort quick` and with the defaults, both without training, and with the defaults
  and `--recover` of so many tokens. Where training gained less than its standard error on the windows that decide about
  it, the model before it is kept.
- **Loss** is in nats per token, in windows of 512 tokens that do not overlap. **Bits per byte** is the mean over the
  four texts.
- **Cloze** is the accuracy on `depthgauge_cloze`, run by lm-eval: the true continuation of a passage among four, 500
  items of unseen text; guessing gives 0.25. **Difference** is to the dense model on the same items, with its paired
  95 % interval.
- This page is made by `benchmarks/published.py` from the results in `benchmarks/results/`; to add a model, run the
  command at the top of that file.
"""


def _summary(documents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of the size nearest to a quarter of the blocks: the dense model, SLEB, and depthgauge's rows."""
    yield from ("## A quarter of the blocks removed", "")
    yield "| model | method | parameters | loss | bits per byte | cloze | difference of cloze |"
    yield "| --- " * 7 + "|"
    for document in documents:
        record = check_evaluate(document["evaluation"], document["name"])
        (task,) = [task for task in record.tasks if task.metric == "acc"]
        bits, layers, models = _bits(record), document["layers"], [{"method": "dense", "removed": 0}, *document["rows"]]
        size = min(document["sizes"], key=lambda size: abs(size["removed"] / layers - QUARTER))
        for k, model in enumerate(models):
            if model["removed"] not in (0, size["removed"]) or model["method"] in ("ShortGPT", "UIDL"):
                continue
            parameters = size["parameters"] if model["removed"] else document["parameters"]
            loss = sum(text.results[k].loss for text in record.texts) / len(record.texts)
            name = f"{document['name']}, {layers - size['removed']} of {layers} blocks" if k == 0 else ""
            cells = (
                name, model["method"], f"{parameters / 1e6:.0f} million", f"{loss:.3f}", f"{bits[k]:.3f}",
                f"{task.results[k].accuracy:.3f}", _difference(task.results[k]),
            )  # fmt: skip
            yield f"| {' | '.join(cells)} |"


def _difference(accuracy: Any) -> str:
    """Return the difference to the dense model with its interval; empty for the dense model."""
    if accuracy.low is None:
        return ""
    return f"{accuracy.difference:+.3f} ({accuracy.low:+.3f} to {accuracy.high:+.3f})"


def _section(document: dict[str, Any]) -> Iterator[str]:
    record = check_evaluate(document["evaluation"], document["name"])
    texts = [text.name for text in record.texts]
    yield from ("", f"## {document['name']}", "")
    size = f"{document['layers']} blocks, {document['parameters'] / 1e6:.0f} million parameters"
    trained = any(row["method"].startswith(RECOVERED) for row in document["rows"])
    missing = "" if trained else " Recovery is not measured on it yet."
    yield from textwrap.wrap(f"{size}. {_measured_with(document)}{missing}", 120)
    yield from (
        "",
        f"| removed | method | {' | '.join(f'loss: {name}' for name in texts)} | bits per byte | cloze | difference |",
    )
    yield "| --- " * (len(texts) + 5) + "|"
    (task,) = [task for task in record.tasks if task.metric == "acc"]
    labels = [("0", "dense"), *((str(row["removed"]), row["method"]) for row in document["rows"])]
    table, bits = [], _bits(record)
    for k, (removed, method) in enumerate(labels):
        losses = [f"{text.results[k].loss:.3f}" for text in record.texts]
        one = task.results[k]
        interval = _difference(one)
        table.append(
            (
                int(removed),
                f"| {removed} | {method} | {' | '.join(losses)} | {bits[k]:.3f} | {one.accuracy:.3f} | {interval} |",
            )
        )
    yield from (line for _, line in sorted(table, key=lambda pair: pair[0]))
    yield ""
    is_gguf = "gguf_bytes" in document["sizes"][0]
    yield "| removed | parameters |" + (" GGUF |" if is_gguf else "")
    yield "| --- " * (3 if is_gguf else 2) + "|"
    for size in document["sizes"]:
        cells = [str(size["removed"]), f"{size['parameters'] / 1e6:.0f} million"]
        cells += [f"{size['gguf_bytes'] / document['bytes']:.2f} of the size"] if is_gguf else []
        yield f"| {' | '.join(cells)} |"


def _encoders(records: Sequence[ShrinkRecord]) -> Iterator[str]:
    """Yield the section of an encoder, from a record of `shrink` for each size."""
    if not records:
        return
    first = records[0]
    name, layers, versions = first.name, first.layers_before, first.versions
    counts = sorted({point.removed for record in records for point in record.curve} - {0})
    values = {(point.method, point.removed): point.increase for record in records for point in record.curve}
    yield from ("", f"## {name}", "")
    text = (
        f"An encoder of {layers} blocks, {first.parameters.before / 1e6:.0f} million parameters: "
        f"{objective_label(first.objective).title} of the dense and the smaller model, on the windows that decided "
        f"which blocks go; in the last line, on windows that decided nothing. Made by `shrink --effort quick --recover "
        f"off` on {versions['machine']} with depthgauge {versions['depthgauge']}."
    )
    yield from textwrap.wrap(text, 120)
    yield from ("", f"| method | {' | '.join(f'{count} removed' for count in counts)} |")
    yield "| --- " * (len(counts) + 1) + "|"
    for method in dict.fromkeys(method for method, removed in values if removed):
        cells = [f"{values[method, count]:.4f}" if (method, count) in values else "" for count in counts]
        yield f"| {method} | {' | '.join(cells)} |"
    unseen = {len(record.removed): record.loss for record in records}
    cells = [f"{one.shrunk:.4f} ({one.low:.4f} to {one.high:.4f})" for _, one in sorted(unseen.items())]
    yield f"| depthgauge, on other windows | {' | '.join(cells)} |"


def _measured_with(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"Made in {document['made_in']}, measured in float32, on {document['device']} with {versions}."
