"""The self-attention network.

    attention_h(X) = P_h X V_h,   P_h = softm(β (X Q_h + b_h) K_hᵀ Xᵀ + B_h)
    layer(X)       = f(X + Σ_h attention_h(X))
    S              = layer_{L−1} ∘ … ∘ layer_0

softm acts on each row; in a causal network row i contains the tokens 0 to i only. Without skip connections, the term X
in layer(X) is absent. b_h and B_h are optional biases of queries and positions, and an output bias may be added. f is
the identity or an MLP that acts on each token. Tokens are rows of X. Layers and heads are numbered from 0.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError, require_positive, unknown_name
from depthgauge.base.format import counted, number
from depthgauge.theory.linalg.rounding import largest_not_above

BLOCK_ENTRIES = 2**22
"""The default number of scores in one block of `score_blocks` (32 MB in float64)."""


@dataclass(frozen=True, eq=False, repr=False)
class LayerTrace(ArrayRecord):
    """The states of one layer, and its scores on demand.

    `before` and `after` are X_ℓ and X_{ℓ+1}. `attention_input` is the input of the attention, which is LayerNorm(X_ℓ)
    in a pre-norm network and X_ℓ otherwise. `query` and `key` are those of `Layer.project` for this input.
    """

    index: int
    before: Float[Tensor, "*batch n d"]
    after: Float[Tensor, "*batch n d"]
    attention_input: Float[Tensor, "*batch n d"]
    query: Float[Tensor, "*batch heads n k"]
    key: Float[Tensor, "*batch heads n k"]
    scale: float
    causal: bool

    def score_blocks(
        self, query: Float[Tensor, "*batch heads n k"] | None = None, entries: int = BLOCK_ENTRIES
    ) -> Iterator["ScoreBlock"]:
        """Yield the scores β Q Kᵀ of all heads in blocks of rows, with about `entries` numbers per block at most.

        `query` replaces the queries of the trace if given, without position biases if it is narrower. Masked entries
        are −∞.
        """
        query = self.query if query is None else query
        key, n = self.key[..., : query.shape[-1]], self.key.shape[-2]
        rows = max(1, entries // max(1, query[..., :1, :1].numel() * n))
        columns = torch.arange(n, device=query.device)
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            scores = (query[..., start:stop, :] @ key.mT) * self.scale
            visible = None
            if self.causal:
                visible = columns <= columns[start:stop, None]
                scores = scores.masked_fill(~visible, float("-inf"))
            yield ScoreBlock(start, stop, scores, visible)


@dataclass(frozen=True, eq=False, repr=False)
class ScoreBlock(ArrayRecord):
    """Rows `start` to `stop` of the scores of every head. `visible` is the causal mask of these rows, or None."""

    start: int
    stop: int
    scores: Float[Tensor, "*batch heads rows n"]
    visible: Bool[Tensor, "rows n"] | None

    def row_ranges(self) -> Float[Tensor, "*batch heads rows"]:
        """Return max_j − min_j over the visible entries of each row."""
        low = self.scores
        if self.visible is not None:
            low = low.masked_fill(~self.visible, float("inf"))
        return self.scores.amax(dim=-1) - low.amin(dim=-1)


NORM_EPSILON = 1e-5


@runtime_checkable
class AttentionFunction(Protocol):
    """The signature of the `attention` argument of `forward`, as in torch's `scaled_dot_product_attention`."""

    def __call__(
        self,
        query: Float[Tensor, "*batch heads n k"],
        key: Float[Tensor, "*batch heads n k"],
        value: Float[Tensor, "*batch heads n d"],
        *,
        is_causal: bool,
        scale: float,
    ) -> Float[Tensor, "*batch heads n d"]:
        """Return softm(scale · query keyᵀ) value, with softm applied to each row."""


