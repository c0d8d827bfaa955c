"""Records of one gauged network: measures per layer and head, the sandwich per method, effective depth."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from depthgauge.base.format import number
from depthgauge.results.labels import CENTERS, NORMS
from depthgauge.results.record import Count, Measured, Number, Record


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
