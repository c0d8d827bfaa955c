"""What `gauge` is asked to do with a checkpoint, checked without importing torch or transformers."""

from collections.abc import Callable
from dataclasses import dataclass

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.found_inputs import find_given
from depthgauge.checkpoints.input_kinds import check_reads
from depthgauge.checkpoints.source import Source
from depthgauge.checkpoints.text_files import TextFile, find_text
from depthgauge.results.gauge_options import CHECKPOINTS, ONE_BY_ONE, GaugeOptions, chosen_kinds
from depthgauge.results.shrink_options import ABOUT_FILES
from depthgauge.workflows.resolved_model import resolved
from depthgauge.workflows.target import Target


@dataclass(frozen=True)
class GaugeRequest:
    """A request that can be met as far as options and files tell.

    - `target`, `given`: the checkpoint, and the options as they were given
    - `asked`: the options with their defaults
    - `kinds`: the what-ifs
    - `text`: the text; None if other inputs or the weights alone are gauged
    - `source`: the files of the checkpoint; None for a model in memory
    """

    target: Target
    given: GaugeOptions
    asked: GaugeOptions
    kinds: tuple[str, ...]
    text: TextFile | None
    source: Source | None


def check_gauge(target: Target, options: GaugeOptions, message: Callable[[str], None]) -> GaugeRequest:
    """Find the files of checked options; a model on the hub is downloaded if everything else is right, and it fits."""
    asked = options.with_defaults(CHECKPOINTS)
    assert asked.what_if is not None
    kinds = chosen_kinds(asked.what_if)
    text = given = None
    if any(getattr(asked, name) is not None for name in ONE_BY_ONE):
        given = find_given(asked)
    elif not asked.weights_only:
        text = find_text(asked.text, bool(asked.as_is))
    source = None
    if target.model is None:
        assert target.name is not None
        path = target.path or target.name
        source = resolved(path, asked, message)
        check_reads(source, asked, given)
    else:
        for name in ABOUT_FILES:
            if name in options.given():
                raise InputError(f"{name} applies to models that are loaded from disk; the model is in memory already")
    return GaugeRequest(target, options, asked, () if asked.weights_only else kinds, text, source)
