"""What a model reads, and refusals of other inputs, without importing torch or transformers.

The class of a model says what its main input is. The class is read in the source of transformers, because importing it
takes seconds.
"""

import ast
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from typing import Any

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.config_file import read_json
from depthgauge.checkpoints.found_inputs import label_indices
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.source import Source, require_streamable

TEXT, IMAGES, AUDIO, PAIRS, LABELLED = "input_ids", "pixel_values", "input_features", "pairs", "labelled texts"
"""What models read: their main input, pairs of token ids, or token ids with labels."""
_PROCESSORS = {
    IMAGES: ("image processor", ("preprocessor_config.json",)),
    AUDIO: ("feature extractor", ("preprocessor_config.json", "processor_config.json")),
}
"""What reads an input → its name, and the files of which one describes it."""


def read_kind(options: Any) -> str:
    """Return what the options of `gauge` or `shrink` give to the model: `TEXT`, `IMAGES`, `AUDIO`, `PAIRS`, `LABELLED`.

    A file of labels without images has the texts too.
    """
    given = {IMAGES: options.images, AUDIO: options.audio, PAIRS: options.pairs, LABELLED: options.labels}
    return next((kind for kind, value in given.items() if value is not None), TEXT)


def check_reads(source: Source, options: Any, given: Any) -> None:
    """Raise if the files of a checkpoint show that the model does not read what the options give.

    `given` is what was found of it. What the files do not show, such as a class that is not in transformers, is checked
    when transformers is imported.
    """
    if options.stream:
        require_streamable(source, options)
    if source.gguf is not None:
        return
    raw, reads = read_json(source.folder / "config.json", source.target), read_kind(options)
    named = (raw.get("architectures") or [""])[0]
    found = main_input(named) if named and not raw.get("auto_map") else None
    if found is not None and found[0] in (TEXT, IMAGES, AUDIO):
        needed, has_two = found
        require_one_tower(raw.get("vision_config"), raw.get("model_type"), source.target, reads)
        has_two = raw.get("is_encoder_decoder", has_two)
        if has_two is not None:
            require_pairs(needed, bool(has_two), source.target, reads)
        require_inputs(needed, named, source.target, reads)
        require_classifier(named, source.target, options)
    labels = raw.get("label2id")
    if options.labels is not None and isinstance(labels, dict) and all(type(one) is int for one in labels.values()):
        label_indices(given, labels, len(labels))
    noun, files = _PROCESSORS.get(reads, ("", ()))
    if files and not any((source.folder / file).is_file() for file in files):
        raise CheckpointError(f"{source.target} contains no {noun}, expected {files[0]}; download it with the model")


def main_input(named: str) -> tuple[str, bool | None] | None:
    """Return the main input of a class of transformers, and whether it is an encoder–decoder model, if it says so.

    None if there is no such class, or if its source does not tell.
    """
    spec = util.find_spec("transformers")
    start, folder = f"class {named}(".encode(), Path(spec.origin or "").parent / "models" if spec else Path()
    for path in folder.glob("*/modeling_*.py"):
        if start in (text := path.read_bytes()):
            classes = {one.name: one for one in ast.parse(text).body if isinstance(one, ast.ClassDef)}
            settings = b"".join(one.read_bytes() for one in path.parent.glob("configuration_*.py"))
            has_two = None if b"is_encoder_decoder" in settings else False
            return _inherited(named, classes), has_two
    return None


def _inherited(name: str, classes: Mapping[str, ast.ClassDef]) -> str:
    """Return the main input that a class or the first of its bases names; `TEXT`, as in transformers, if none does."""
    if name not in classes:
        return TEXT
    for line in classes[name].body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if isinstance(target, ast.Name) and target.id == "main_input_name":
            value = getattr(line, "value", None)
            return str(value.value) if isinstance(value, ast.Constant) else ""
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name)]
    return next((found for base in bases if (found := _inherited(base, classes)) != TEXT), TEXT)


def require_one_tower(tower: object, kind: object, name: str, reads: str) -> None:
    """Raise if images are given to a model of this type, called `name`, that has a `tower` for them and other parts."""
    if reads == IMAGES and tower is not None:
        raise CheckpointError(
            f"{name} is a {kind} model with a vision tower and other parts; save the tower alone, for example with "
            "CLIPVisionModel.from_pretrained(…).save_pretrained(…), and give its directory"
        )


def require_pairs(needed: str, has_two: bool, name: str, reads: str) -> None:
    """Raise unless pairs are given to an encoder–decoder model, called `name`, and to no other.

    `needed` is its main input. A model of speech is given recordings instead.
    """
    if has_two and needed == TEXT and reads in (TEXT, AUDIO, LABELLED):
        raise CheckpointError(
            f"{name} is an encoder–decoder model; give it pairs of a source and a target with --pairs FILE.jsonl"
        )
    if not has_two and reads == PAIRS:
        raise CheckpointError(f"{name} is no encoder–decoder model, so it reads no pairs; leave --pairs out")


def require_inputs(needed: str, kind: str, name: str, reads: str) -> None:
    """Raise unless a model called `name`, whose class `kind` has the main input `needed`, reads what it is given."""
    if needed == (TEXT if reads in (PAIRS, LABELLED) else reads):
        return
    advice = {
        TEXT: f"give it text with --text, and leave {'--audio' if reads == AUDIO else '--images'} out",
        IMAGES: "give it images with --images DIR",
        AUDIO: "give it recordings and their transcripts with --audio DIR",
    }.get(needed, "give a model of text, images or speech")
    raise CheckpointError(f"{name} is a {kind}, which reads {needed}; {advice}")


def is_classifier(architecture: str) -> bool:
    """Return whether a class has a classification head."""
    return "Classification" in architecture


def require_classifier(architecture: str, name: str, options: Any) -> None:
    """Raise if labels are given to a model called `name` whose class does not predict one label for each input."""
    if options.labels is not None and (not is_classifier(architecture) or "ForToken" in architecture):
        raise InputError(
            f"--labels needs a model with a classification head for whole inputs, and {name} is a {architecture}; "
            "leave --labels out"
        )
