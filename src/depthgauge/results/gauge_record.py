"""What `gauge` is asked to do and what it finds, as records, with the verdicts on networks and checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from depthgauge.base.errors import InputError, require_count, require_radius, require_seed, unknown_name
from depthgauge.base.format import counted, number
from depthgauge.base.frames import frame, html_facts
from depthgauge.results.labels import CENTERS, DEFAULT_WHAT_IFS, EXPERT, NORMS, SCORES, WHAT_IFS
from depthgauge.results.record import (
    RARE,
    Count,
    Measured,
    Number,
    Record,
    ResultError,
    annotation_of,
    combine_options,
    load_document,
    read,
)

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


# --- One gauged network: measures per layer and head, the sandwich per method, effective depth ------------------------


class ResidualSize(Record, frozen=True, kw_only=True):
    """‖Res(X)‖ and ‖Res(X)‖/‖X‖ of one state in one norm: means over inputs, and the spread of the ratio."""

    value: Measured = None
    ratio: Measured
    ratio_std: Measured


class ResidualNorms(Record, frozen=True, kw_only=True):
    """The residual of one state about one centre, in every norm."""

    max: ResidualSize
    frobenius: ResidualSize
    composite: ResidualSize

    def __getitem__(self, norm: str) -> ResidualSize:
        return getattr(self, norm)  # type: ignore[no-any-return]


class Residual(Record, frozen=True, kw_only=True):
    """The residual of one state, about the mid-range and about the mean of the tokens."""

    midrange: ResidualNorms
    mean: ResidualNorms

    def __getitem__(self, center: str) -> ResidualNorms:
        return getattr(self, center)  # type: ignore[no-any-return]


class NetworkState(Record, frozen=True, kw_only=True):
    """A state X_ℓ of a network; as `input`, X_0."""

    residual: Residual


class NetworkHead(Record, frozen=True, kw_only=True):
    """One head measured on the inputs, and the sizes of its weights (see `results.labels.HEAD_MEASURES`)."""

    index: Count
    score_range: Measured
    balance: Measured
    tv_mean: Measured
    tv_max: Measured
    entropy: Measured
    contraction: Measured
    contraction_bound: Measured
    eta: Measured
    value_col: Measured
    l1: Measured
    dong_beta: Measured


class NetworkLayer(Record, frozen=True, kw_only=True):
    """One layer: its heads, and the residual of the state it returns."""

    index: Count
    residual: Residual
    heads: tuple[NetworkHead, ...]

    def row(self) -> dict[str, Any]:
        """Return the row of the layer in the table of layers."""
        return residual_columns(self.residual)


class NetworkDescription(Record, frozen=True, kw_only=True):
    """The shape of a network."""

    name: str = ""
    layers: Count
    heads: tuple[Count, ...]
    dim: Count
    key_dim: tuple[Count, ...]
    mlp: tuple[Count | None, ...]
    scale: Number
    skip: bool
    causal: bool
    activation: str
    norm: str
    mlp_skip: bool
    eta: Measured
    dtype: str


class Sandwich(Record, frozen=True, kw_only=True):
    """One method's shallower network and the bounds on its error, or the reason why the method does not apply.

    - `refused`: the reason; absent (`UNSET`, which is falsy) where the method applies.
    - `lower` ≤ sup |S(X) − S'(X)| ≤ `upper` over all inputs of the `set`; `upper` is None where no finite bound was
      proved, and `lost_at` is then the layer at which the bounds overflowed.
    - `share[k][h]`: the part of the bound that head h of layer k contributes.
    - `methods`: how the bound was proved. `notes`: what the proof left out.
    """

    method: str
    refused: str | UnsetType = UNSET
    layers_after: Count | None = None
    set: str | None = None
    radius: Measured = None
    tokens: Count | None = None
    effort: str | None = None
    upper: Measured = None
    lower: Measured = None
    ratio: Measured = None
    methods: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    share: tuple[tuple[Measured, ...], ...] = ()
    lost_at: Count | None = None
    seconds: Measured = None
    attack_seconds: Measured = None

    def __post_init__(self) -> None:
        if self.refused is UNSET and (self.layers_after is None or self.lower is None or not self.methods):
            raise ValueError("expected either refused, or layers_after, lower and methods")

    def summary(self) -> Mapping[str, str]:
        """Return the method and its bounds."""
        bounds = {"lower": number(self.lower), "upper": number(self.upper)}
        return {"method": repr(self.method)} | ({"refused": repr(self.refused)} if self.refused else bounds)


class DepthRow(Record, frozen=True, kw_only=True):
    """The effective depth at one tolerance, proved for every input (`certified`) or measured on the inputs.

    - `method`: `fold`, the name of a closed form, or `none` if every layer is kept
    - `status`: `proved`, `refuted` (every shallower network that was tried exceeds the tolerance on an input that was
      found), `undecided` or `measured`
    - `tried`: the number of shallower networks that were tried
    """

    tolerance: Number
    certified: bool
    layers: Count
    kept: tuple[Count, ...]
    folded: tuple[tuple[Count, ...], ...]
    error: Measured
    method: str = "fold"
    status: str | None = None
    tried: Count = 0


class PrintedTheorem(Record, frozen=True, kw_only=True):
    """The bound that Theorem D.1 of paper A prints for this network, and whether its conditions hold."""

    printed_bound: Measured
    printed_log10: Measured
    printed_applies: bool
    printed_conditions: dict[str, bool] = msgspec.field(default_factory=dict)


class CollapseRecord(Record, frozen=True, kw_only=True):
    """The result of `depthgauge collapse`: one surrogate, the sandwich on its error, and Theorem D.1 of paper A.

    The keys are those of `Sandwich` and `PrintedTheorem`, with `layers_before`. For sequences of tokens, `about` says
    which, and `exhaustive` whether all of them were tried for the lower bound.
    """

    method: str
    layers_before: Count
    layers_after: Count
    set: str
    radius: Measured
    tokens: Count | None
    effort: str
    upper: Measured
    lower: Measured
    ratio: Measured
    methods: tuple[str, ...]
    notes: tuple[str, ...]
    share: tuple[tuple[Measured, ...], ...]
    lost_at: Count | None
    seconds: Measured
    attack_seconds: Measured
    printed_bound: Measured
    printed_log10: Measured
    printed_applies: bool
    printed_conditions: dict[str, bool]
    exhaustive: bool = False
    about: str = ""

    def sandwich(self) -> Sandwich:
        """Return the bounds alone."""
        return Sandwich(**{name: getattr(self, name) for name in Sandwich.__struct_fields__ if name != "refused"})

    def printed(self) -> PrintedTheorem:
        """Return the printed theorem alone."""
        return PrintedTheorem(**{name: getattr(self, name) for name in PrintedTheorem.__struct_fields__})


class GaugedSubject(Record, frozen=True, kw_only=True):
    """What every gauged network and checkpoint has: a name, the verdict, and `layers` with `heads`."""

    name: str
    verdict: str

    def summary(self) -> Mapping[str, str]:
        """Return the name and the verdict."""
        return {"name": repr(self.name), "verdict": repr(self.verdict)}

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of the `layers` or the `heads` table as flat dictionaries."""
        layers: Any = self.layers  # type: ignore[attr-defined]  # every kind of subject declares its own
        if table == "layers":
            return [{"subject": self.name, "layer": layer.index, **layer.row()} for layer in layers]
        return [
            {"subject": self.name, "layer": layer.index, "head": head.index}
            | {name: getattr(head, name) for name in head.__struct_fields__ if name not in ("index", "static")}
            for layer in layers
            for head in layer.heads
        ]


