"""The options of `gauge`, each declared once: the command line, the Python interface and the result all use these."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from depthgauge.base.errors import InputError, require_count, require_radius, require_seed, unknown_name
from depthgauge.results.labels import DEFAULT_WHAT_IFS, EXPERT, WHAT_IFS
from depthgauge.results.record import RARE, Record, annotation_of, combine_options

NETWORKS, CHECKPOINTS = "networks", "checkpoints"

NETWORK_DEFAULTS: Mapping[str, Any] = {"samples": 4, "tokens": 128, "radius": 1.0, "seed": 0}
CHECKPOINT_DEFAULTS: Mapping[str, Any] = {
    "tokens": 2048, "seed": 0, "what_if": "default", "bos": "auto", "dtype": "auto",
}  # fmt: skip
ABOUT_TEXT = ("text", "window", "tokens", "bos", "tokenizer", "sampled", "evaluate")
"""Options of `gauge` and `shrink` that models of other inputs have no use for."""
ABOUT_FILES = ("dtype", "device", "tokenizer")
"""Options about how a model is loaded; they may differ from those of a plan, and do not apply to a model in memory."""
STACKS = ("decoder", "encoder")
"""The stacks of an encoder–decoder model, the default first."""
BOTH = "both"
"""Both stacks, which only `shrink` takes: the blocks of the encoder are counted first, then those of the decoder."""
SAMPLES = 16
"""Images, texts with labels, pairs or recordings that a checkpoint is gauged on by default."""
DEFAULTS = {NETWORKS: NETWORK_DEFAULTS, CHECKPOINTS: CHECKPOINT_DEFAULTS}
"""Kind of target → default of each option that has one."""
PATHS = ("input", "text", "tokenizer")
"""Options that are paths."""
CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "float64", "float16", "bfloat16"),
    "bos": ("auto", "yes", "no"),
}
"""The values of options that have a few values only."""
ALLOWED = ("code", "pickle", "unused", "unread")
"""What `allow` may name: code of a checkpoint, pickled weights, unused weights, text that a model cannot read."""
STREAM, SPREAD, NONE = "stream", "spread", "none"
"""Values of `device` besides devices, and what stands for no text."""
_ANY, _NETWORKS, _CHECKPOINTS = (Meta(extra={"only": only}) for only in (None, NETWORKS, CHECKPOINTS))


class ModelOptions(Record, frozen=True, kw_only=True):
    """How a checkpoint is loaded and read: the options that all commands on checkpoints have.

    Attributes:
        bos: Start every window with the BOS token: yes, no, or auto  [default], which does what the tokenizer or the
            GGUF metadata says and otherwise measures.
        dtype: Number type: float32, bfloat16, …. By default it is float32 on a CPU, and the checkpoint's
            own on a GPU. If `shrink` writes a GGUF file, also the type of changed weights whose own type cannot be
            written, such as Q4_K: Q8_0  [default], Q5_1, F16, ….
        device: Device: cpu, cuda:1, spread, stream. By default it is a GPU if there is one. spread divides the model
            over all devices, as transformers does. stream, or stream:cuda:1, leaves the weights on the disk and brings
            one block at a time to the device, as is done where they do not fit.
        tokenizer: Directory of a tokenizer that replaces the one of the checkpoint.
        allow: Accept what is refused otherwise. Names, with commas between them: code, run Python code that comes with
            the checkpoint; pickle, read pickled weights (pytorch_model*.bin), without running code in them; unused,
            weights that no module of the model takes; unread, text that the model cannot read.
    """

    bos: Annotated[str | None, _CHECKPOINTS, RARE] = None
    dtype: Annotated[str | None, _CHECKPOINTS] = None
    device: Annotated[str | None, _CHECKPOINTS] = None
    tokenizer: Annotated[str | None, _CHECKPOINTS, RARE] = None
    allow: Annotated[str | None, _CHECKPOINTS, RARE] = None

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, by name."""
        default = {field.name: field.default for field in msgspec.structs.fields(self)}
        values = {name: getattr(self, name) for name in default}
        return {name: value for name, value in values.items() if value not in (None, default[name])}

    @property
    def gguf_type(self) -> str | None:
        """The type of changed weights in a GGUF file, if `dtype` is one."""
        return self.dtype if (self.dtype or "").isupper() else None

    @property
    def is_streamed(self) -> bool:
        """Whether the weights are asked to stay on the disk."""
        return (self.device or "").partition(":")[0] == STREAM

    @property
    def is_spread(self) -> bool:
        """Whether the model is asked to be divided over all devices."""
        return self.device == SPREAD


