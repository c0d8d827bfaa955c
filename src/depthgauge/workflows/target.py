"""Decide what a TARGET is: the built-in pair, a network, or a checkpoint; find the files of a checkpoint."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthgauge.base.errors import InputError, require_type
from depthgauge.checkpoints.inputs.found_data import FoundData, check_files, checked_data, class_in_config, find_data
from depthgauge.checkpoints.source.hub import parse_hub_name, resolve
from depthgauge.checkpoints.source.model_files import Source, require_streamable
from depthgauge.results.gauge_record import CHECKPOINTS, NETWORKS, GaugeOptions, ModelOptions, allows, chosen_kinds

if TYPE_CHECKING:
    from depthgauge.theory.network.network import SelfAttentionNetwork

SMALL_ETA, LARGE_ETA = 0.004, 0.4
"""Weight bounds η of the built-in pair."""


@dataclass(frozen=True)
class Target:
    """What is to be gauged.

    - `kind`: `networks` or `checkpoints`
    - `name`: the path, the name on the hub, or the name of a network object; None for the built-in pair
    - `path`: the file or directory, if one was given
    - `network`: the network object, if one was given
    - `model`: the transformers model, if one was given
    """

    kind: str
    name: str | None = None
    path: Path | None = None
    network: "SelfAttentionNetwork | None" = field(default=None, repr=False)
    model: Any = field(default=None, repr=False)

    @property
    def description(self) -> str:
        """What to call the target in an error."""
        return "the built-in pair" if self.name is None else self.name

    def networks(self) -> "tuple[SelfAttentionNetwork, ...]":
        """Return the networks to gauge; reads the network file."""
        from depthgauge.theory.network.files import load_network

        if self.network is not None:
            return (self.network,)
        return built_in_pair() if self.path is None else (load_network(self.path),)


def is_transformers_model(value: object) -> bool:
    """Return whether a value is a transformers model in memory."""
    return hasattr(value, "config") and hasattr(value, "get_input_embeddings")


def resolve_target(target: Any) -> Target:
    """Decide what a target is. This is the only place that decides it.

    Directories, `.gguf` files and names on the hub are checkpoints; every other path is a network file. None is the
    built-in pair. Nothing is downloaded.

    Raises:
        InputError: it is something else, or there is no such path.
    """
    if target is None:
        return Target(NETWORKS)
    if not isinstance(target, str | Path):
        from depthgauge.theory.network.network import SelfAttentionNetwork

        if isinstance(target, SelfAttentionNetwork):
            return Target(NETWORKS, target.name, network=target)
        if is_transformers_model(target):
            return Target(CHECKPOINTS, getattr(target, "name_or_path", "") or type(target).__name__, model=target)
    expected = "a path, a name on the hub, a SelfAttentionNetwork, a transformers model, or None for the built-in pair"
    require_type("target", target, (str, Path), expected)
    if parse_hub_name(target) is not None:
        return Target(CHECKPOINTS, target)
    path = Path(target)
    if not path.suffix and not os.path.exists(path):  # it may be meant as a directory or as a file
        raise InputError(f"cannot read {target}: no such file or directory; give a path that exists, or ORG/NAME")
    is_checkpoint = path.is_dir() or path.suffix.lower() == ".gguf"
    return Target(CHECKPOINTS if is_checkpoint else NETWORKS, str(target), path)


def require_checkpoint(model: Any, verb: str) -> None:
    """Raise unless the argument of this command is a path or a name on the hub that may be a checkpoint."""
    require_type("model", model, (str, Path), "a path or a transformers model")
    target = resolve_target(model)
    if target.path is not None and not target.path.exists():
        raise InputError(f"cannot read {model}: no such file or directory")
    if target.kind != CHECKPOINTS:
        raise InputError(
            f"{model} is not a checkpoint; {verb} expects a directory of a transformers model, a .gguf file or a name "
            "on the hub"
        )


def resolved(
    path: str | Path,
    asked: ModelOptions,
    message: Callable[[str], None],
    outputs: Iterable[str | Path] = (),
    reads_data: bool = False,
) -> Source:
    """Return the checkpoint of a path or of a name on the hub, for a command with the options `asked`.

    A model on the hub is not downloaded if it fits neither into memory nor can be streamed, or if the disk of an output
    has no room for its weights. The options name what the model will read (`reads_data`), or it is a language model.
    """
    pickled, trusted, name = allows(asked, "pickle"), allows(asked, "code"), parse_hub_name(path)
    if name is not None and name.file is None:
        config = resolve(path, pickled, asked.tokenizer, trust_remote_code=trusted, weights=False)
        from depthgauge.workflows.needed_room import check_described  # torch and transformers take seconds

        check_described(config, asked, find_data(asked, class_in_config(config)) if reads_data else None, outputs)
    source = resolve(path, pickled, asked.tokenizer, message, trusted)
    if asked.is_streamed:
        require_streamable(source, asked)
    return source


def built_in_pair() -> "tuple[SelfAttentionNetwork, SelfAttentionNetwork]":
    """Return the same 12-layer network twice: with small weights, and with all weights a hundred times larger."""
    from depthgauge.theory.network.random_networks import random_network

    large = random_network(layers=12, heads=2, dim=16, eta=LARGE_ETA, seed=0)
    small = large.rescale(SMALL_ETA)
    small.name, large.name = "small weights", "large weights"
    return small, large


# --- What `gauge` is asked to do with a checkpoint, checked before torch or transformers is imported ------------------


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
