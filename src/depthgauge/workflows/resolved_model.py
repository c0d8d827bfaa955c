"""The files of a checkpoint; those of a model on the hub are downloaded if it fits."""

from collections.abc import Callable, Iterable
from pathlib import Path

from depthgauge.checkpoints.source.hub import parse_hub_name, resolve
from depthgauge.checkpoints.source.model_files import Source
from depthgauge.results.gauge_record import GaugeOptions, allows
from depthgauge.results.shrink_record import ShrinkOptions


def resolved(
    path: str | Path,
    asked: GaugeOptions | ShrinkOptions,
    message: Callable[[str], None],
    outputs: Iterable[str | Path] = (),
) -> Source:
    """Return the checkpoint of a path or of a name on the hub.

    A model on the hub is not downloaded if it fits neither into memory nor can be streamed, or if the disk of an output
    has no room for its weights.
    """
    pickled, trusted, name = allows(asked, "pickle"), allows(asked, "code"), parse_hub_name(path)
    if name is not None and name.file is None:
        described = resolve(path, pickled, asked.tokenizer, trust_remote_code=trusted, weights=False)
        from depthgauge.workflows.needed_room import check_described  # torch and transformers take seconds

        check_described(described, asked, outputs)
    return resolve(path, pickled, asked.tokenizer, message, trusted)