class NetworkSubject(GaugedSubject, frozen=True, kw_only=True, tag_field="kind", tag="network"):
    """One gauged network."""

    network: NetworkDescription
    radius: Number
    input: NetworkState
    layers: tuple[NetworkLayer, ...]
    collapse: tuple[Sandwich, ...]
    depth: tuple[DepthRow, ...]
    printed: PrintedTheorem


def residual_columns(residual: Residual | None) -> dict[str, Any]:
    """Return `residual_CENTER_NORM` → ratio for every centre and norm; nothing where no residual was measured."""
    if residual is None:
        return {}
    return {f"residual_{center}_{norm}": residual[center][norm].ratio for center in CENTERS for norm in NORMS}


# --- One gauged checkpoint: heads, layer scores and what-ifs with intervals -------------------------------------------


class HubModel(Record, frozen=True, kw_only=True):
    """A model on the Hugging Face hub: its repository, the GGUF file in it, the revision asked for, and its commit."""

    repo: str
    file: str | None = None
    revision: str | None = None
    commit: str

    @property
    def name(self) -> str:
        """The repository, with the file."""
        return self.repo if self.file is None else f"{self.repo}/{self.file}"

    @property
    def target(self) -> str:
        """The name with the commit, which the commands accept."""
        return f"{self.name}@{self.commit}"

    @property
    def short(self) -> str:
        """The name with the first digits of the commit."""
        return f"{self.name}@{self.commit[:7]}"


