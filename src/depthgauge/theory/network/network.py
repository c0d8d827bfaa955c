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
from os import PathLike
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from depthgauge.base.errors import InputError, require_positive, unknown_name
from depthgauge.base.format import counted, number
from depthgauge.theory.linalg.rounding import largest_not_above
from depthgauge.theory.network.layer import NORM_EPSILON as NORM_EPSILON
from depthgauge.theory.network.layer import AttentionFunction as AttentionFunction
from depthgauge.theory.network.layer import Layer as Layer
from depthgauge.theory.network.layer import Mlp as Mlp
from depthgauge.theory.network.layer import softmax_attention as softmax_attention
from depthgauge.theory.network.trace import LayerTrace

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
