"""Open a model in two stages: describe it without its weights, then load them. Every command starts with these."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from depthgauge.base.errors import InputError
from depthgauge.base.progress import no_message
from depthgauge.checkpoints.inputs.found_data import IMAGES, RECORDINGS, FoundData, InputKind, require_processor
from depthgauge.checkpoints.source.library import CheckpointError, attempt, transformers
from depthgauge.checkpoints.source.model_class import loader_of
from depthgauge.checkpoints.source.model_files import Source, weight_files
from depthgauge.checkpoints.weights.load import (
    Checkpoint,
    Placement,
    fitted,
    load_config,
    load_model,
    load_tokenizer,
    refuse_infinite,
    require_kind,
    with_stack,
    wrap,
)
from depthgauge.checkpoints.weights.stored_weights import built_model, stored_dtype
from depthgauge.results.gauge_record import ABOUT_FILES, STACKS, allows


@dataclass(frozen=True, eq=False)
class Described:
    """A model before its weights are loaded.

    - `source`: its files; None for a model in memory
    - `whole`: the model on the device `meta`, or the one in memory, with what is measured of it
    - `config`: its configuration
    - `reader`: its tokenizer or processor; None if it reads nothing
    - `placement`: how it is loaded; the weights are streamed if they do not fit
    - `data`, `stack`: what it reads, and the stack that is measured
    """

    source: Source | None
    whole: Checkpoint
    config: Any
    reader: Any
    placement: Placement
    data: FoundData
    stack: str | None


def describe(
    model: Any,
    source: Source | None,
    options: Any,
    data: FoundData | None = None,
    tokenizer: Any = None,
    message: Callable[[str], None] = no_message,
    *,
    has_reader: bool = True,
    may_stream: bool = True,
) -> Described:
    """Check everything about a model that can be checked without its weights.

    Args:
        model: the model in memory, if there is no `source`.
        source: the files of the checkpoint.
        options: the options of a command, which say how it is loaded.
        data: what it will read. None: it must be a causal language model.
        tokenizer: the tokenizer or processor of a model in memory.
        message: called with a sentence if the weights must be streamed.
        has_reader: whether its tokenizer or processor is needed.
        may_stream: whether weights that do not fit into memory may be streamed.
    """
    inputs, stack, reader = data or FoundData(), getattr(options, "stack", None), None
    if source is None:
        for name in options.given():
            if name in ABOUT_FILES:
                raise InputError(f"{name} applies to models that are loaded from disk; the model is in memory already")
        name = getattr(model, "name_or_path", "") or type(model).__name__
        require_kind(type(model), model.config, name, inputs)
        if has_reader:
            reader = own_reader(tokenizer, inputs.kind)
        whole = prepared(wrap(model, name), inputs, stack)
        return Described(None, whole, model.config, reader, Placement(), inputs, stack)
    if tokenizer is not None:
        raise InputError(
            f"{source.target} is on disk, and its tokenizer must be a directory, got {type(tokenizer).__name__}; save "
            "the tokenizer and give its directory"
        )
    placement = Placement.of(options)
    config = load_config(source, placement, data)
    chosen, objective = loader_of(config, source)
    if data is None and (objective != "loss" or getattr(config, "is_encoder_decoder", False)):
        raise CheckpointError(
            f"{source.target} is a {config.model_type} model; this command needs a causal language model"
        )
    if has_reader:
        reader = load_reader(source, placement, inputs.kind)
    if may_stream:
        placement = fitted(source, config, placement, message)
    whole = prepared(describe_model(source, config, chosen, objective, placement), inputs, stack)
    return Described(source, whole, config, reader, placement, inputs, stack)


def opened(described: Described, message: Callable[[str], None] = no_message) -> Checkpoint:
    """Load the weights of a model; those of a model in memory are checked."""
    source, whole = described.source, described.whole
    if source is None:
        refuse_infinite(whole.model, whole.name)
        return whole
    message(f"loading {source.target}")
    checkpoint = load_model(source, described.config, described.placement)
    return prepared(checkpoint, described.data, described.stack)


def describe_model(source: Source, config: Any, chosen: Any, objective: str, placement: Placement) -> Checkpoint:
    """Return a model on the device `meta`, in the dtype that it would be loaded in."""
    name, dtype = source.target, placement.torch_dtype()
    if not isinstance(dtype, torch.dtype):
        has_files = source.gguf is not None or bool(weight_files(source))
        stored = stored_dtype(config, source) if has_files else getattr(config, "dtype", None)
        dtype = stored if isinstance(stored, torch.dtype) else torch.float32
    model = built_model(name, config, chosen, allows(placement, "code"), dtype=dtype)
    return wrap(model, name, source, objective)


@dataclass(frozen=True)
class SpeechReader:
    """What a model of speech is read through; the processors of transformers have the same attributes."""

    feature_extractor: Any
    tokenizer: Any


def own_reader(own: Any, kind: InputKind) -> Any:
    """Return `own`, the tokenizer or the processor that is given with a model in memory; raise if it cannot be one."""
    if own is None:
        what = {IMAGES: "image processor", RECORDINGS: "processor"}.get(kind, "tokenizer")
        raise InputError(f"a model in memory needs its {what}; give tokenizer=…")
    if kind is RECORDINGS and not (hasattr(own, "feature_extractor") and hasattr(own, "tokenizer")):
        raise InputError(
            f"tokenizer must be the processor of the model, with a feature extractor and a tokenizer, got "
            f"{type(own).__name__}; give a WhisperProcessor"
        )
    return own


def load_reader(source: Source, placement: Placement, kind: InputKind) -> Any:
    """Return the tokenizer or the processor of a checkpoint."""
    require_processor(source, kind)
    if kind is IMAGES:
        return _processor(source, placement, kind, transformers().AutoImageProcessor)
    tokenizer = load_tokenizer(source, placement)
    if kind is not RECORDINGS:
        return tokenizer
    return SpeechReader(_processor(source, placement, kind, transformers().AutoFeatureExtractor), tokenizer)


def _processor(source: Source, placement: Placement, kind: InputKind, loader: Any) -> Any:
    code = allows(placement, "code")
    return attempt(
        source.target,
        kind.processor[0],
        lambda: loader.from_pretrained(source.folder, trust_remote_code=code, local_files_only=True),
    )


def prepared(checkpoint: Checkpoint, data: FoundData, stack: str | None) -> Checkpoint:
    """Return the checkpoint with what is measured on these inputs: in one stack, or the loss of the labels."""
    if data.kind.two_stacks:
        return with_stack(checkpoint, stack or STACKS[0])
    return replace(checkpoint, objective="labels") if data.labels else checkpoint
