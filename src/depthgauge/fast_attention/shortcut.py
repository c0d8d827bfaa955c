"""Calls that need exact attention whatever the numbers in q, k and v are, recognised in about two microseconds.

A decoding step or a short sequence takes some ten microseconds in torch's attention. Validating such a call in full,
with its messages, would take as long.
"""

import math

from torch import Tensor

from depthgauge.fast_attention.decide.cost import CPU, GPU_TRITON
from depthgauge.fast_attention.problem import DTYPES


def is_always_exact(q: Tensor, k: Tensor, v: Tensor, options: tuple[object, ...]) -> bool:
    """Return whether the call is valid, and exact because of its options or because it is small.

    False means nothing: the call then needs the full validation.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        options: The fields of `Options`.
    """
    mask, dropout, is_causal, tolerance, scale, padding, is_grouped, force = options
    if not type(q) is type(k) is type(v) is Tensor or padding is not None or (force is not None and force != "exact"):
        return False
    if mask is not None and (type(mask) is not Tensor or is_causal):
        return False
    if type(tolerance) is not float or not 0.0 < tolerance < math.inf:
        return False
    if scale is not None and (type(scale) is not float or not math.isfinite(scale)):
        return False
    if type(dropout) is not float or not 0.0 <= dropout <= 1.0 or type(is_causal) is not bool:
        return False
    if not _have_valid_shapes(q, k, v, is_grouped):
        return False
    return mask is not None or dropout > 0.0 or force is not None or _is_small(q, k, v, is_causal)


def _have_valid_shapes(q: Tensor, k: Tensor, v: Tensor, is_grouped: object) -> bool:
    """Return whether dtypes, devices and shapes agree as `checked` requires, with at least one head axis."""
    dtype, queries, keys, values = q.dtype, q.shape, k.shape, v.shape
    if k.dtype is not dtype or v.dtype is not dtype or dtype not in DTYPES:
        return False
    if not q.device == k.device == v.device:
        return False
    if len(queries) < 3 or len(queries) != len(keys) or keys[:-1] != values[:-1] or queries[-1] != keys[-1]:
        return False
    if is_grouped is False:
        return queries[:-2] == keys[:-2]
    heads = keys[-3]
    return is_grouped is True and queries[:-3] == keys[:-3] and heads > 0 and queries[-3] % heads == 0


def _is_small(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Return whether exact attention costs less than the least that the polynomial path can cost.

    This is a sufficient condition for `is_never_worth_it`: it neglects the features.
    """
    rates = GPU_TRITON if q.is_cuda else CPU
    (n, d), (m, e), queries = q.shape[-2:], v.shape[-2:], q.numel()
    if not queries or not m or not e:
        return False
    m = min(m, n) if is_causal else m
    exact = 2.0 * queries / d * m * (d + e + rates.exponential) * (0.5 if is_causal else 1.0)
    least = min(rates.repeated, rates.trained) + 2.0 * (queries + k.numel() * m / k.shape[-2]) * rates.token
    return exact < least
