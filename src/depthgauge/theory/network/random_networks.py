"""Random networks with bounded weights, every |weight| ≤ η, and inputs: random ones in a box, or those of a file."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from depthgauge.base.errors import (
    InputError,
    InputFileError,
    require_count,
    require_positive,
    require_radius,
    require_seed,
    unknown_name,
)
from depthgauge.base.format import one_line
from depthgauge.theory.linalg.rounding import largest_not_above
from depthgauge.theory.network.network import Layer, Mlp, SelfAttentionNetwork

DISTRIBUTIONS = ("uniform", "sign", "normal", "aligned")


def draw_weights(
    shape: tuple[int, ...], eta: float, distribution: str, generator: torch.Generator, dtype: torch.dtype
) -> Tensor:
    """Draw weights with every |entry| ≤ η; `random_network` describes the distributions.

    `aligned` is the worst case for bounds that claim to be independent of the dimension.
    """
    if distribution == "aligned":
        return torch.full(shape, eta, dtype=dtype)
    if distribution == "uniform":
        unit = 2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1
    elif distribution == "sign":
        unit = 2.0 * torch.randint(0, 2, shape, generator=generator).to(torch.float64) - 1
    elif distribution == "normal":
        unit = (torch.randn(shape, generator=generator, dtype=torch.float64) / 2).clamp(-1, 1)
    else:
        raise unknown_name("distribution", distribution, DISTRIBUTIONS)
    return (unit * eta).clamp(-eta, eta).to(dtype)


def random_network(
    layers: int,
    heads: int,
    dim: int,
    eta: float,
    *,
    key_dim: int | None = None,
    distribution: str = "uniform",
    skip: bool = True,
    causal: bool = False,
    mlp: int | None = None,
    activation: str = "relu",
    norm: str | None = None,
    mlp_skip: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> SelfAttentionNetwork:
    """Draw a network in which every |weight| ≤ η.

    Args:
        layers: L, the number of layers.
        heads: H, the number of heads per layer.
        dim: d, the width of a token.
        eta: η, the largest absolute weight, including the weights and biases of the MLPs.
        key_dim: k, the width of queries and keys. The default is d.
        distribution: `"uniform"` on [−η, η], `"sign"` (±η), `"normal"` (standard deviation η/2, clipped to [−η, η]) or
            `"aligned"` (all weights +η).
        skip: Whether the layers have a skip connection around the attention.
        causal: Whether a token attends only to itself and earlier tokens.
        mlp: The hidden width of an MLP in each layer, or None for no MLP.
        activation: The activation of the MLPs, `"relu"` or `"gelu"`.
        norm: LayerNorm before (`"pre"`) or after (`"post"`) each sublayer, RMSNorm (`"pre-rms"`, `"post-rms"`), or
            `"none"`. Its weights are 1 and its biases 0. None means `"none"`.
        mlp_skip: Whether the layers have a skip connection around the MLP.
        seed: The seed of the random number generator. The same seed gives the same network.
        dtype: The dtype of the weights, `torch.float64` or `torch.float32`.

    Returns:
        The network. Its `provenance` contains the arguments.

    Raises:
        InputError: An argument is out of range.

    >>> random_network(layers=2, heads=3, dim=4, eta=0.1, distribution="sign").summary()
    '2 layers × 3 heads, dim 4, largest weight η = 0.1, skip'
    """
    require_count("layers", layers, "the number of layers L")
    require_count("heads", heads, "the number of heads H per layer")
    require_count("dim", dim, "the width d of a token")
    key_dim = dim if key_dim is None else require_count("key_dim", key_dim, "the width k of queries and keys")
    if mlp is not None:
        require_count("mlp", mlp, "the hidden width of the MLP; omit it for no MLP")
    require_positive("eta", eta, "the largest |weight|")
    require_seed(seed)
    if dtype not in (torch.float64, torch.float32):
        raise InputError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
    asked, eta = eta, largest_not_above(eta, dtype)
    if eta == 0:
        raise InputError(f"eta = {asked!r} is below the smallest positive {dtype}; use float64 or a larger eta")
    norm = norm or "none"
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return draw_weights(shape, eta, distribution, generator, dtype)

    sublayers = 1 if mlp is None else 2
    drawn = []
    for _ in range(layers):
        attention = draw(heads, dim, key_dim), draw(heads, dim, key_dim), draw(heads, dim, dim)
        token_map = None if mlp is None else Mlp(draw(dim, mlp), draw(mlp), draw(mlp, dim), draw(dim))
        norms = [torch.ones(sublayers, dim, dtype=dtype), torch.zeros(sublayers, dim, dtype=dtype)]
        drawn.append(Layer(*attention, token_map, *([] if norm == "none" else norms)))
    settings: dict[str, Any] = {"layers": layers, "heads": heads, "dim": dim, "eta": eta, "key_dim": key_dim}
    settings |= {"distribution": distribution, "mlp": mlp, "seed": seed}
    return SelfAttentionNetwork(
        drawn,
        skip=skip,
        causal=causal,
        activation=activation,
        norm=norm,
        mlp_skip=mlp_skip,
        name=f"random-{distribution}-eta{eta:g}-seed{seed}",
        provenance={"made_by": "random_network", **settings},
    )


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
