"""Records of one gauged checkpoint: heads, layer scores and what-ifs with intervals."""

from typing import Any

from depthgauge.base.format import counted
from depthgauge.results.network_subject import GaugedSubject, Residual, residual_columns
from depthgauge.results.record import Count, Measured, Number, Record


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
