"""Which heads of layer 0 average and which can select one token, over all tokens of the vocabulary."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from depthgauge.base.progress import Step, silent
from depthgauge.checkpoints.find_blocks import find_blocks
from depthgauge.checkpoints.first_layer import NotBoundedError, first_call, read_first_layer
from depthgauge.checkpoints.interface import AttentionCall
from depthgauge.checkpoints.load import Checkpoint, context_length
from depthgauge.checkpoints.score_bounds import PlacedScores, RotaryScores, Scores
from depthgauge.results.checkpoint_subject import FirstLayerBound, FirstLayerHead
from depthgauge.results.record import finite
from depthgauge.theory.linalg.rounding import add_down, div_up, exp_up, mul_up, tanh_up

TOKENS = 64
"""Length of the texts that show what a head can do, unless the model sees less."""
QUERIES = 4
"""Tokens that are tried as the query of every head: those with the largest bounds."""
_TOGETHER = 1024
"""Tokens that are tried as keys at a time."""
_AGREEMENT = 1e-3
"""Largest difference of the model's own scores from ours, relative to |q||k|, in float32; 8 units of coarser types."""


@torch.no_grad()
def first_layer_bound(checkpoint: Checkpoint, progress: Step = silent) -> FirstLayerBound:
    """Bound the scores of every head of layer 0 over all tokens and positions, and find texts with a large range.

    The bounds are those of docs/math.md §6.2, in exact arithmetic on the stored weights. The texts are given to the
    model itself, and `attained` is what its layer 0 computes. Where a part of the layer is not covered, the result has
    the reason and no heads.
    """
    try:
        return _bounded(checkpoint, progress)
    except NotBoundedError as reason:
        return FirstLayerBound(refused=str(reason))


def _bounded(checkpoint: Checkpoint, progress: Step) -> FirstLayerBound:
    blocks, context = find_blocks(checkpoint.model, checkpoint.layers), context_length(checkpoint.config)
    if checkpoint.family is None or checkpoint.family.projections is None or not blocks:
        raise NotBoundedError(f"the architecture {checkpoint.config.model_type!r} is not known to depthgauge")
    asked = min(TOKENS, context or TOKENS)
    probe = first_call(checkpoint, torch.zeros(1, asked, dtype=torch.long))
    mask = probe.visible(asked - 1, asked)
    n = asked if mask is None else int(mask[0, 0].sum())
    window = min(filter(None, (context, n if n < asked else None, _sliding(blocks[0]))), default=None)
    layer = read_first_layer(checkpoint, window)
    progress(0, 2, f"layer 0: scores of all {len(layer.vocabulary):,} tokens")
    scores = RotaryScores(layer) if layer.positions is None else PlacedScores(layer, layer.positions)
    plain, ranks = scores.bound(n - 1)
    theta = capped_range(mul_up(plain, abs(probe.scale)), probe.softcap)
    progress(1, 2, "layer 0: texts with a large range of scores")
    usable = torch.arange(len(layer.vocabulary))
    if (padding := checkpoint.config.pad_token_id) is not None:  # takes no position in RoBERTa
        usable = usable[usable != padding]
    queries = usable[ranks[usable].topk(min(QUERIES, len(usable)), dim=0).indices.mT]
    texts, expected = widest_texts(scores, queries, usable, n, probe)
    call = first_call(checkpoint, texts)
    rows = call.scores(n - 1, n).diagonal().mT[0].double().cpu()  # [heads, n]: each head on its own text
    _require_same(call, rows, expected)
    heads, weights = [], rows.softmax(-1)
    tv, largest = tanh_up(theta / 4.0), largest_weight(theta, n)
    for h, row in enumerate(rows):
        heads.append(
            FirstLayerHead(
                index=h,
                proved=finite(theta[h]),
                tv=float(tv[h]),
                largest=float(largest[h]),
                attained=float(row.max() - row.min()),
                weight=float(weights[h].max()),
                selected=int(weights[h].argmax()),
                text=tuple(texts[h].tolist()),
            )
        )
    return FirstLayerBound(vocabulary=len(layer.vocabulary), window=window, tokens=n, heads=tuple(heads))


