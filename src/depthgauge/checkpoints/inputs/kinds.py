"""The table of input kinds: what each is, how it is found, which models read it, and which options apply to it.

`found_data` finds the files of a kind, `fits_model` refuses models that do not read it, and `read_data` makes windows
of it.
"""

from dataclasses import dataclass

from depthgauge.results.gauge_options import ABOUT_TEXT


@dataclass(frozen=True)
class InputKind:
    """A row of the table.

    - `name`: the name in results
    - `shown`: what it is, in sentences
    - `main`: the main input of the models that read it
    - `advice`: how to give it
    - `fields`: the fields of a JSONL file, or the columns of a CSV file, that it is found by
    - `options`: the options about text that apply to it
    - `two_stacks`: whether it is for encoder–decoder models, whose output is compared with a text
    - `processor`: what reads it beside a tokenizer or in place of it, and the files of which one describes it
    """

    name: str
    shown: str
    main: str
    advice: str
    fields: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    two_stacks: bool = False
    processor: tuple[str, tuple[str, ...]] = ("", ())


TEXT = InputKind("text", "text", "input_ids", "give it text with --data FILE", options=ABOUT_TEXT)
LABELLED = InputKind(
    "texts", "texts with labels", "input_ids", "give it JSON lines or CSV with text and label, with --data FILE",
    ("text", "label"), ("window", "tokenizer"),
)  # fmt: skip
PAIRS = InputKind(
    "pairs", "pairs of a source and a target", "input_ids",
    "give it JSON lines with source and target, with --data FILE.jsonl",
    ("source", "target"), ("window", "tokenizer"), two_stacks=True,
)  # fmt: skip
IMAGES = InputKind(
    "images", "images", "pixel_values", "give it a folder of images with --data DIR", ("file_name", "label"),
    processor=("image processor", ("preprocessor_config.json",)),
)  # fmt: skip
RECORDINGS = InputKind(
    "recordings", "recordings with transcripts", "input_features",
    "give it a folder of WAV files with transcripts, with --data DIR",
    options=("window", "tokenizer"), two_stacks=True,
    processor=("feature extractor", ("preprocessor_config.json", "processor_config.json")),
)  # fmt: skip


def is_classifier(architecture: str) -> bool:
    """Return whether a class has a classification head."""
    return "Classification" in architecture


def predicts_label(architecture: str) -> bool:
    """Return whether a class predicts one label for each input."""
    return is_classifier(architecture) and "ForToken" not in architecture
