"""Many small models at once: a batch dimension over models, weights in a box, and the way back to a network.

A model is z = (S(X) R)_last with X = token embedding + position embedding. All models of a batch share their shapes;
each has its own bound η. The weights of model b are the slices [b] of the tensors in a dictionary. No operation mixes
two models.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError, require_count, unknown_name
from depthgauge.papers.trained_depth.generated_tasks import GeneratedTask
from depthgauge.theory.linalg.rounding import largest_not_above
from depthgauge.theory.network.network import NORM_EPSILON, Layer, Mlp, SelfAttentionNetwork

Weights = dict[str, Tensor]
EMBEDDING = 0.5
"""The bound on the entries of both embeddings, so that the entries of X are at most 1."""
_OWN_BOUND = {"token": EMBEDDING, "position": EMBEDDING, "readout": 1.0, "norm_weight": 1.0, "norm_bias": 1.0}
"""The bounds on embeddings, readout R and LayerNorm; all other weights have the bound η."""


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model: L layers, H heads per layer, tokens of width d, queries and keys of width k.

    `skip` is whether there are skip connections, around the attention and around the MLP. `norm` is `"none"`, `"pre"`
    or `"post"`, as in `SelfAttentionNetwork`. `mlp` is the hidden width of the MLPs, or None for no MLP. `causal` is
    whether a token sees only itself and earlier tokens.
    """

    layers: int
    heads: int
    dim: int
    key_dim: int
    skip: bool = True
    norm: str = "none"
    mlp: int | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        require_count("layers", self.layers, "the number of layers L")
        require_count("heads", self.heads, "the number of heads H per layer")
        require_count("dim", self.dim, "the width d of a token")
        require_count("key_dim", self.key_dim, "the width k of queries and keys")
        if self.mlp is not None:
            require_count("mlp", self.mlp, "the hidden width of the MLP; omit it for no MLP")
        if self.norm not in ("none", "pre", "post"):
            raise unknown_name("norm", self.norm, ("none", "pre", "post"))

    def sizes(self, task: GeneratedTask) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight of one model, by name."""
        L, H, d, k, m = self.layers, self.heads, self.dim, self.key_dim, self.mlp
        shapes: dict[str, tuple[int, ...]] = {
            "token": (task.vocabulary, d),
            "position": (task.length, d),
            "query": (L, H, d, k),
            "key": (L, H, d, k),
            "value": (L, H, d, d),
            "readout": (d, task.classes),
        }
        if m is not None:
            shapes |= {"mlp_in": (L, d, m), "mlp_in_bias": (L, m), "mlp_out": (L, m, d), "mlp_out_bias": (L, d)}
        if self.norm != "none":
            sublayers = 1 if m is None else 2
            shapes |= {"norm_weight": (L, sublayers, d), "norm_bias": (L, sublayers, d)}
        return shapes

    def spread(self, name: str) -> float:
        """Return the half-width of the uniform distribution from which an unbounded weight is drawn."""
        if name in ("token", "position"):
            return EMBEDDING
        if name == "value":  # the outputs of all heads and layers are added
            return math.sqrt(3.0 / (self.dim * self.heads * (self.layers if self.skip else 1)))
        if name == "mlp_out":
            assert self.mlp is not None
            return math.sqrt(3.0 / (self.mlp * (self.layers if self.skip else 1)))
        return min(1.0, math.sqrt(3.0 / self.dim))


def bounds_of(shape: ModelShape, task: GeneratedTask, etas: Sequence[float | None], dtype: torch.dtype) -> Weights:
    """Return the bound on every weight: for each name a tensor of one bound per model, [B, 1, …].

    An η of None is no bound. A bound is rounded down to `dtype`.
    """
    own = torch.tensor([math.inf if eta is None else largest_not_above(eta, dtype) for eta in etas], dtype=dtype)
    fixed = {name: torch.full_like(own, bound) for name, bound in _OWN_BOUND.items()}
    return {name: fixed.get(name, own).reshape(-1, *(1 for _ in size)) for name, size in shape.sizes(task).items()}


def initial_weights(
    shape: ModelShape, task: GeneratedTask, bounds: Weights, seeds: Sequence[int], dtype: torch.dtype
) -> Weights:
    """Draw initial weights uniform in ±min(bound, spread); those of a model depend on its own seed alone."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    weights = {}
    for name, size in shape.sizes(task).items():
        if name.startswith("norm"):
            start = 1.0 if name == "norm_weight" else 0.0
            weights[name] = torch.full((len(seeds), *size), start, dtype=dtype)
            continue
        unit = torch.stack([2 * torch.rand(size, generator=g, dtype=torch.float64) - 1 for g in generators])
        width = bounds[name].clamp(max=shape.spread(name))
        weights[name] = (unit.to(dtype) * width).clamp(-width, width)
    return weights


