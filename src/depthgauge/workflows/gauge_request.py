"""What `gauge` is asked to do with a checkpoint, checked without importing torch or transformers."""

from collections.abc import Callable
from dataclasses import dataclass

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.inputs.found_data import FoundData, check_files, checked_data, class_in_config
from depthgauge.checkpoints.source.model_files import Source
from depthgauge.results.gauge_options import CHECKPOINTS, GaugeOptions, chosen_kinds
from depthgauge.workflows.target import Target, resolved


@dataclass(frozen=True)
class GaugeRequest:
    """A request that can be met as far as options and files tell.

    - `target`, `given`: the checkpoint, and the options as they were given
    - `asked`: the options with their defaults
    - `kinds`: the what-ifs
    - `data`: what the model is run on
    - `source`: the files of the checkpoint; None for a model in memory
    """

    target: Target
    given: GaugeOptions
    asked: GaugeOptions
    kinds: tuple[str, ...]
    data: FoundData
    source: Source | None


def check_gauge(target: Target, options: GaugeOptions, message: Callable[[str], None]) -> GaugeRequest:
    """Find the files of checked options; a model on the hub is downloaded if everything else is right, and it fits."""
    asked = options.with_defaults(CHECKPOINTS)
    assert asked.what_if is not None
    kinds = chosen_kinds(asked.what_if)
    data, source = checked_data(options), None
    if len(data.texts) > 1:
        raise InputError("gauge reads one text; give one file, or join the files")
    if target.model is None:
        assert target.name is not None
        path = target.path or target.name
        source = resolved(path, asked, message, reads_data=True)
        data = checked_data(options, class_in_config(source))
        check_files(source, data)
    else:
        data = checked_data(options, class_in_config(None, target.model))
    return GaugeRequest(target, options, asked, () if asked.weights_only else kinds, data, source)
