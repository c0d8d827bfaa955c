"""`gauge`: measure a network or a checkpoint from end to end and return one result."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from depthgauge._io import write_text
from depthgauge._version import __version__
from depthgauge.network.network import SelfAttentionNetwork
from depthgauge.progress import Step, silent
from depthgauge.report.write import write_report
from depthgauge.results.gauge_options import CHECKPOINTS, GaugeOptions, make_options
from depthgauge.results.gauge_record import GaugeRecord, read_result
from depthgauge.workflows.gauge_checkpoint import gauge_checkpoint
from depthgauge.workflows.gauge_network import gauge_networks
from depthgauge.workflows.partial import delete_partial, no_message
from depthgauge.workflows.target import resolve_target


class GaugeResult(GaugeRecord, frozen=True, kw_only=True):
    """The result of `gauge`: a record of subjects that can be saved, tabulated and drawn."""

    def save(self, path: str | Path) -> None:
        """Write the result document to a JSON file, atomically.

        Args:
            path: the file. A partial result next to it, left by an interrupted run, is deleted.
        """
        write_text(path, self.dump())
        delete_partial(path)

    def report(self, path: str | Path) -> Path:
        """Write the result as one self-contained HTML page (extra `report`).

        Args:
            path: the page to write.

        Returns:
            The path of the page.
        """
        return write_report(self, path)


def gauge(
    target: str | Path | SelfAttentionNetwork | None = None,
    options: GaugeOptions | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Step = silent,
    message: Callable[[str], None] = no_message,
    **fields: Any,
) -> GaugeResult:
    """Measure how much of a network's or a checkpoint's depth does useful work.

    A network is measured on inputs, certified against every one-layer surrogate, and its effective depth is found. A
    checkpoint is measured on text: what each head does, and what the model loses without each layer.

    Args:
        target: a network, a network file, a checkpoint (directory or GGUF file), or None for a built-in pair.
        options: what to do; see `GaugeOptions`.
        out: where `save` will write the result. A checkpoint's partial results are kept next to it, so that an
            interrupted run can be resumed.
        resume: continue the interrupted run whose partial result is next to `out`.
        progress: called with (done, total, label) as the work advances.
        message: called with a sentence where there is something to tell, such as the expected duration.
        **fields: any option of `GaugeOptions` by name, such as `text="corpus.txt"`; overrides `options`.

    Returns:
        A `GaugeResult`: `subjects`, `settings`, `to_frame()`, `save()`, `report()`, `to_json()`.

    Raises:
        InputError: the target or an option cannot be used; the message says why and what to do.

    >>> from depthgauge import random_network
    >>> result = gauge(random_network(layers=2, heads=1, dim=4, eta=0.01), samples=1, tokens=4)
    >>> result.subjects[0].depth[0].layers
    1
    """
    found, asked = resolve_target(target), make_options(options, fields)
    asked.refuse_other_kind(found.kind, found.description)
    if found.kind == CHECKPOINTS:
        settings, subject = gauge_checkpoint(found, asked, out=out, resume=resume, progress=progress, message=message)
        return GaugeResult(version=__version__, settings=settings, subjects=(subject,))
    settings, subjects = gauge_networks(found, asked, progress, message)
    return GaugeResult(version=__version__, settings=settings, subjects=subjects)


def load_result(path: str | Path) -> GaugeResult:
    """Read a result that `GaugeResult.save` or `depthgauge gauge --out` wrote.

    Args:
        path: the JSON file.

    Raises:
        ResultError: the file is not a result; the message names the place that does not fit.
    """
    record = read_result(path)
    return GaugeResult(**{name: getattr(record, name) for name in record.__struct_fields__})