def project(weights: Weights, bounds: Weights) -> None:
    """Move every weight to the nearest point of its box, in place."""
    for name, weight in weights.items():
        torch.minimum(weight, bounds[name], out=weight)
        torch.maximum(weight, -bounds[name], out=weight)


def logits(
    shape: ModelShape, weights: Mapping[str, Tensor], tokens: Int64[Tensor, "models samples n"]
) -> Float[Tensor, "models samples classes"]:
    """Return the logits of every model on its own sequences.

    Only the last token is read, so the last layer computes only that row. Token embeddings are selected by a matrix
    product with one-hot rows, whose gradient is deterministic on every device.
    """
    B, S, n = tokens.shape
    chosen = F.one_hot(tokens, weights["token"].shape[1]).to(weights["token"].dtype)
    x = (chosen.flatten(1, 2) @ weights["token"]).reshape(B, S, n, shape.dim) + weights["position"][:, None]
    for index in range(shape.layers):
        x = _layer(shape, weights, index, x, last=index == shape.layers - 1)
    return x[:, :, -1] @ weights["readout"]


def _layer(shape: ModelShape, weights: Mapping[str, Tensor], index: int, x: Tensor, *, last: bool) -> Tensor:
    """Return layer(X); with `last`, only its last row."""
    z = _normalize(weights, index, x, 0) if shape.norm == "pre" else x
    rows, kept = (z[:, :, -1:], x[:, :, -1:]) if last else (z, x)
    y = _attend(shape, weights, index, z, rows)
    y = kept + y if shape.skip else y
    y = _normalize(weights, index, y, 0) if shape.norm == "post" else y
    if shape.mlp is None:
        return y
    read = _normalize(weights, index, y, 1) if shape.norm == "pre" else y
    out = _token_map(weights, index, read)
    out = y + out if shape.skip else out
    return _normalize(weights, index, out, 1) if shape.norm == "post" else out


def _attend(shape: ModelShape, weights: Mapping[str, Tensor], index: int, z: Tensor, rows: Tensor) -> Tensor:
    """Return Σ_h P_h Z V_h for the given rows of Z, with P_h = softm(β rows Q_h K_hᵀ Zᵀ)."""
    B, S, _, d = z.shape
    H, k = shape.heads, shape.key_dim

    def heads_of(states: Tensor, name: str) -> Tensor:
        together = weights[name][:, index].transpose(1, 2).flatten(2)  # [B, d, H·k]
        return (states.flatten(1, 2) @ together).reshape(B, S, -1, H, k).transpose(2, 3)

    is_masked = shape.causal and rows.shape[2] > 1  # the last row sees all tokens
    mixed = _mix(heads_of(rows, "query"), heads_of(z, "key"), z, is_masked)
    together = mixed.transpose(2, 3).reshape(B, -1, H * d) @ weights["value"][:, index].flatten(1, 2)
    return together.reshape(B, S, -1, d)