class GaugeOptions(ModelOptions, frozen=True, kw_only=True):
    """What `gauge` is asked to do. None means the default. `depthgauge gauge --help` shows the same text.

    The options about loading a model are those of `ModelOptions`.

    Attributes:
        samples: Number of inputs. Those of a network are random  [default: 4]; those of a checkpoint are images,
            labelled texts, pairs or recordings  [default: 16].
        tokens: Tokens of an input, or of all text. They are counted per input of a network  [default: 128], and in
            total for a checkpoint  [default: 2048].
        radius: Largest |entry| of the random inputs. They are uniform in this box, φ  [default: 1].
        seed: Seed of everything random  [default: 0].
        input: Read the inputs from this safetensors file. They are its tensor `x`, [tokens, dim] or [samples, tokens,
            dim].
        text: What to gauge on. For a model of text, a text file, or FILE.jsonl:FIELD, where FIELD is `text` or
            `messages` by default. For a classifier, JSON lines or CSV with text and label. For an encoder–decoder
            model, JSON lines with source and target. For a model of images, a folder of them, and beside it, if it
            classifies, a file with file_name and label. For a model of speech, a folder with a.wav and its transcript
            a.txt. none: read nothing, and report what the weights alone show  [default: a built-in text].
        stack: Stack of an encoder–decoder model: decoder  [default] or encoder.
        window: Tokens per window of text  [default: for 8 windows, from 64 to 512], or the most tokens of a labelled
            text, a source or a target  [default: 128].
        what_if: What to remove from each layer, or none. The parts are block,attention,mlp  [default], uniform,
            parallel, all; and expert, each expert of a mixture, which costs a pass per expert.
    """

    samples: Annotated[int | None, _ANY] = None
    tokens: Annotated[int | None, _ANY] = None
    radius: Annotated[float | None, _NETWORKS] = None
    seed: Annotated[int | None, _ANY] = None
    input: Annotated[str | None, _NETWORKS] = None
    text: Annotated[str | tuple[str, ...] | None, _CHECKPOINTS] = None
    stack: Annotated[str | None, _CHECKPOINTS, RARE] = None
    window: Annotated[int | None, _CHECKPOINTS, RARE] = None
    what_if: Annotated[str | None, _CHECKPOINTS] = None

    @property
    def weights_only(self) -> bool:
        """Whether nothing is read."""
        return self.text == NONE

    def with_defaults(self, kind: str) -> "GaugeOptions":
        """Return the options with the defaults for `networks` or `checkpoints` filled in."""
        return GaugeOptions(**{**DEFAULTS[kind], **self.given()})

    def check(self, kind: str, target: str) -> None:
        """Raise if an option is out of range, has no effect, or does not apply to `target`, which is of this kind."""
        other = {NETWORKS: "checkpoints (directories, .gguf files, hub names)", CHECKPOINTS: "network files"}[kind]
        noun = {NETWORKS: "a network", CHECKPOINTS: "a checkpoint"}[kind]
        for name in self.given():
            only = annotation_of(GaugeOptions, name).__metadata__[0].extra["only"]
            if only not in (None, kind):
                raise InputError(f"--{name.replace('_', '-')} applies to {other}; {target} is {noun}. Leave it out")
        require_count("samples", SAMPLES if self.samples is None else self.samples, "the number of inputs")
        tokens, least = self.with_defaults(kind).tokens or 0, 1 if kind == NETWORKS else 2
        require_count("tokens", tokens, "the number of tokens of an input, or of text in total", least)
        require_seed(self.seed or 0)
        require_radius(1.0 if self.radius is None else self.radius)
        for name in NETWORK_DEFAULTS:
            if self.input is not None and getattr(self, name) is not None:
                raise InputError(f"--{name} describes random inputs and --input reads them from a file; leave one out")
        if kind == CHECKPOINTS:
            check_common(self)
            chosen_kinds(self.what_if or "default")
            for name in self.given() if self.weights_only else ():
                if name in (*ABOUT_TEXT, "seed", "what_if") and name != "text":
                    flag = f"--{name.replace('_', '-')}"
                    raise InputError(f"{flag} applies to text, and --data none reads none; leave one of them out")