class CheckpointDescription(Record, frozen=True, kw_only=True):
    """The shape of a checkpoint. `objective` is `loss` for decoders with a head and `states` for other models.

    `hub` is what the checkpoint is on the hub; None if it was given as a path. Of an encoder–decoder model, `stack` is
    the one that was gauged, whose layers are counted.
    """

    family: str = ""
    architecture: str
    objective: str
    layers: Count
    heads: Count
    kv_heads: Count
    dim: Count
    parameters: Count
    dtype: str
    device: str = ""
    context: Count | None = None
    hub: HubModel | None = None
    stack: str | None = None


class TextWindows(Record, frozen=True, kw_only=True):
    """What a checkpoint was gauged on: `windows` windows of `window` tokens of a text, or as many images.

    `kind` is `text`, `texts`, `images`, `pairs` or `recordings`; an image, a padded text with a label, or the padded
    side of a pair or of a recording with its transcript, becomes `window` tokens. `bos` says whether every window
    starts with the BOS token (None: the model has none), `bos_reason` says why.
    """

    kind: str = "text"
    source: str
    sha256: str = ""
    windows: Count
    window: Count
    tokens: Count | None = None
    bos: bool | None = None
    bos_reason: str | None = None

    def phrase(self) -> str:
        """Return `8 windows of 256 tokens`, `16 images`, `16 pairs` or `16 recordings`."""
        if self.kind != "text":
            return counted(self.windows, self.kind.removesuffix("s"))
        return f"{counted(self.windows, 'window')} of {self.window} tokens"


LEAST_WINDOWS = 4
"""A mean over fewer windows has no interval."""


class Interval(Record, frozen=True, kw_only=True):
    """A mean over windows and its 95 % confidence interval; None if there are fewer than `LEAST_WINDOWS`."""

    loss: Number
    low: Measured
    high: Measured


class RegimeDistance(Record, frozen=True, kw_only=True):
    """By how many orders of magnitude the weights must shrink until a proof of one layer within `tolerance` exists.

    `printed_*` is Theorem D.1 of paper A as printed, `corrected_*` is the bound of docs/math.md.
    """

    tolerance: Number = 0.1
    eta: Number
    printed_orders: Measured = None
    printed_eta: Measured = None
    corrected_orders: Number
    corrected_eta: Measured = None


