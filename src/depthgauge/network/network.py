"""The self-attention network that is gauged.

    attention_h(X) = P_h X V_h,   P_h = softm(β X Q_h K_hᵀ Xᵀ)            (rows; a causal row sees itself and earlier)
    layer(X)       = f(X + Σ_h attention_h(X))                            (the X is absent without skip connections)
    S              = layer_{L−1} ∘ … ∘ layer_0

f is the identity, or an MLP that acts on each token. Tokens are rows; layers and heads count from 0.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge._format import number
from depthgauge.errors import InputError, require_positive, unknown_name
from depthgauge.linalg.rounding import largest_not_above
from depthgauge.network.trace import LayerTrace

Activation = Literal["relu", "gelu"]
Norm = Literal["none", "pre", "post"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)
NORMS: tuple[str, ...] = get_args(Norm)
NORM_EPSILON = 1e-5


@runtime_checkable
class AttentionFunction(Protocol):
    """What `forward(x, attention=…)` calls: the shapes and meaning of `scaled_dot_product_attention`."""

    def __call__(
        self,
        query: Float[Tensor, "*batch heads n k"],
        key: Float[Tensor, "*batch heads n k"],
        value: Float[Tensor, "*batch heads n d"],
        *,
        is_causal: bool,
        scale: float,
    ) -> Float[Tensor, "*batch heads n d"]:
        """Return softm(scale · query keyᵀ) value, row by row."""


class Mlp(nn.Module):
    """f(x) = act(x W_in + b_in) W_out + b_out on every token, plus x when `skip` is set."""

    def __init__(
        self,
        w_in: Tensor,  # [d, m]
        b_in: Tensor,  # [m]
        w_out: Tensor,  # [m, d]
        b_out: Tensor,  # [d]
    ) -> None:
        super().__init__()
        self.w_in, self.b_in = nn.Parameter(w_in), nn.Parameter(b_in)
        self.w_out, self.b_out = nn.Parameter(w_out), nn.Parameter(b_out)

    def forward(self, x: Float[Tensor, "*batch n d"], activation: str) -> Float[Tensor, "*batch n d"]:
        """Apply the MLP to every token."""
        hidden = x @ self.w_in + self.b_in
        hidden = F.relu(hidden) if activation == "relu" else F.gelu(hidden)
        return hidden @ self.w_out + self.b_out


class Layer(nn.Module):
    """The weights of one layer: Q, K [H, d, k], V [H, d, d], and where present an MLP and LayerNorm weights [s, d]."""

    def __init__(
        self,
        query: Tensor,  # [H, d, k]; weights may come from outside, so the network checks them when it is built
        key: Tensor,  # [H, d, k]
        value: Tensor,  # [H, d, d]
        mlp: Mlp | None = None,
        norm_weight: Tensor | None = None,  # [s, d]
        norm_bias: Tensor | None = None,  # [s, d]
    ) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Parameter(query), nn.Parameter(key), nn.Parameter(value)
        self.mlp = mlp
        self.norm_weight = None if norm_weight is None else nn.Parameter(norm_weight)
        self.norm_bias = None if norm_bias is None else nn.Parameter(norm_bias)

    @property
    def heads(self) -> int:
        """H, the number of heads."""
        return self.query.shape[0]

    @property
    def key_dim(self) -> int:
        """k, the width of queries and keys."""
        return self.query.shape[2]

    def copy(self) -> "Layer":
        """A deep copy that shares nothing."""

        def own(weight: Tensor | None) -> Tensor | None:
            return None if weight is None else weight.detach().clone()

        attention = [weight.detach().clone() for weight in (self.query, self.key, self.value)]
        mlp = None if self.mlp is None else Mlp(*(weight.detach().clone() for weight in self.mlp.parameters()))
        return Layer(attention[0], attention[1], attention[2], mlp, own(self.norm_weight), own(self.norm_bias))

    def normalize(self, x: Float[Tensor, "*batch n d"], sublayer: int) -> Float[Tensor, "*batch n d"]:
        """LayerNorm of every token, with the weights of a sublayer: 0 is the attention, 1 the MLP."""
        assert self.norm_weight is not None
        assert self.norm_bias is not None
        return F.layer_norm(x, x.shape[-1:], self.norm_weight[sublayer], self.norm_bias[sublayer], NORM_EPSILON)

    def project(
        self, x: Float[Tensor, "*batch n d"]
    ) -> tuple[Float[Tensor, "*batch heads n k"], Float[Tensor, "*batch heads n k"]]:
        """X Q_h and X K_h of all heads at once: one product with the heads side by side."""
        return self._side_by_side(x, self.query), self._side_by_side(x, self.key)

    def _side_by_side(
        self, x: Float[Tensor, "*batch n d"], weight: Float[Tensor, "heads d k"]
    ) -> Float[Tensor, "*batch heads n k"]:
        together = x @ weight.transpose(0, 1).flatten(1)
        return together.reshape(*x.shape[:-1], self.heads, self.key_dim).transpose(-2, -3)

    def attend(
        self,
        x: Float[Tensor, "*batch n d"],
        attention: AttentionFunction,
        *,
        is_causal: bool,
        scale: float,
    ) -> Float[Tensor, "*batch n d"]:
        """Σ_h P_h X V_h: the values X are shared by the heads, and one product applies all V_h and sums."""
        q, k = self.project(x)
        shared = x.unsqueeze(-3).expand(*x.shape[:-2], self.heads, *x.shape[-2:])
        mixed = attention(q, k, shared, is_causal=is_causal, scale=scale)
        return mixed.transpose(-2, -3).flatten(-2) @ self.value.flatten(0, 1)


class SelfAttentionNetwork(nn.Module):
    """An L-layer self-attention network, with or without skip connections, causality, MLPs and LayerNorm.

    `scale` is β, by default 1/√k. `norm` says where LayerNorm stands: `pre` normalises what the attention and the
    MLP read, `post` what the layer hands on. `mlp_skip` adds a skip connection around the MLP.
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
        self.scale = (
            _default_scale(layers) if scale is None else require_positive("scale", scale, "β, the factor of the scores")
        )

    def _check(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise unknown_name("activation", self.activation, ACTIVATIONS)
        if self.norm not in NORMS:
            raise unknown_name("norm", self.norm, NORMS)
        if len(self.layers) == 0:
            raise InputError("a network needs at least one layer, got none")
        dtype = self[0].query.dtype
        if dtype not in (torch.float64, torch.float32):
            raise InputError(f"a network is float64 or float32, got weights of {dtype}; convert them")
        for index, layer in enumerate(self):
            for where, tensor, expected in _expected_shapes(layer, self.dim, self.norm):
                if tensor is None or tuple(tensor.shape) != expected:
                    given = "nothing" if tensor is None else list(tensor.shape)
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
        """Where the weights are."""
        return self[0].query.device

    @property
    def eta(self) -> float:
        """η = the largest |entry| of any Q, K or V."""
        return max(float(w.detach().abs().max()) for layer in self for w in (layer.query, layer.key, layer.value))

    def check_input(self, x: Tensor) -> None:
        """Raise unless x is `[..., n, d]` of the network's width and dtype, with at least one token."""
        if x.ndim < 2 or x.shape[-1] != self.dim or x.shape[-2] < 1:
            raise InputError(f"the input must have shape [..., tokens, {self.dim}], got {list(x.shape)}")
        if x.dtype != self.dtype:
            raise InputError(f"the input is {x.dtype}, the network {self.dtype}; convert one of them with .to(...)")

    def forward(
        self, x: Float[Tensor, "*batch n d"], attention: AttentionFunction | None = None
    ) -> Float[Tensor, "*batch n d"]:
        """S(X), with another attention function if one is given."""
        self.check_input(x)
        for index in range(len(self)):
            x = self.step(index, x, attention)
        return x

    def step(
        self, index: int, x: Float[Tensor, "*batch n d"], attention: AttentionFunction | None = None
    ) -> Float[Tensor, "*batch n d"]:
        """X_{ℓ+1} = layer_ℓ(X_ℓ)."""
        layer = self[index]
        y = layer.attend(
            self.attention_input(index, x),
            attention or softmax_attention,
            is_causal=self.causal,
            scale=self.scale,
        )
        y = x + y if self.skip else y
        y = layer.normalize(y, 0) if self.norm == "post" else y
        if layer.mlp is None:
            return y
        z = layer.mlp(layer.normalize(y, 1) if self.norm == "pre" else y, self.activation)
        z = y + z if self.mlp_skip else z
        return layer.normalize(z, 1) if self.norm == "post" else z

    def attention_input(self, index: int, x: Float[Tensor, "*batch n d"]) -> Float[Tensor, "*batch n d"]:
        """What the attention of a layer reads: X itself, or LayerNorm(X) when `norm` is `pre`."""
        return self[index].normalize(x, 0) if self.norm == "pre" else x

    def trace(self, x: Float[Tensor, "*batch n d"]) -> Iterator[LayerTrace]:
        """Layer by layer, the state before and after and, on demand, scores in blocks of rows; nothing else is kept."""
        self.check_input(x)
        for index in range(len(self)):
            with torch.no_grad():
                after = self.step(index, x)
                attention_input = self.attention_input(index, x)
                q, k = self[index].project(attention_input)
            yield LayerTrace(index, x, after, attention_input, q, k, self.scale, self.causal)
            x = after

    def clip(self, eta: float) -> "SelfAttentionNetwork":
        """A copy whose attention weights are clipped to [−η, η]."""
        require_positive("eta", eta, "the largest |weight| to leave")
        bound = largest_not_above(eta, self.dtype)
        return self._with_attention_weights(lambda w: w.clamp(-bound, bound))

    def rescale(self, eta: float) -> "SelfAttentionNetwork":
        """A copy whose attention weights are all multiplied by one factor, so that the largest is η."""
        require_positive("eta", eta, "the largest |weight| after rescaling")
        if self.eta == 0:
            raise InputError("a network whose attention weights are all zero cannot be rescaled")
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
        """A deep copy that shares nothing."""
        layers = [layer.copy() for layer in self]
        copy = SelfAttentionNetwork(
            layers,
            scale=self.scale,
            skip=self.skip,
            causal=self.causal,
            activation=self.activation,
            norm=self.norm,
            mlp_skip=self.mlp_skip,
            name=self.name,
            provenance=deepcopy(self.provenance),
        )
        copy.other_metadata = dict(self.other_metadata)
        return copy

    def describe(self) -> dict[str, Any]:
        """The network's shape and switches, as in the result JSON."""
        return {
            "name": self.name,
            "layers": len(self),
            "heads": [layer.heads for layer in self],
            "dim": self.dim,
            "key_dim": [layer.key_dim for layer in self],
            "mlp": [None if layer.mlp is None else int(layer.mlp.w_in.shape[1]) for layer in self],
            "scale": self.scale,
            "skip": self.skip,
            "causal": self.causal,
            "activation": self.activation,
            "norm": self.norm,
            "mlp_skip": self.mlp_skip,
            "eta": self.eta,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def summary(self) -> str:
        """One line for a person."""
        heads = sorted({layer.heads for layer in self})
        head_text = str(heads[0]) if len(heads) == 1 else f"{heads[0]}–{heads[-1]}"
        switches = [
            "skip" if self.skip else "no skip",
            *(["causal"] if self.causal else []),
            *(["MLP"] if any(layer.mlp is not None for layer in self) else []),
            *([f"{self.norm}-norm"] if self.norm != "none" else []),
        ]
        return (
            f"{len(self)} layers × {head_text} heads, dim {self.dim}, largest weight η = {number(self.eta, 4)}, "
            f"{', '.join(switches)}"
        )


def softmax_attention(
    query: Float[Tensor, "*batch heads n k"],
    key: Float[Tensor, "*batch heads n k"],
    value: Float[Tensor, "*batch heads n d"],
    *,
    is_causal: bool,
    scale: float,
) -> Float[Tensor, "*batch heads n d"]:
    """softm(scale · query keyᵀ) value by torch's kernel, which never holds the n×n scores.

    That kernel wants exactly one batch dimension, and keys and values of one width; the narrower is padded with
    zeros, which changes nothing.
    """
    batch, (k, d) = query.shape[:-3], (query.shape[-1], value.shape[-1])
    query, key, value = (t.reshape(-1, *t.shape[-3:]) for t in (query, key, value))
    if k < d:
        query, key = F.pad(query, (0, d - k)), F.pad(key, (0, d - k))
    elif d < k:
        value = F.pad(value, (0, k - d))
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
    return mixed[..., :d].reshape(*batch, *mixed.shape[1:-1], d)


def _default_scale(layers: Sequence[Layer]) -> float:
    widths = {layer.key_dim for layer in layers}
    if len(widths) > 1:
        raise InputError(f"layers have key widths {sorted(widths)}, so scale has no default; give it a number")
    return 1.0 / math.sqrt(widths.pop())


def _expected_shapes(layer: Layer, d: int, norm: str) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """The tensors of a layer by their name in a file, with the shapes they must have."""
    if layer.query.ndim != 3 or 0 in layer.query.shape:
        raise InputError(
            f"query must have shape [heads, dim, key width], none of them 0, got {list(layer.query.shape)}"
        )
    heads, _, k = layer.query.shape
    yield "query", layer.query, (heads, d, k)
    yield "key", layer.key, (heads, d, k)
    yield "value", layer.value, (heads, d, d)
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
