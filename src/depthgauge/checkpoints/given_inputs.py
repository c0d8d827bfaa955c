"""Read what the user gave one by one, images, texts with labels, pairs or recordings, and prepare the model for it."""

from dataclasses import replace
from typing import Any

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.audio_files import load_speech_reader, read_audio
from depthgauge.checkpoints.block_lists import with_stack
from depthgauge.checkpoints.found_inputs import AudioFolder, ImageFolder, LabelledTexts, find_given
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.image_files import load_processor, read_images
from depthgauge.checkpoints.input_kinds import AUDIO, IMAGES, TEXT, read_kind, require_classifier
from depthgauge.checkpoints.load import Checkpoint, Placement, context_length, load_tokenizer
from depthgauge.checkpoints.pair_files import LONGEST, read_labelled, read_pairs
from depthgauge.checkpoints.source import Source
from depthgauge.results.gauge_options import STACKS


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
    """Read the images, texts, pairs or recordings that the options name for the model `name` through its `reader`."""
    keywords: dict[str, Any] = {"wanted": wanted, "seed": seed, "least": least, "advice": advice}
    require_classifier((getattr(config, "architectures", None) or ["model without a head"])[0], name, options)
    found = find_given(options)
    assert found is not None
    if isinstance(found, ImageFolder):
        return read_images(found, reader, config, **keywords)
    longest = LONGEST if options.window is None else options.window
    keywords["longest"] = min(longest, context_length(config) or longest)
    if isinstance(found, AudioFolder):
        return read_audio(found, reader, config, **keywords)
    if isinstance(found, LabelledTexts):
        return read_labelled(found, reader, config, **keywords)
    return read_pairs(found, reader, config, **keywords)


def prepared(checkpoint: Checkpoint, windows: GivenWindows, options: Any) -> Checkpoint:
    """Return the checkpoint with what is measured on these windows."""
    if windows.kind in ("pairs", "recordings"):
        return with_stack(checkpoint, options.stack or STACKS[0])
    return checkpoint if options.labels is None else replace(checkpoint, objective="labels")
