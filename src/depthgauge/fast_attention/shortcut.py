"""Calls that need exact attention whatever the numbers in q, k and v are, recognised in a few microseconds.

A decoding step or a short sequence takes some ten microseconds in torch's attention. Validating such a call in full,
with its messages, would take as long.
"""

import math

from torch import Size, Tensor

from depthgauge.fast_attention.decide.cost import CPU, GPU_TRITON
from depthgauge.fast_attention.problem import DTYPES


def is_always_exact(q: Tensor, k: Tensor, v: Tensor, options: tuple[object, ...]) -> bool:
    """Return whether the call is valid, and exact because of its options or because it is small.

    If the result is False, the call may still be exact or invalid; it has to be validated and decided in full.

    Args:
        q: Queries [batch, heads, n, d].
        k: Keys.
        v: Values.
        options: The fields of `Options`.
    """
    mask, dropout, is_causal, tolerance, scale, padding, is_grouped, force = options
    if not type(q) is type(k) is type(v) is Tensor or padding is not None or (force is not None and force != "exact"):
        return False
    if type(tolerance) is not float or not 0.0 < tolerance < math.inf or type(is_causal) is not bool:
        return False
    if scale is not None and (type(scale) is not float or not math.isfinite(scale)):
        return False
    if type(dropout) is not float or not 0.0 <= dropout <= 1.0:
        return False
    if mask is not None and (type(mask) is not Tensor or is_causal):
        return False
    dtype, device = q.dtype, q.device
    if k.dtype is not dtype or v.dtype is not dtype or dtype not in DTYPES or k.device != device or v.device != device:
        return False
    shape, values = q.shape, v.shape
    if not _agree(shape, k.shape, values, is_grouped):
        return False
    return mask is not None or dropout > 0.0 or force is not None or _is_small(shape, values, is_causal, q.is_cuda)


def _agree(q: Size, k: Size, v: Size, is_grouped: object) -> bool:
    """Return whether these are shapes with four axes that `checked` accepts."""
    if not len(q) == len(k) == len(v) == 4:
        return False
    batch, heads, _, d = q
    key_batch, key_heads, m, key_d = k
    value_batch, value_heads, value_m, _ = v
    if batch != key_batch or batch != value_batch or key_heads != value_heads or m != value_m or d != key_d:
        return False
    if is_grouped is True:
        return key_heads > 0 and heads % key_heads == 0
    return is_grouped is False and heads == key_heads


def _is_small(q: Size, v: Size, is_causal: bool, is_cuda: bool) -> bool:
    """Return whether exact attention costs less than the least that the polynomial path can cost.

    This is a sufficient condition for `is_never_worth_it`: it neglects the features.
    """
    rates = GPU_TRITON if is_cuda else CPU
    batch, heads, n, d = q
    _, key_heads, m, e = v
    if is_causal and m > n:
        m = n
    rows, keys = batch * heads * n, batch * key_heads * m
    exact = 2.0 * rows * m * (d + e + rates.exponential) * (0.5 if is_causal else 1.0)
    least = min(rates.repeated, rates.trained) + 2.0 * (rows + keys) * d * rates.token
    return 0.0 < exact < least
