"""One polynomial attention, fixed to the last number: what a backend is handed."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spec:
    """Everything a backend needs besides q, k and v; nothing in it has a gradient.

    coefficients [N, g+1] float64; query_centre, key_centre [N, d]; q̃ = (q−μ)·query_factor, k̃ = (k−c)·key_factor with
    [N] factors whose product is the scale (key_factor a power of two that makes both about as long);
    middle [N, e] is subtracted from the values; `exact_rows` [N, G, n] marks rows that are computed elsewhere.
    """

    degree: int
    coefficients: Tensor
    query_centre: Tensor
    key_centre: Tensor
    query_factor: Tensor
    key_factor: Tensor
    middle: Tensor
    is_weighted: bool
    scale: float
    causal: bool
    keep: Tensor | None
    exact_rows: Tensor | None


def weights(spec: Spec, at: slice, k: Tensor) -> Tensor | None:
    """w_j = exp(s μ·(k_j − c)) over the largest kept one, 0 where a key is padding: [N, m]; None where all are 1.

    `k` [N, m, d] holds the keys of the heads `at`; the exponent is summed in float64.
    """
    keep = None if spec.keep is None else spec.keep[at]
    if not spec.is_weighted:
        return None if keep is None else keep.to(spec.query_centre.dtype)
    centred = k.double() - spec.key_centre[at, None].double()
    log_w = spec.scale * (centred @ spec.query_centre[at, :, None].double()).squeeze(-1)
    if keep is not None:
        log_w = log_w.masked_fill(~keep, -torch.inf)
    return torch.exp(log_w - log_w.amax(dim=1, keepdim=True)).to(spec.query_centre.dtype)


def balance(query_norm: float, key_norm: float, scale: float) -> tuple[float, float]:
    """Factors of q and k with the product `scale`: the key's a power of two, so that both become about √B long.

    >>> balance(4.0, 1.0, 1.0)
    (0.5, 2.0)
    """
    if scale == 0 or query_norm == 0 or key_norm == 0:
        return scale, 1.0
    power = math.floor((math.log2(abs(scale)) + math.log2(query_norm) - math.log2(key_norm)) / 2)
    return math.ldexp(scale, -power), math.ldexp(1.0, power)
