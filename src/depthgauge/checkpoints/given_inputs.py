"""Read what the user gave window by window, images, pairs or recordings, and prepare the model for it."""

from dataclasses import replace
from typing import Any

from depthgauge.checkpoints.audio_files import find_audio, load_speech_reader, read_audio
from depthgauge.checkpoints.block_lists import with_stack
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.image_files import (
    find_images,
    load_processor,
    read_images,
    require_labelled,
)
from depthgauge.checkpoints.load import (
    AUDIO,
    IMAGES,
    PAIRS,
    TEXT,
    Checkpoint,
    Placement,
    context_length,
    load_tokenizer,
    require_inputs,
    require_layers,
    require_pairs,
)
from depthgauge.checkpoints.pair_files import LONGEST, find_pairs, read_pairs
from depthgauge.checkpoints.source import Source
from depthgauge.errors import InputError, require_count
from depthgauge.results.gauge_options import STACKS


def read_kind(options: Any) -> str:
    """Return what the options of `gauge` or `shrink` give to the model: `TEXT`, `IMAGES`, `AUDIO` or `PAIRS`."""
    given = {IMAGES: options.images, AUDIO: options.audio, PAIRS: options.pairs}
    return next((kind for kind, value in given.items() if value is not None), TEXT)


def find_given(options: Any) -> None:
    """Raise if the images, pairs or recordings that the options name cannot be used, before a download."""
    if options.images is not None:
        find_images(options.images, options.labels)
    if options.pairs is not None:
        find_pairs(options.pairs)
    if options.audio is not None:
        find_audio(options.audio)


def require_kind(model: Any, name: str, options: Any) -> None:
    """Raise unless a model in memory, called `name`, reads what the options give."""
    kind = read_kind(options)
    require_pairs(type(model), model.config, name, kind)
    require_layers(model.config, name)
    require_inputs(type(model), name, kind)


def load_reader(source: Source | None, placement: Placement, options: Any, given: Any) -> Any:
    """Return the tokenizer or the processor: that of a checkpoint, or the one that is given with a model."""
    kind = read_kind(options)
    if source is not None:
        load: Any = {IMAGES: load_processor, AUDIO: load_speech_reader}.get(kind, load_tokenizer)
        return load(source, placement, given)
    what = {IMAGES: "image processor", AUDIO: "processor"}.get(kind, "tokenizer")
    if given is None:
        hint = ", or weights_only=True" if kind == TEXT and hasattr(options, "weights_only") else ""
        raise InputError(f"a model in memory needs its {what}; give tokenizer=…{hint}")
    if kind == AUDIO and not (hasattr(given, "feature_extractor") and hasattr(given, "tokenizer")):
        raise InputError(
            f"tokenizer must be the processor of the model, with a feature extractor and a tokenizer, got "
            f"{type(given).__name__}; give a WhisperProcessor"
        )
    return given


def read_given(
    options: Any, reader: Any, config: Any, name: str, *, wanted: int, seed: int, least: int = 1, advice: str = ""
) -> GivenWindows:
    """Read the images, pairs or recordings that the options name, through the `reader`, for the model called `name`."""
    keywords: dict[str, Any] = {"wanted": wanted, "seed": seed, "least": least, "advice": advice}
    if options.images is not None:
        folder = find_images(options.images, options.labels)
        require_labelled(folder, config, name)
        return read_images(folder, reader, config, **keywords)
    longest = LONGEST if options.window is None else options.window
    require_count("window", longest, "the most tokens of a source and of a target", least=2)
    longest = min(longest, context_length(config) or longest)
    if options.audio is not None:
        return read_audio(find_audio(options.audio), reader, config, longest=longest, **keywords)
    return read_pairs(find_pairs(options.pairs), reader, config, longest=longest, **keywords)


def prepared(checkpoint: Checkpoint, windows: GivenWindows, options: Any) -> Checkpoint:
    """Return the checkpoint with what is measured on these windows."""
    if windows.kind != "images":
        return with_stack(checkpoint, options.stack or STACKS[0])
    return checkpoint if options.labels is None else replace(checkpoint, objective="labels")
