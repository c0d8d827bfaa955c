"""The set of all sequences of tokens from a vocabulary: what a network is really fed."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord
from depthgauge.base.errors import InputError, InputFileError, require_count, require_type
from depthgauge.base.format import counted, one_line
from depthgauge.theory.linalg.rounding import div_up


@dataclass(frozen=True, eq=False, repr=False)
class Tokens(ArrayRecord):
    """All inputs whose rows are tokens of a vocabulary: x_i = embeddings[t_i], or embeddings[t_i] + positions[i].

    A certificate over this set holds for every prompt. Without positions it holds for sequences of any length, or of up
    to `length` tokens; with positions for sequences of up to as many tokens as there are positions, or `length`.

    Args:
        embeddings: the vectors of the vocabulary, [v, d].
        positions: the vectors of the positions, [n, d], or None.
        length: the largest number of tokens; None allows any number, or as many as there are positions.

    Raises:
        InputError: an array has the wrong shape or dtype, is empty, or has entries that are not finite; or the length
            is not positive, or larger than the number of positions.

    Example:
        >>> import torch
        >>> Tokens(torch.eye(3, dtype=torch.float64), length=4)
        Tokens(3 vectors of width 3, up to 4 tokens)
    """

    embeddings: Float[Tensor, "v d"]
    positions: Float[Tensor, "n d"] | None = None
    length: int | None = None

    kind = "tokens"

    def __post_init__(self) -> None:
        given = {"embeddings": self.embeddings} | ({} if self.positions is None else {"positions": self.positions})
        for name, array in given.items():
            require_type(name, array, (Tensor,), "a tensor of vectors")
            if array.ndim != 2 or 0 in array.shape:
                raise InputError(f"{name} must have shape [number, width] without a zero, got {list(array.shape)}")
            if array.dtype not in (torch.float32, torch.float64):
                raise InputError(f"{name} must be float32 or float64, got {array.dtype}; convert it")
            if not bool(array.isfinite().all()):
                raise InputError(f"{name} holds NaN or infinity; remove those vectors")
            object.__setattr__(self, name, array.detach().to("cpu", torch.float64, copy=True))
        if self.length is not None:
            require_count("length", self.length, "the largest number of tokens of a sequence")
        if self.positions is not None:
            if self.positions.shape[1] != self.width:
                raise InputError(
                    f"positions have width {self.positions.shape[1]}, and embeddings {self.width}; they must be equal"
                )
            if self.length is not None and self.length > len(self.positions):
                raise InputError(
                    f"length is {self.length}, but there are {counted(len(self.positions), 'position')}; give more "
                    "positions or a smaller length"
                )
            object.__setattr__(self, "length", len(self.positions) if self.length is None else self.length)

    @property
    def width(self) -> int:
        """d, the width of a vector."""
        return int(self.embeddings.shape[1])

    @property
    def radius(self) -> float:
        """The largest |entry| of an input."""
        return float(self.points().abs().max())

    @property
    def unevenness(self) -> float:
        """1 − 1/n, rounded up, for n = length: the largest total variation of a row of attention from the average."""
        return 1.0 if self.length is None else float(div_up(self.length - 1.0, float(self.length)))

    def points(self) -> Float[Tensor, "points d"]:
        """Return 𝒫: every vector that a row of an input can be, computed in float64."""
        return self.at_positions().flatten(0, 1) if self.positions is not None else self.embeddings

    def at_positions(self) -> Float[Tensor, "n v d"]:
        """Return the vectors that are possible at each position; one position stands for all if there are none."""
        if self.positions is None:
            return self.embeddings[None]
        return self.positions[: self.length, None, :] + self.embeddings

    def __str__(self) -> str:
        many = "any number of tokens" if self.length is None else f"up to {counted(self.length, 'token')}"
        return f"{counted(len(self.embeddings), 'vector')} of width {self.width}, {many}"

    def __repr__(self) -> str:
        return f"Tokens({self})"


def load_tokens(path: str | Path, length: int | None = None) -> Tokens:
    """Read the tensors `embeddings` [v, d] and, if there is one, `positions` [n, d] of a safetensors file."""
    try:
        found = load_file(Path(path))
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise InputFileError(
            f"cannot read tokens from {path}: {one_line(error)}; expected a safetensors file with a tensor embeddings"
        ) from error
    if "embeddings" not in found or not found.keys() <= {"embeddings", "positions"}:
        held = ", ".join(sorted(found)) or "no tensor"
        raise InputFileError(f"{path} holds {held}, expected a tensor embeddings, and positions if there are any")
    try:
        return Tokens(found["embeddings"], found.get("positions"), length)
    except InputError as error:
        raise InputFileError(f"{path}: {error}") from error