def _mix(
    query: Float[Tensor, "models samples heads rows k"],
    key: Float[Tensor, "models samples heads n k"],
    z: Float[Tensor, "models samples n d"],
    is_masked: bool,
) -> Float[Tensor, "models samples heads rows d"]:
    """Return softm(query keyᵀ/√k) Z for every head, with a causal mask if `is_masked`.

    On the CPU thousands of small matrix products are slow one by one, and torch's fused kernel is several times faster.
    On a GPU the products are fast, and their gradients are deterministic, which those of the fused kernel are not.
    """
    if query.device.type != "cpu":
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if is_masked:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return scores.softmax(dim=-1) @ z[:, :, None]
    k, d = query.shape[-1], z.shape[-1]
    width = max(k, d)  # the kernel needs keys and values of equal width; zeros change nothing
    shared = F.pad(z, (0, width - d))[:, :, None].expand(-1, -1, key.shape[2], -1, -1)
    padded = (F.pad(query, (0, width - k)), F.pad(key, (0, width - k)), shared)
    q, kk, v = (t.flatten(0, 1) for t in padded)
    mixed = F.scaled_dot_product_attention(q, kk, v, is_causal=is_masked, scale=1 / math.sqrt(k))
    return mixed[..., :d].reshape(*z.shape[:2], *mixed.shape[1:-1], d)


def _normalize(weights: Mapping[str, Tensor], index: int, x: Tensor, sublayer: int) -> Tensor:
    scale, shift = (weights[name][:, index, sublayer][:, None, None] for name in ("norm_weight", "norm_bias"))
    return F.layer_norm(x, x.shape[-1:], eps=NORM_EPSILON) * scale + shift


def _token_map(weights: Mapping[str, Tensor], index: int, x: Tensor) -> Tensor:
    hidden = x.flatten(1, 2) @ weights["mlp_in"][:, index] + weights["mlp_in_bias"][:, index, None]
    out = F.relu(hidden) @ weights["mlp_out"][:, index] + weights["mlp_out_bias"][:, index, None]
    return out.reshape(x.shape)


@dataclass(frozen=True, eq=False, repr=False)
class BoundedModel(ArrayRecord):
    """One model: z = (S(X) R)_last with X = token + position, S the network and R the readout."""

    network: SelfAttentionNetwork
    token: Float[Tensor, "v d"]
    position: Float[Tensor, "n d"]
    readout: Float[Tensor, "d classes"]

    def inputs(self, tokens: Int64[Tensor, "samples n"]) -> Float[Tensor, "samples n d"]:
        """Return X for every sequence."""
        return self.token[tokens] + self.position

    def logits(
        self, tokens: Int64[Tensor, "samples n"], network: SelfAttentionNetwork | None = None
    ) -> Float[Tensor, "samples classes"]:
        """Return the logits z; `network` replaces S."""
        with torch.no_grad():
            states: Tensor = (self.network if network is None else network)(self.inputs(tokens))
        return states[:, -1] @ self.readout

    def exact(self) -> "BoundedModel":
        """Return the model in float64 on the CPU; the weights do not change."""
        plain = (t.detach().cpu().to(torch.float64) for t in (self.token, self.position, self.readout))
        return BoundedModel(self.network.copy().to(device="cpu", dtype=torch.float64), *plain)


def take_model(shape: ModelShape, weights: Mapping[str, Tensor], index: int) -> BoundedModel:
    """Return model `index` of a batch, on the CPU."""
    own = {name: weight[index].detach().cpu().clone() for name, weight in weights.items()}
    layers = []
    for ell in range(shape.layers):
        mlp = None
        if shape.mlp is not None:
            mlp = Mlp(*(own[name][ell] for name in ("mlp_in", "mlp_in_bias", "mlp_out", "mlp_out_bias")))
        norms = [own[name][ell] if name in own else None for name in ("norm_weight", "norm_bias")]
        layers.append(Layer(own["query"][ell], own["key"][ell], own["value"][ell], mlp, *norms))
    network = SelfAttentionNetwork(
        layers, skip=shape.skip, causal=shape.causal, norm=shape.norm, mlp_skip=shape.skip, name="trained"
    )
    return BoundedModel(network, own["token"], own["position"], own["readout"])


def check_eta(eta: float | None) -> float | None:
    """Return η if it is a positive number or None (no bound); raise `InputError` otherwise."""
    if eta is not None and (isinstance(eta, bool) or not isinstance(eta, int | float) or not 0 < eta < math.inf):
        raise InputError(
            f"eta must be a positive number, or None for no bound, got {eta!r}; it is the largest |weight|"
        )
    return None if eta is None else float(eta)
