"""The probe batch: a few sequences that are measured again and again during training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthgauge.errors import InputError

IGNORED = -100
"""The label that transformers leaves out of the loss."""


@dataclass(frozen=True)
class ProbeBatch:
    """The arguments of the model's forward pass.

    - `inputs`: name → tensor, at least `input_ids`
    - `real`: which tokens are no padding, `[batch, n]`
    """

    inputs: Mapping[str, Tensor]
    real: Tensor

    @property
    def ids(self) -> Tensor:
        """The token ids, `[batch, n]`."""
        return self.inputs["input_ids"]

    def to(self, device: torch.device) -> "ProbeBatch":
        """Return the batch on a device."""
        return ProbeBatch({name: value.to(device) for name, value in self.inputs.items()}, self.real.to(device))


def make_batch(probe: Any, sequences: int, tokens: int) -> ProbeBatch:
    """Cut a training batch to a few short sequences.

    Args:
        probe: the keyword arguments of the model's forward pass, with `input_ids`, as a data loader yields them; or
            the token ids alone.
        sequences: how many sequences to keep.
        tokens: how many tokens of each to keep.

    Raises:
        InputError: The probe has no token ids, or a sequence has only padding in its first tokens.
    """
    given = {"input_ids": probe} if isinstance(probe, Tensor) else probe
    if not isinstance(given, Mapping):
        raise InputError(
            f"probe must be a batch of the model, a mapping with input_ids or a tensor of token ids, got "
            f"{type(probe).__name__}; take one from the data loader"
        )
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64) or 0 in ids.shape:
        shown = "none" if not isinstance(ids, Tensor) else f"{ids.dtype} of shape {list(ids.shape)}"
        raise InputError(f"probe must contain input_ids, whole numbers of shape [batch, tokens], got {shown}")
    batch, n = ids.shape
    if n < 2:
        raise InputError(f"the sequences of the probe must have at least 2 tokens, got {n}; give longer ones")
    inputs = {
        name: _cut(value, batch, n, sequences, tokens).detach().clone()
        for name, value in given.items()
        if isinstance(value, Tensor)
    }
    mask = inputs.get("attention_mask")
    real = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    if mask is not None and mask.shape == real.shape:
        real = mask > 0
        if bool((real.sum(dim=1) < 2).any()):
            raise InputError(
                f"a sequence of the probe has fewer than 2 tokens that are no padding among its first {tokens}; give a "
                "probe with longer sequences that are padded on the right"
            )
    return ProbeBatch(inputs, real)


def _cut(value: Tensor, batch: int, n: int, sequences: int, tokens: int) -> Tensor:
    """Keep the first sequences and, in every dimension that has the length of a sequence, the first tokens."""
    if value.ndim == 0 or value.shape[0] != batch:
        return value
    kept = value[:sequences]
    for dim in range(1, kept.ndim):
        if kept.shape[dim] == n:
            kept = kept.narrow(dim, 0, min(n, tokens))
    return kept


def check_ids(batch: ProbeBatch, model: Any) -> None:
    """Raise `InputError` if the model has no embedding for a token id of the probe, or no output for a label.

    On a GPU, an index that is out of range cannot be caught: it ends the process.
    """
    tables = {"input_ids": model.get_input_embeddings(), "labels": model.get_output_embeddings()}
    for name, table in tables.items():
        given, weight = batch.inputs.get(name), getattr(table, "weight", None)
        if given is None or weight is None or given.shape != batch.ids.shape:
            continue
        rows = int(weight.shape[0])
        wrong = given[((given < 0) | (given >= rows)) & ((given != IGNORED) | (name == "input_ids"))]
        if len(wrong):
            part = "embedding" if name == "input_ids" else "output"
            raise InputError(
                f"{name} of the probe contain the token id {int(wrong[0])}, but the {part} of {type(model).__name__} "
                f"has {rows} rows, for ids from 0 to {rows - 1}; use the tokenizer of this model"
            )