class Mlp(nn.Module):
    """The MLP f(x) = act(x W_in + b_in) W_out + b_out on each token; W_in is [d, m], W_out is [m, d]."""

    def __init__(self, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> None:
        super().__init__()
        self.w_in, self.b_in = nn.Parameter(w_in), nn.Parameter(b_in)
        self.w_out, self.b_out = nn.Parameter(w_out), nn.Parameter(b_out)

    def forward(self, x: Float[Tensor, "*batch n d"], activation: str) -> Float[Tensor, "*batch n d"]:
        """Apply the MLP to each token."""
        hidden = x @ self.w_in + self.b_in
        hidden = F.relu(hidden) if activation == "relu" else F.gelu(hidden)
        return hidden @ self.w_out + self.b_out


class Layer(nn.Module):
    """The weights of one layer. `SelfAttentionNetwork` checks their shapes.

    Args:
        query: Q, of shape [H, d, k].
        key: K, of shape [H, d, k].
        value: V, of shape [H, d, d].
        mlp: The MLP, or None.
        norm_weight: LayerNorm weights of shape [s, d], or None. s is 2 if the layer has an MLP and 1 otherwise.
        norm_bias: LayerNorm biases of shape [s, d], or None.
        query_bias: Added to the queries, of shape [H, k], or None. (A bias of the keys would change no weight.)
        output_bias: Added to the output of the attention, of shape [d], or None.
        position_bias: Added to the scores, of shape [H, N, N], or None; entry [h, i, j] is for query i and key j. The
            network then takes at most N tokens. In causal networks the entries j > i are not used.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mlp: Mlp | None = None,
        norm_weight: Tensor | None = None,
        norm_bias: Tensor | None = None,
        query_bias: Tensor | None = None,
        output_bias: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Parameter(query), nn.Parameter(key), nn.Parameter(value)
        self.mlp = mlp
        self.norm_weight, self.norm_bias = _optional(norm_weight), _optional(norm_bias)
        self.query_bias, self.output_bias = _optional(query_bias), _optional(output_bias)
        self.position_bias = _optional(position_bias)

    @property
    def heads(self) -> int:
        """H, the number of heads."""
        return self.query.shape[0]

    @property
    def key_dim(self) -> int:
        """k, the width of queries and keys."""
        return self.query.shape[2]

    @property
    def has_attention_bias(self) -> bool:
        """Whether the attention has a bias of any kind."""
        return any(bias is not None for bias in (self.query_bias, self.output_bias, self.position_bias))

    def copy(self) -> "Layer":
        """Return a deep copy without gradients."""
        made = deepcopy(self).requires_grad_(True)
        made.zero_grad()
        return made

    def normalize(self, x: Float[Tensor, "*batch n d"], sublayer: int, *, centers: bool) -> Float[Tensor, "*batch n d"]:
        """Apply LayerNorm (`centers`) or RMSNorm to each token: of sublayer 0 (attention) or 1 (MLP)."""
        assert self.norm_weight is not None
        assert self.norm_bias is not None
        gain, bias = self.norm_weight[sublayer], self.norm_bias[sublayer]
        if centers:
            return F.layer_norm(x, x.shape[-1:], gain, bias, NORM_EPSILON)
        return F.rms_norm(x, x.shape[-1:], gain, NORM_EPSILON) + bias

    def project(
        self, x: Float[Tensor, "*batch n d"], scale: float
    ) -> tuple[Float[Tensor, "*batch heads n w"], Float[Tensor, "*batch heads n w"]]:
        """Return queries and keys of all heads, each computed as one matrix product.

        They are X Q_h plus its bias, and X K_h. A position bias appends columns whose products are the bias divided by
        `scale`, so that it applies to every attention function.
        """
        query, key = self._project_heads(x, self.query), self._project_heads(x, self.key)
        query = query if self.query_bias is None else query + self.query_bias[:, None, :]
        if self.position_bias is None:
            return query, key
        n = x.shape[-2]
        bias = (self.position_bias[:, :n, :n] / scale).expand(*query.shape[:-1], n)
        one_hot = torch.eye(n, dtype=key.dtype, device=key.device).expand(*key.shape[:-1], n)
        return torch.cat([query, bias], -1), torch.cat([key, one_hot], -1)

    def _project_heads(
        self, x: Float[Tensor, "*batch n d"], weight: Float[Tensor, "heads d k"]
    ) -> Float[Tensor, "*batch heads n k"]:
        together = x @ weight.transpose(0, 1).flatten(1)
        return together.reshape(*x.shape[:-1], self.heads, self.key_dim).transpose(-2, -3)

    def attend(
        self, x: Float[Tensor, "*batch n d"], attention: AttentionFunction, *, is_causal: bool, scale: float
    ) -> Float[Tensor, "*batch n d"]:
        """Return Σ_h P_h X V_h.

        All heads use X as values. One matrix product then applies all V_h and sums over h.
        """
        q, k = self.project(x, scale)
        shared = x.unsqueeze(-3).expand(*x.shape[:-2], self.heads, *x.shape[-2:])
        mixed = attention(q, k, shared, is_causal=is_causal, scale=scale)
        out = mixed.transpose(-2, -3).flatten(-2) @ self.value.flatten(0, 1)
        return out if self.output_bias is None else out + self.output_bias


def _optional(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor)


def softmax_attention(
    query: Float[Tensor, "*batch heads n k"],
    key: Float[Tensor, "*batch heads n k"],
    value: Float[Tensor, "*batch heads n d"],
    *,
    is_causal: bool,
    scale: float,
) -> Float[Tensor, "*batch heads n d"]:
    """Return softm(scale · query keyᵀ) value, computed by torch's fused kernel without storing the n×n scores.

    The kernel needs exactly one batch dimension, and keys and values of equal width. The narrower ones are padded with
    zeros, which does not change the result.
    """
    batch, (k, d) = query.shape[:-3], (query.shape[-1], value.shape[-1])
    query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    if k < d:
        query, key = F.pad(query, (0, d - k)), F.pad(key, (0, d - k))
    elif d < k:
        value = F.pad(value, (0, k - d))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
    return mixed[..., :d].reshape(*batch, *mixed.shape[1:-1], d)


Activation = Literal["relu", "gelu"]
Norm = Literal["none", "pre", "post", "pre-rms", "post-rms"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
NORMS: tuple[str, ...] = get_args(Norm)


class SelfAttentionNetwork(nn.Module):
    """A self-attention network with L layers, optionally with skip connections, causal masks, MLPs and norms.

    The network is a `torch.nn.Module`; `network(x)` maps inputs of shape [..., n, d] to outputs of the same shape.
    `len(network)` is L, and `network[i]` is layer i.

    Args:
        layers: The layers. All must have the same width d and dtype.
        scale: β, the factor of the scores. The default is 1/√k, where k is the width of queries and keys.
        skip: Whether the layers have a skip connection around the attention.
        causal: Whether a token attends only to itself and earlier tokens.
        activation: The activation of the MLPs, `"relu"` or `"gelu"`.
        norm: `"pre"` applies LayerNorm to the inputs of the attention and the MLP, `"post"` to their outputs (after the
            skip connection), `"none"` nowhere. `"pre-rms"` and `"post-rms"` do the same with RMSNorm.
        mlp_skip: Whether the layers have a skip connection around the MLP.
        name: A name for tables and reports.
        provenance: JSON-compatible facts about the origin of the network. `save_network` stores them.

    Raises:
        InputError: The shapes or dtypes of the weights do not fit together, or an argument is out of range.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        scale: float | None = None,
        skip: bool = True,
        causal: bool = False,
        activation: str = "relu",
        norm: str = "none",
        mlp_skip: bool = False,
        name: str = "network",
        provenance: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.skip, self.causal, self.mlp_skip = skip, causal, mlp_skip
        self.activation, self.norm = activation, norm
        self.name = name
        self.provenance = provenance or {}
        self.other_metadata: dict[str, str] = {}
        self._check()
        widths = sorted({layer.key_dim for layer in layers})
        if scale is None and len(widths) > 1:
            raise InputError(f"the layers have key widths {widths}, so scale has no default; give scale a number")
        default = 1.0 / math.sqrt(widths[0])
        self.scale = default if scale is None else require_positive("scale", scale, "β, the factor of the scores")

    def _check(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise unknown_name("activation", self.activation, ACTIVATIONS)
        if self.norm not in NORMS:
            raise unknown_name("norm", self.norm, NORMS)
        if len(self.layers) == 0:
            raise InputError("a network needs at least one layer, got none")
        dtype = self[0].query.dtype
        if dtype not in (torch.float64, torch.float32):
            raise InputError(f"a network must be float64 or float32, got weights of {dtype}; convert them")
        for index, layer in enumerate(self):
            for where, tensor, expected in _expected_shapes(layer, self.dim, self.norm):
                if tensor is None or tuple(tensor.shape) != expected:
                    given = "no tensor" if tensor is None else list(tensor.shape)
                    raise InputError(f"layers.{index}.{where} must have shape {list(expected)}, got {given}")
                if 0 in expected:
                    raise InputError(f"layers.{index}.{where} has shape {list(expected)}; no width may be 0")
                if tensor.dtype != dtype:
                    raise InputError(f"layers.{index}.{where} is {tensor.dtype} in a network of {dtype}; use one dtype")

    def __getitem__(self, index: int) -> Layer:
        layer = self.layers[index]
        assert isinstance(layer, Layer)
        return layer

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Layer]:
        return (self[index] for index in range(len(self)))

    @property
    def dim(self) -> int:
        """d, the width of a token."""
        return self[0].query.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self[0].query.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self[0].query.device

    @property
    def length(self) -> int | None:
        """The largest number of tokens that the position biases allow, or None: any number."""
        return min((len(layer.position_bias[0]) for layer in self if layer.position_bias is not None), default=None)

    @property
    def norm_place(self) -> Literal["none", "before", "after"]:
        """Where the norms are: before or after each sublayer, or nowhere."""
        if self.norm == "none":
            return "none"
        return "before" if self.norm.startswith("pre") else "after"

    @property
    def norm_centers(self) -> bool:
        """Whether the norms subtract the mean of a token: LayerNorm does, RMSNorm does not."""
        return self.norm in ("pre", "post")

    @property
    def has_mlp(self) -> bool:
        """Whether some layer has an MLP."""
        return any(layer.mlp is not None for layer in self)

    @property
    def has_attention_bias(self) -> bool:
        """Whether the attention of some layer has a bias."""
        return any(layer.has_attention_bias for layer in self)

    @property
    def eta(self) -> float:
        """η, the largest absolute entry of all Q, K and V."""
        return max(float(w.detach().abs().max()) for layer in self for w in (layer.query, layer.key, layer.value))

    def check_input(self, x: Tensor) -> None:
        """Raise `InputError` unless x has shape [..., n, d] with n ≥ 1, and the width and dtype of the network."""
        if not isinstance(x, Tensor):
            raise InputError(
                f"the input must be a torch tensor, got {type(x).__module__}.{type(x).__name__}; convert it, for "
                "example with torch.from_numpy(x)"
            )
        if x.ndim < 2 or x.shape[-1] != self.dim or x.shape[-2] < 1:
            raise InputError(f"the input must have shape [..., tokens, {self.dim}], got {list(x.shape)}")
        if self.length is not None and x.shape[-2] > self.length:
            raise InputError(f"the position biases are for up to {self.length} tokens, got {x.shape[-2]}")
        if x.dtype != self.dtype:
            raise InputError(
                f"the input is {x.dtype} but the network is {self.dtype}; convert one of them with .to(...)"
            )

    def forward(
        self, x: Float[Tensor, "*batch n d"], attention: AttentionFunction | None = None
    ) -> Float[Tensor, "*batch n d"]:
        """Return S(X).

        Args:
            x: X, of shape [..., n, d].
            attention: A replacement for softmax attention, with the signature of `AttentionFunction`.
        """
        self.check_input(x)
        for index in range(len(self)):
            x = self.step(index, x, attention)
        return x

    def step(
        self, index: int, x: Float[Tensor, "*batch n d"], attention: AttentionFunction | None = None
    ) -> Float[Tensor, "*batch n d"]:
        """Return X_{ℓ+1} = layer_ℓ(X_ℓ), where ℓ is `index`."""
        layer, read = self[index], self.attention_input(index, x)
        y = layer.attend(read, attention or softmax_attention, is_causal=self.causal, scale=self.scale)
        y = x + y if self.skip else y
        y = self.normalize(index, 0, y) if self.norm_place == "after" else y
        if layer.mlp is None:
            return y
        z = layer.mlp(self.normalize(index, 1, y) if self.norm_place == "before" else y, self.activation)
        z = y + z if self.mlp_skip else z
        return self.normalize(index, 1, z) if self.norm_place == "after" else z

    def normalize(self, index: int, sublayer: int, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """Apply the norm of sublayer 0 (attention) or 1 (MLP) of a layer to each token."""
        return self[index].normalize(x, sublayer, centers=self.norm_centers)

    def attention_input(self, index: int, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """Return the input of a layer's attention: the norm of X if norms are before the sublayers, X otherwise."""
        return self.normalize(index, 0, x) if self.norm_place == "before" else x

    def trace(self, x: Float[Tensor, "*batch n d"]) -> Iterator[LayerTrace]:
        """Yield a `LayerTrace` for each layer. Only one layer is in memory at a time."""
        self.check_input(x)
        for index in range(len(self)):
            with torch.no_grad():
                after = self.step(index, x)
                attention_input = self.attention_input(index, x)
                q, k = self[index].project(attention_input, self.scale)
            yield LayerTrace(index, x, after, attention_input, q, k, self.scale, self.causal)
            x = after

    def clip(self, eta: float) -> "SelfAttentionNetwork":
        """Return a copy with attention weights clipped to [−η, η]."""
        require_positive("eta", eta, "the largest |weight| after clipping")
        bound = largest_not_above(eta, self.dtype)
        return self._with_attention_weights(lambda w: w.clamp(-bound, bound))

    def rescale(self, eta: float) -> "SelfAttentionNetwork":
        """Return a copy with all attention weights multiplied by one factor, such that the largest |weight| is η."""
        require_positive("eta", eta, "the largest |weight| after rescaling")
        if self.eta == 0:
            raise InputError("cannot rescale a network whose attention weights are all zero")
        largest, bound = self.eta, largest_not_above(eta, self.dtype)
        return self._with_attention_weights(lambda w: (w / largest * bound).clamp(-bound, bound))

    def _with_attention_weights(self, change: Callable[[Tensor], Tensor]) -> "SelfAttentionNetwork":
        copy = self.copy()
        with torch.no_grad():
            for layer in copy:
                for weight in (layer.query, layer.key, layer.value):
                    weight.copy_(change(weight))
        return copy

    def copy(self) -> "SelfAttentionNetwork":
        """Return a deep copy without gradients."""
        made = deepcopy(self).requires_grad_(True)
        made.zero_grad()
        return made

    def describe(self) -> dict[str, Any]:
        """Return the shape and settings of the network, as in the result JSON."""
        settings = ("scale", "skip", "causal", "activation", "norm", "mlp_skip")
        return {
            "name": self.name,
            "layers": len(self),
            "heads": [layer.heads for layer in self],
            "dim": self.dim,
            "key_dim": [layer.key_dim for layer in self],
            "mlp": [None if layer.mlp is None else int(layer.mlp.w_in.shape[1]) for layer in self],
            **{name: getattr(self, name) for name in settings},
            "eta": self.eta,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def __repr__(self) -> str:
        return f"SelfAttentionNetwork({self.name!r}: {self.summary()})"

    def summary(self) -> str:
        """Return a one-line description."""
        heads = [layer.heads for layer in self]
        head_text = "–".join(map(str, sorted({min(heads), max(heads)})))
        switches = [
            "skip" if self.skip else "no skip",
            *(["causal"] if self.causal else []),
            *(["attention biases"] if self.has_attention_bias else []),
            *(["MLP"] if self.has_mlp else []),
            *([f"{self.norm}-norm" if self.norm_centers else self.norm] if self.norm != "none" else []),
        ]
        return (
            f"{counted(len(self), 'layer')} × {head_text} {'head' if max(heads) == 1 else 'heads'}, dim {self.dim}, "
            f"largest weight η = {number(self.eta, 4)}, {', '.join(switches)}"
        )


def _expected_shapes(layer: Layer, d: int, norm: str) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """Yield name in the file, tensor and expected shape for each tensor of a layer."""
    if layer.query.ndim != 3 or 0 in layer.query.shape:
        raise InputError(f"query must have shape [heads, dim, key width] without zeros, got {list(layer.query.shape)}")
    heads, _, k = layer.query.shape
    yield "query", layer.query, (heads, d, k)
    yield "key", layer.key, (heads, d, k)
    yield "value", layer.value, (heads, d, d)
    if layer.query_bias is not None:
        yield "query_bias", layer.query_bias, (heads, k)
    if layer.output_bias is not None:
        yield "output_bias", layer.output_bias, (d,)
    if layer.position_bias is not None:
        yield "position_bias", layer.position_bias, (heads, *2 * (layer.position_bias.shape[-1],))
    if layer.mlp is not None:
        m = layer.mlp.w_in.shape[-1]
        yield "mlp.in", layer.mlp.w_in, (d, m)
        yield "mlp.in_bias", layer.mlp.b_in, (m,)
        yield "mlp.out", layer.mlp.w_out, (m, d)
        yield "mlp.out_bias", layer.mlp.b_out, (d,)
    if norm != "none":
        sublayers = 1 if layer.mlp is None else 2
        yield "norm.weight", layer.norm_weight, (sublayers, d)
        yield "norm.bias", layer.norm_bias, (sublayers, d)


def require_network(value: object, name: str = "network") -> SelfAttentionNetwork:
    """Return `value` if it is a network, else raise InputError that says how to load one."""
    if isinstance(value, SelfAttentionNetwork):
        return value
    hint = f"load it with load_network({value!r})" if isinstance(value, str | PathLike) else "see random_network"
    raise InputError(f"{name} must be a SelfAttentionNetwork, got {type(value).__name__}; {hint}")