class CheckpointState(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The state X_0 of a checkpoint; empty where no text was read."""

    residual: Residual | None = None


class CheckpointHead(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One head: its attention on the text, and the sizes of its weights. What was not measured is None.

    `static` has the error of the head's output for each static attention pattern, `static_best` the best of them.
    """

    index: Count
    score_range: Measured = None
    tv_mean: Measured = None
    tv_max: Measured = None
    first_mass: Measured = None
    entropy: Measured = None
    static: dict[str, Measured] | None = None
    static_best: str | None = None
    eta: Measured = None
    value_col: Measured = None
    dong_beta: Measured = None
    qk_norm: Measured = None
    qk_stable_rank: Measured = None
    ov_norm: Measured = None
    ov_stable_rank: Measured = None

    @property
    def static_error(self) -> float | None:
        """The error of the best static pattern."""
        return None if self.static is None or self.static_best is None else self.static.get(self.static_best)


class FastPlan(Record, frozen=True, kw_only=True):
    """Which heads of a layer can use fast attention: their indices, proved score bounds, and one line of text."""

    heads: tuple[Count, ...] = ()
    bounds: tuple[Measured, ...] = ()
    line: str


class ExpertLoss(Record, frozen=True, kw_only=True):
    """One expert: the interval of the loss without it, and the share of tokens that are routed to it."""

    index: Count
    what_if: Interval
    share: Number


class CheckpointLayer(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One layer. `what_if` has the interval per what-if, `scores` the value per layer score.

    `experts` are those of a mixture, if the what-if `expert` was asked for.
    """

    index: Count
    residual: Residual | None = None
    heads: tuple[CheckpointHead, ...]
    scores: dict[str, Measured]
    fast: FastPlan | None
    what_if: dict[str, Interval]
    experts: tuple[ExpertLoss, ...] = ()

    def row(self) -> dict[str, Any]:
        """Return the row of the layer in the table of layers."""
        row = {**residual_columns(self.residual), **self.scores}
        for kind, interval in self.what_if.items():
            row |= {kind: interval.loss, f"{kind}_low": interval.low, f"{kind}_high": interval.high}
        return row


class ScoreTrust(Record, frozen=True, kw_only=True):
    """The rank correlation of one layer score with the what-if it predicts, over the layers."""

    score: str
    what_if: str
    spearman: Measured
    layers: Count


class CheckpointSubject(GaugedSubject, frozen=True, kw_only=True, tag_field="kind", tag="model"):
    """One gauged checkpoint.

    `baseline` is the loss of the intact model, and `accuracy` its accuracy where inputs have labels. `unobserved` is
    why the attention weights of the model are not observable; None if they are, or were not asked for.
    """

    model: CheckpointDescription
    text: TextWindows | None
    regime: RegimeDistance | None
    baseline: Interval | None
    accuracy: Measured = None
    input: CheckpointState
    layers: tuple[CheckpointLayer, ...]
    scores: tuple[ScoreTrust, ...]
    notes: tuple[str, ...] = ()
    unobserved: str | None = None


# --- The result of `gauge`, its schema, and the reader of saved results -----------------------------------------------

SCHEMA = "depthgauge.gauge/1"
ADVICE = "give the file that `depthgauge gauge --out FILE` wrote"
TABLES = ("layers", "heads")

Subject = NetworkSubject | CheckpointSubject


class GaugeRecord(Record, frozen=True, kw_only=True):
    """What `gauge` found: one subject per network or checkpoint (docs/formats.md names every key).

    - `seconds`: how long a run on a checkpoint took
    """

    schema: str = SCHEMA
    version: str
    settings: GaugeSettings
    subjects: tuple[Subject, ...]
    seconds: Number | None = None

    def summary(self) -> Mapping[str, str]:
        """Return the verdict of each subject, by its name."""
        return {subject.name: subject.verdict for subject in self.subjects}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'; '.join(f'{name}: {verdict}' for name, verdict in self.summary().items())})"

    def _repr_html_(self) -> str:
        return html_facts(type(self).__name__, self.summary(), ("subject", "verdict"))

    def to_frame(self, table: str = "layers") -> Any:
        """Return a `pandas.DataFrame` with one row per layer, or per head.

        Args:
            table: `layers` or `heads`.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        if table not in TABLES:
            raise unknown_name("table", table, TABLES)
        return frame([row for subject in self.subjects for row in subject.rows(table)])


def read_result(path: str | Path) -> GaugeRecord:
    """Read and check the file that `gauge --out` or `GaugeResult.save` wrote."""
    return check_result(load_document(path, ADVICE), str(path))


def check_result(document: Any, name: str = "the result") -> GaugeRecord:
    """Return a parsed result document as a record; keys that the schema does not know are ignored.

    A ResultError calls the document `name` and names the place that does not fit.
    """
    record = read(document, GaugeRecord, name, ADVICE)
    if not record.subjects:
        raise ResultError(f"{name} has no subjects, so there is nothing to show; {ADVICE}")
    return record


# --- Verdicts: the sentences that state what a result shows, and whether a printed theorem is violated ----------------

COSTS: Mapping[str, str] = {
    "loss": "of loss",
    "labels": "of loss",
    "logits": "of change in the logits",
    "embedding": "of change in the embedding",
    "states": "of change in the final states",
}
"""Objective → what skipping a layer costs."""


def unobserved_sentence(reason: str) -> str:
    """Say that the measures of heads are missing, and why."""
    return f"attention weights are not observable: {reason}"


def network_verdict(layers: int, radius: float, depths: Sequence[DepthRow], largest: float) -> str:
    """State how many layers are enough, within what error, and for which inputs: proved, refuted or undecided.

    `depths` is the effective depth per tolerance up to `largest`, for inputs with |entries| up to `radius`; it is empty
    where it is not defined.
    """
    deep, inputs = counted(layers, "layer"), f"for every input up to {number(radius, 6)}"
    if not depths:
        return f"{deep}; effective depth is not defined for this kind of network"
    if layers == 1:
        return f"{deep}; there is no shallower network to compare with"
    shallow = [depth for depth in depths if depth.certified and depth.layers < layers]
    if shallow:
        best = min(shallow, key=lambda depth: (depth.layers, depth.error or 0.0))
        enough = "1 is enough" if best.layers == 1 else f"{best.layers} are enough"
        return f"{deep}; {enough} within {number(best.error)} {inputs} (proved, {best.method})"
    widest = max((depth for depth in depths if depth.certified), key=lambda depth: depth.tolerance)
    within = number(largest, 6)
    if widest.status == "refuted":
        return (
            f"{deep}; fewer are refuted: each of the {widest.tried} shallower networks tried is off by more "
            f"than {within} on an input up to {number(radius, 6)}"
        )
    return (
        f"{deep}; undecided: no shallower network is proved to stay within {within} {inputs}, and not all of "
        "them were refuted"
    )


def checkpoint_verdict(
    layers: int,
    objective: str,
    blocks: Mapping[int, Interval],
    trust: Sequence[ScoreTrust],
    *,
    measured: bool = True,
) -> str:
    """State which layers cost least and most to skip (`blocks`), and which layer score to trust.

    `measured` tells whether the model ran on inputs.
    """
    parts = [] if measured else ["only the weights were measured"]
    unit = COSTS.get(objective, objective)
    if blocks:
        least = min(blocks, key=lambda layer: blocks[layer].loss)
        most = max(blocks, key=lambda layer: blocks[layer].loss)
        low, high = number(blocks[least].loss, 2), number(blocks[most].loss, 2)
        parts.append(f"skipping layer {least} costs least ({low} {unit}), layer {most} most ({high})")
    ranked = [(row.spearman, row.score) for row in trust if row.spearman is not None]
    if ranked:
        best, score = max(ranked, key=lambda pair: pair[0])
        label = SCORES[score].label if score in SCORES else score
        trusted = f"the best layer score is {label} (rank correlation {best:.2f})"
        none = f"no layer score predicts the measured cost (rank correlations of at most {best:.2f})"
        parts.append(trusted if best > 0 else none)
    return "; ".join([counted(layers, "layer"), *parts])


def mean_caption(subject: CheckpointSubject) -> str:
    """Say over how many windows the what-ifs are means, and whether they have intervals."""
    text = subject.text
    mean = "Mean over windows of text" if text is None else f"Mean over {text.phrase()}"
    if any(found.low is not None for layer in subject.layers for found in layer.what_if.values()):
        return f"{mean}, with its 95 % confidence interval."
    noun = "windows" if text is None or text.kind == "text" else text.kind
    return f"{mean}; an interval needs {LEAST_WINDOWS} {noun}."


def violates_printed_theorem(row: Sandwich, printed: PrintedTheorem) -> bool:
    """Decide whether a result contradicts Theorem D.1 of paper A as printed.

    The theorem bounds the error of the network that it constructs, which is the method `last-layer`. It is violated
    where its conditions hold and an input was found on which that network is further off than the printed bound.
    """
    return (
        row.method == "last-layer"
        and printed.printed_applies
        and printed.printed_bound is not None
        and row.lower is not None
        and row.lower > printed.printed_bound
    )


def printed_bound_text(printed: PrintedTheorem) -> str:
    """Return the printed bound as a number, as a power of ten where it is beyond floating point, or `overflows`."""
    if printed.printed_bound is not None:
        return number(printed.printed_bound)
    return "overflows" if printed.printed_log10 is None else f"1e{printed.printed_log10:.0f}"