def _sliding(block: nn.Module) -> int | None:
    """Return the sliding window of a block, or None."""
    return next(filter(None, (getattr(module, "sliding_window", None) for module in block.modules())), None)


def capped_range(theta: Float[Tensor, " heads"], softcap: float | None) -> Float[Tensor, " heads"]:
    """Bound the range of c·tanh(s/c) over scores s of range θ: 2c·tanh(θ/2c)."""
    return theta if softcap is None else mul_up(2.0 * softcap, tanh_up(div_up(theta, 2.0 * softcap)))


def largest_weight(theta: Float[Tensor, " heads"], n: int) -> Float[Tensor, " heads"]:
    """Bound the largest weight of one of n tokens, 1/(1 + (n − 1)e^−θ) = E/(E + n − 1) with E = e^θ."""
    E = exp_up(theta)
    return torch.where(E.isinf(), 1.0, div_up(E, add_down(E, n - 1.0)).clamp(max=1.0))


def widest_texts(
    scores: Scores, queries: Int[Tensor, "heads c"], usable: Int[Tensor, " v"], n: int, probe: AttentionCall
) -> tuple[Int[Tensor, "heads n"], Float[Tensor, "heads n"]]:
    """Return for every head a text of n tokens whose last one puts much weight on one token, and its scores.

    For every query, one position has the token with the largest score there, and every other one that with the
    smallest. The last token is the query itself. The query and the position with the largest weight are taken.
    """
    scorer, (heads, c) = scores.scorer(queries, n), queries.shape

    def capped(ids: Int[Tensor, " m"]) -> Float[Tensor, "heads c n m"]:
        found = probe.scale * scorer(ids)
        return found if probe.softcap is None else probe.softcap * torch.tanh(found / probe.softcap)

    best = [torch.full((heads, c, n), end, dtype=torch.float64) for end in (-torch.inf, torch.inf)]
    names = [torch.zeros((heads, c, n), dtype=torch.long) for _ in best]
    for ids in torch.split(usable, _TOGETHER):
        found = capped(ids)
        for side, (values, index) in enumerate((found.max(-1), found.min(-1))):
            better = values > best[0] if side == 0 else values < best[1]
            best[side][better], names[side][better] = values[better], ids[index][better]
    own = torch.unflatten(capped(queries.flatten())[:, :, -1], -1, (heads, c))
    for side in (0, 1):
        best[side][..., -1] = own.diagonal(dim1=0, dim2=2).diagonal(dim1=0, dim2=1)
        names[side][..., -1] = queries
    chosen = torch.eye(n, dtype=torch.bool)  # [position with the largest score, position]
    mixed = torch.where(chosen, best[0][..., None, :], best[1][..., None, :])  # [heads, c, n, n]
    weight = mixed.softmax(-1).diagonal(dim1=-2, dim2=-1).flatten(1)
    query, position = weight.argmax(-1) // n, weight.argmax(-1) % n
    every = torch.arange(heads)
    texts = torch.where(chosen[position], names[0][every, query], names[1][every, query])
    return texts, mixed[every, query, position]


def _require_same(call: AttentionCall, rows: Float[Tensor, "heads n"], expected: Float[Tensor, "heads n"]) -> None:
    """Raise unless the model's own scores are those that were computed from its weights."""
    size = (call.query[..., -1, :].norm(dim=-1) * call.key.norm(dim=-1).amax(-1)).diagonal().double().cpu()
    allowed = max(_AGREEMENT, 8 * torch.finfo(call.query.dtype).eps) * abs(call.scale) * size
    if bool(((rows - expected).abs().amax(-1) > allowed).any()):
        raise NotBoundedError("the model's own scores differ from those that its weights give")
