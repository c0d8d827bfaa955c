"""The catalog of all figures. To add a figure, write its study and add one record to `FIGURES`."""

from depthgauge.errors import unknown_name
from depthgauge.papers.reproduce.figure import MINILM, TRANSFORMERS, Figure

_SEPARATION = "separation_figures:SeparationStudy"

FIGURES: dict[str, Figure] = {
    figure.id: figure
    for figure in (
        Figure(
            "A1",
            "How fast the tokens of random networks become equal, layer by layer, without and with skip connections.",
            "collapse_figures:RankByLayer",
        ),
        Figure(
            "A2",
            "Error of every one-layer surrogate against the weight size η, between lower bound and certificate.",
            "collapse_figures:SurrogateErrors",
        ),
        Figure(
            "A3",
            "Effective depth, certified and measured, over weight size, width and number of layers.",
            "collapse_figures:DepthMap",
        ),
        Figure(
            "A4",
            "Whether rank or layers collapse, with and without skip connections, at small and large weights.",
            "collapse_figures:WhatCollapses",
        ),
        Figure(
            "A5",
            "Cost of attention and effective depth against the weight size η.",
            "fast_figure:FastOrDeepStudy",
        ),
        Figure(
            "B3",
            "Figure 3 of paper B, the success rate of softmax regression against n and m.",
            _SEPARATION,
            panels=tuple(f"B3{letter}" for letter in "ab"),
        ),
        Figure(
            "B4",
            "Figure 4 of paper B, the success rate of self-attention with X = I against each parameter.",
            _SEPARATION,
            panels=tuple(f"B4{letter}" for letter in "abcdef"),
        ),
        Figure(
            "B5",
            "Figure 5 of paper B, the same for self-attention with X = 1.",
            _SEPARATION,
            panels=tuple(f"B5{letter}" for letter in "abcdef"),
        ),
        Figure(
            "B7",
            "Figure 7 of paper B, the same for cross-attention.",
            _SEPARATION,
            panels=tuple(f"B7{letter}" for letter in "abcde"),
        ),
        Figure(
            "B-degree",
            "Success rate when exp is replaced by its Taylor polynomial of degree g (not in paper B).",
            _SEPARATION,
            panels=tuple(f"B-degree-{letter}" for letter in "abcd"),
        ),
        Figure(
            "D2",
            "Residual ratio of MiniLM by layer with parts switched off, as in Figure 2 of Dong et al. (2021).",
            "rank_figure:RankStudy",
            needs=(TRANSFORMERS, MINILM),
        ),
        Figure(
            "T1",
            "Accuracy of trained models against the weight bound η, for 1 to 8 layers.",
            "trained_figures:DepthPays",
            trained=True,
        ),
        Figure(
            "T2",
            "Certified and measured depth of trained models, and how much of the weight bound they use.",
            "trained_figures:TrainedDepths",
            trained=True,
        ),
        Figure(
            "T3",
            "Accuracy of trained models with and without skip connections and LayerNorm.",
            "trained_figures:SkipOrNorm",
            trained=True,
        ),
    )
}
DEFAULT_FIGURES = tuple(figure.id for figure in FIGURES.values() if figure.by_default)
"""The figures that are drawn when none is named."""
_PANELS = {panel: figure for figure in FIGURES.values() for panel in figure.panels}


def find_figure(asked: str) -> Figure:
    """Return the figure with an id, or the figure that contains the panel with this id."""
    figure = FIGURES.get(asked) or _PANELS.get(asked)
    if figure is None:
        raise unknown_name("figure", asked, [*FIGURES, *_PANELS])
    return figure