class GaugeSettings(GaugeOptions, frozen=True, kw_only=True):
    """The options of a finished gauge with their defaults filled in: with the target they reproduce the result.

    `target` is the path; None is the built-in pair. With `in_memory` it is the name of a network given as an object.
    """

    target: str | None = None
    in_memory: bool = False

    def given(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, without the target."""
        return {name: value for name, value in super().given().items() if name in GaugeOptions.__struct_fields__}


def allows(options: Any, what: str) -> bool:
    """Return whether the option `allow` names this one of `ALLOWED`."""
    return what in _names(options.allow or "")


def check_common(options: Any) -> None:
    """Raise if an option that several commands have is out of range."""
    shrinks = hasattr(options, "remove")
    for name, known in CHOICES.items():
        value, is_gguf = getattr(options, name), shrinks and name == "dtype" and options.gguf_type is not None
        if value is not None and value not in known and not is_gguf:
            raise unknown_name(name, value, known)
    for name in () if options.allow is None else _names(options.allow):
        if name not in ALLOWED:
            raise unknown_name("allow", name, ALLOWED)
    if options.window is not None:
        require_count("window", options.window, "the number of tokens in one window", least=2)
    stacks = (*STACKS, BOTH) if shrinks else STACKS
    if (stack := getattr(options, "stack", None)) is not None and stack not in stacks:
        raise unknown_name("stack", stack, stacks)
    if not 0.5 <= getattr(options, "confidence", 0.95) <= 0.9999:
        meaning = "it is the probability that the guarantee is true"
        raise InputError(f"confidence must be a number from 0.5 to 0.9999, got {options.confidence!r}; {meaning}")


def chosen_kinds(asked: str) -> tuple[str, ...]:
    """Return the what-ifs that `default`, `all`, `none` or a comma-separated list of names stands for.

    `expert` costs a pass per expert, so that only its name stands for it.
    """
    presets, names = {"default": DEFAULT_WHAT_IFS, "all": tuple(WHAT_IFS), "none": ()}, (*WHAT_IFS, EXPERT)
    if asked in presets:
        return presets[asked]
    wanted = _names(asked)
    for name in wanted:
        if name not in names:
            raise unknown_name("what-if", name, [*names, *presets])
    return tuple(kind for kind in names if kind in wanted)


def make_options(options: GaugeOptions | None, fields: dict[str, Any]) -> GaugeOptions:
    """Combine an options record with single options given by keyword; raise for unknown names and other types."""
    return combine_options(
        GaugeOptions, "gauge", options, fields, dict.fromkeys(PATHS, str) | {"text": _one_or_several}
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def path_list(paths: Any) -> list[str]:
    """Return one path, or several, as a list of strings."""
    return [str(path) for path in (paths if isinstance(paths, list | tuple) else [paths])]


def _one_or_several(paths: Any) -> str | list[str]:
    """Return one path as a string, and several as a list."""
    several = path_list(paths)
    return several[0] if len(several) == 1 else several
