"""Inputs for measurements: random inputs in a box, or inputs from a file."""

from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from depthgauge.base.errors import InputError, InputFileError, require_count, require_radius, require_seed
from depthgauge.base.format import one_line
from depthgauge.theory.linalg.rounding import largest_not_above

LARGEST_INPUT = 2**30
"""The largest number of entries of all random inputs together (8 GB in float64)."""


def uniform_inputs(
    samples: int, tokens: int, dim: int, *, radius: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "samples tokens dim"]:
    """Draw inputs uniformly from the box ‖X‖max ≤ φ; `radius` is φ. The same seed gives the same inputs."""
    require_count("samples", samples, "the number of inputs")
    require_count("tokens", tokens, "the number of tokens n of an input")
    require_radius(radius)
    require_seed(seed)
    if samples * tokens * dim > LARGEST_INPUT:
        most = LARGEST_INPUT // (samples * dim)
        raise InputError(
            f"tokens must be at most {most} for {samples} inputs of width {dim}, got {tokens}; the inputs must fit "
            "into memory"
        )
    unit = torch.rand(samples, tokens, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    bound = largest_not_above(radius, dtype)
    return (radius * (2 * unit - 1)).to(dtype).clamp(-bound, bound)


def load_inputs(path: str | Path, dim: int, dtype: torch.dtype = torch.float64) -> Float[Tensor, "samples tokens dim"]:
    """Read and validate the tensor `x`, `[tokens, dim]` or `[samples, tokens, dim]`, of a safetensors file."""
    path = Path(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise InputFileError(
            f"cannot read inputs from {path}: {one_line(error)}; expected a safetensors file with a tensor named x"
        ) from error
    if "x" not in tensors:
        names = sorted(tensors)
        held = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise InputFileError(f"{path} holds {held or 'no tensor'}, expected a tensor named x")
    x = tensors["x"]
    if x.dtype not in (torch.float32, torch.float64):
        raise InputFileError(f"x in {path} is {x.dtype}, expected float32 or float64; convert it")
    if x.ndim not in (2, 3) or x.shape[-1] != dim or 0 in x.shape:
        raise InputFileError(
            f"x in {path} has shape {list(x.shape)}, expected [tokens, {dim}] or [samples, tokens, {dim}]"
        )
    if not bool(x.isfinite().all()):
        raise InputFileError(f"x in {path} holds NaN or infinity; remove those entries")
    converted = x.reshape(-1, *x.shape[-2:]).to(dtype)
    if not bool(converted.isfinite().all()):
        raise InputFileError(f"x in {path} overflows {dtype}, the dtype of the network; load the network in float64")
    return converted
