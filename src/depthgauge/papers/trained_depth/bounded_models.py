"""Many small models at once, with weights in a box, and the tasks that they are trained on."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError, require_count, unknown_name
from depthgauge.theory.linalg.rounding import largest_not_above
from depthgauge.theory.network.network import NORM_EPSILON, Layer, Mlp, SelfAttentionNetwork

# --- Generated tasks: sequences of tokens with one label each, which the model reads from the last token -------------
# The labels are functions of the tokens that are short enough to check by hand; the tests check them against a plain
# loop.

Tokens = Int64[Tensor, "samples n"]
Labels = Int64[Tensor, " samples"]
Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class GeneratedTask:
    """A task whose examples, sequences of `length` tokens, are drawn at random.

    `vocabulary` is the number v of different tokens, `classes` the number C of labels, which are equally likely, or
    nearly so. docs/concepts/does-depth-pay.md says what is known about the number of layers that each task takes.
    """

    name: str
    vocabulary: int
    length: int
    classes: int
    sample: Draw = field(repr=False, compare=False)

    @property
    def chance(self) -> float:
        """The accuracy of a constant guess."""
        return 1.0 / self.classes

    def draw(self, count: int, seed: int) -> tuple[Tokens, Labels]:
        """Draw `count` sequences and their labels; the same seed gives the same examples on every device."""
        require_count("count", count, "the number of sequences")
        return self.sample(count, torch.Generator().manual_seed(seed))


def hop_labels(tokens: Tokens, hops: int) -> Labels:
    """Return hop_k of the last token of every sequence, or −1 where a hop has no target.

    find(i) is the largest j ≤ i with σ_{j−1} = σ_i: the position after the last earlier occurrence of σ_i. The label is
    σ at find applied `hops` times to the last position.
    """
    n = tokens.shape[1]
    position = torch.arange(n)
    same = tokens[:, :, None] == tokens[:, None, :]  # [samples, i, j − 1]
    earlier = same & (position[None, :] < position[:, None])
    find = torch.where(earlier, position + 1, -1).amax(dim=-1)  # [samples, i], −1 without an earlier occurrence
    at = torch.full((len(tokens), 1), n - 1)
    lost = torch.zeros(len(tokens), 1, dtype=torch.bool)
    for _ in range(hops):
        at = find.gather(1, at)
        lost |= at < 0
        at = at.clamp(min=0)
    label: Tensor = torch.where(lost, -1, tokens.gather(1, at))[:, 0]
    return label


def hop_task(length: int = 10, alphabet: int = 4, hops: int = 1) -> GeneratedTask:
    """Return the k-hop induction task of Sanford, Hsu and Telgarsky: follow the last earlier occurrence k times."""

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens, labels, have = [], [], 0
        while have < count:  # sequences in which a hop has no target are drawn again
            drawn = torch.randint(alphabet, (count, length), generator=generator)
            label = hop_labels(drawn, hops)
            kept = label >= 0
            tokens.append(drawn[kept])
            labels.append(label[kept])
            have += int(kept.sum())
        return torch.cat(tokens)[:count], torch.cat(labels)[:count]

    return GeneratedTask(f"{hops}-hop", alphabet, length, alphabet, sample)


def recall_task(pairs: int = 2, keys: int = 3, values: int = 4) -> GeneratedTask:
    """Return associative recall: key value key value … key; the label is the value after the queried key."""
    if keys < pairs:
        raise InputError(f"keys must be at least pairs, got keys={keys} and pairs={pairs}; keys do not repeat")

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        key = torch.rand(count, keys, generator=generator).argsort(dim=1)[:, :pairs]
        value = torch.randint(values, (count, pairs), generator=generator)
        asked = torch.randint(pairs, (count, 1), generator=generator)
        listed = torch.stack([key, value + keys], dim=2).flatten(1)
        return torch.cat([listed, key.gather(1, asked)], dim=1), value.gather(1, asked)[:, 0]

    return GeneratedTask(f"recall-{pairs}", keys + values, 2 * pairs + 1, values, sample)


def pointer_task(points: int = 6, hops: int = 2) -> GeneratedTask:
    """Return pointer chasing: token i is f(i) for a permutation f, the last token is x, the label is f(f(…f(x)))."""

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        table = torch.rand(count, points, generator=generator).argsort(dim=1)
        start = torch.randint(points, (count, 1), generator=generator)
        at = start
        for _ in range(hops):
            at = table.gather(1, at)
        return torch.cat([table, start], dim=1), at[:, 0]

    return GeneratedTask(f"pointer-{hops}", points, points + 1, points, sample)


def word_task(group: str = "s3", length: int = 3) -> GeneratedTask:
    """Return the word problem of a permutation group.

    `s3`: the tokens are the six elements and the label is their product, read from left to right. `s5`: the tokens are
    the ten transpositions of five points, and the label is the point to which the product moves point 0.
    """
    if group == "s3":
        elements = list(itertools.permutations(range(3)))
        index = {element: i for i, element in enumerate(elements)}
        times = [[index[tuple(b[a[p]] for p in range(3))] for b in elements] for a in elements]
        step, start, classes, vocabulary = torch.tensor(times), index[0, 1, 2], 6, 6
    elif group == "s5":
        moves = []
        for a, b in itertools.combinations(range(5), 2):
            move = list(range(5))
            move[a], move[b] = b, a
            moves.append(move)
        step, start, classes, vocabulary = torch.tensor(moves).T, 0, 5, 10
    else:
        raise unknown_name("group", group, ("s3", "s5"))

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (count, length), generator=generator)
        state = torch.full((count,), start)
        for column in tokens.unbind(dim=1):
            state = step[state, column]  # state × token → state
        return tokens, state

    return GeneratedTask(group, vocabulary, length, classes, sample)


def bit_task(kind: str = "majority", length: int = 9) -> GeneratedTask:
    """Return majority or parity of a sequence of bits; the length of majority must be odd."""
    if kind not in ("majority", "parity"):
        raise unknown_name("kind", kind, ("majority", "parity"))
    if kind == "majority" and length % 2 == 0:
        raise InputError(f"the length of majority must be odd, got {length}; with an even length there are ties")

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        bits = torch.randint(2, (count, length), generator=generator)
        ones = bits.sum(dim=1)
        return bits, (ones > length // 2).long() if kind == "majority" else ones % 2

    return GeneratedTask(kind, 2, length, 2, sample)


GENERATED: Mapping[str, Callable[[], GeneratedTask]] = {
    "recall-2": recall_task,
    "recall-3": lambda: recall_task(3, 4, 4),
    "1-hop": hop_task,
    "2-hop": lambda: hop_task(hops=2),
    "pointer-2": pointer_task,
    "pointer-4": lambda: pointer_task(hops=4),
    "s3": word_task,
    "s5": lambda: word_task("s5", 4),
    "majority": bit_task,
    "parity": lambda: bit_task("parity", 6),
}
"""The tasks by name, at the sizes of the experiment."""


def find_task(name: str) -> GeneratedTask:
    """Return the task with a name, at the size of the experiment.

    >>> find_task("recall-2").length
    5
    """
    if name not in GENERATED:
        raise unknown_name("task", name, GENERATED)
    return GENERATED[name]()


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
