"""Refuse inputs that a model does not read: by its files, before transformers is imported, and later by its class."""

from collections.abc import Mapping
from typing import Any

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.config_file import read_json
from depthgauge.checkpoints.inputs.found_data import FoundData
from depthgauge.checkpoints.inputs.kinds import IMAGES, LABELLED, PAIRS, RECORDINGS, TEXT, InputKind, predicts_label
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.source import Source, require_streamable


def require_fit(
    data: FoundData, name: str, architecture: str, main: str | None, has_two: bool, has_tower: bool = False
) -> None:
    """Raise unless a model reads the inputs that were found.

    Args:
        data: the inputs.
        name: what the user calls the model.
        architecture: its class.
        main: its main input; None if that is not known yet.
        has_two: whether it is an encoder–decoder model.
        has_tower: whether it has a part for images beside others.
    """
    kind = data.kind
    if kind is IMAGES and has_tower:
        raise CheckpointError(
            f"{name} is a {architecture} with a vision tower and other parts; save the tower alone, for example with "
            "CLIPVisionModel.from_pretrained(…).save_pretrained(…), and give its directory"
        )
    if main is None:
        unfit = {TEXT: has_two, LABELLED: has_two, PAIRS: not has_two}.get(kind, False)
        main = TEXT.main if unfit else kind.main
    readers = {TEXT.main: PAIRS if has_two else TEXT, IMAGES.main: IMAGES, RECORDINGS.main: RECORDINGS}
    needed = readers.get(main)
    if needed is None:
        raise CheckpointError(f"{name} is a {architecture}, which reads {main}; give a model of text, images or speech")
    if needed is not (TEXT if kind is LABELLED else kind):
        found = f"; {data.name} has {kind.shown}" if data.paths else ""
        raise CheckpointError(f"{name} is a {architecture}, which reads {needed.shown}; {needed.advice}{found}")
    if data.labels and not predicts_label(architecture):
        raise InputError(
            f"labels need a model with a classification head for whole inputs, and {name} is a {architecture}; leave "
            "the file of labels out"
        )


def class_in_config(source: Source | None, model: Any = None) -> str:
    """Return the class that a configuration names, or that of a model in memory; empty if none is named."""
    if source is None:
        return type(model).__name__
    if source.gguf is not None:
        return ""
    named = read_json(source.folder / "config.json", source.target).get("architectures")
    return str((named or [""])[0])


def check_files(source: Source, options: Any, data: FoundData) -> None:
    """Raise if the files of a checkpoint show that the model does not read the inputs that were found.

    What they do not show is checked when transformers is imported: see `require_kind`.
    """
    if options.stream:
        require_streamable(source, options)
    if source.gguf is None:
        raw = read_json(source.folder / "config.json", source.target)
        named, labels = class_in_config(source), raw.get("label2id")
        main = _main_input(raw, named)
        if named and not raw.get("auto_map"):
            has_two, tower = bool(raw.get("is_encoder_decoder")), raw.get("vision_config") is not None
            require_fit(data, source.target, named, main, has_two, tower)
        if isinstance(labels, dict) and all(type(one) is int for one in labels.values()):
            data.label_indices(labels, len(labels))
        if main == data.kind.main:
            require_processor(source, data.kind)


def require_processor(source: Source, kind: InputKind) -> None:
    """Raise if a checkpoint lacks what reads inputs of this kind, beside a tokenizer."""
    noun, files = kind.processor
    if files and not any((source.folder / file).is_file() for file in files):
        raise CheckpointError(f"{source.target} contains no {noun}, expected {files[0]}; download it with the model")


def _main_input(raw: Mapping[str, Any], architecture: str) -> str | None:
    """Return the main input of a model where its configuration leaves no doubt."""
    if architecture.endswith("ForCausalLM"):
        return TEXT.main
    if "patch_size" in raw and not raw.keys() & {"vocab_size", "text_config"}:
        return IMAGES.main
    return RECORDINGS.main if "num_mel_bins" in raw else None
