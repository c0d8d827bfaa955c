"""One layer of a self-attention network: its weights, the attention of all heads, and the MLP."""

from copy import deepcopy
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

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
