"""The output of a model on token ids, and the numbers that compare two outputs."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.checkpoints.library import CheckpointError, attempt, transformers
from depthgauge.checkpoints.load import Checkpoint, measured_part

_ENTRIES = {"cpu": 2**22, "cuda": 2**26}
"""Largest number of logits converted to float32 at once: 16 MB, which a cache holds; 256 MB on a GPU, where each piece
costs several launches."""

_TRIED = 32
"""Tokens on which a model is tried."""


def no_cache(model: Any) -> dict[str, bool]:
    """Return the keyword arguments with which a model keeps no key–value cache."""
    taken = inspect.signature(model.forward).parameters
    others = any(one.kind is one.VAR_KEYWORD for one in taken.values()) and getattr(model.config, "use_cache", False)
    return {"use_cache": False} if "use_cache" in taken or others else {}


def decoded(
    model: Any, ids: Int[Tensor, "batch n"], cache: Mapping[str, Any], **keywords: Any
) -> tuple[Any, Mapping[str, Any]]:
    """Run a causal language model on the next tokens; return its output, and the cache for the tokens after them.

    The cache is a set of keyword arguments, empty for the first tokens: what the model returns under the name of one of
    its arguments, such as `past_key_values`, or `cache_params` of Mamba. A model that takes a cache but returns none
    (RecurrentGemma) is given one. The result is empty if the model keeps no cache.
    """
    takes = inspect.signature(model.forward).parameters
    out = model(input_ids=ids, use_cache=True, **cache, **keywords)
    found = {name: value for name, value in out.items() if name in takes and value is not None}
    if not found and not cache and "past_key_values" in takes:
        cache = {"past_key_values": transformers().DynamicCache(config=model.config)}
        out = model(input_ids=ids, use_cache=True, **cache, **keywords)
        return out, cache if cached_tensors(cache) else {}
    return out, found or cache


def cached_tensors(cache: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a cache: a list of tensors, or the states of every layer."""
    found: list[Any] = []
    for one in cache.values():
        found += one if isinstance(one, list | tuple) else [v for layer in one.layers for v in vars(layer).values()]
    values = [value for one in found for value in (one.values() if isinstance(one, Mapping) else [one])]
    return [value for value in values if isinstance(value, Tensor)]


def model_output(model: Any, ids: Int[Tensor, "batch n"], loss: bool) -> Float[Tensor, "batch n out"]:
    """Return the logits of a model, or with `loss=False` the final states of the model without its head."""
    part = measured_part(model, loss)
    out = part(input_ids=ids, **no_cache(part))
    made: Tensor = out.logits if loss else out.last_hidden_state
    return made


@torch.no_grad()
def require_output(checkpoint: Checkpoint, ids: Int[Tensor, " n"]) -> None:
    """Run a model on a few tokens; raise if it cannot run, or if its output is NaN."""

    def run() -> Tensor:
        return model_output(checkpoint.model, ids[None, :_TRIED].to(checkpoint.device), checkpoint.objective == "loss")

    if bool(attempt(checkpoint.name, "output", run, "compute").isnan().any()):
        raise CheckpointError(
            f"the output of {checkpoint.name} is NaN; use --dtype float32 if the dtype is too narrow, otherwise "
            "correct its configuration, or download it again"
        )


def token_losses(
    logits: Float[Tensor, "batch n vocabulary"], ids: Int[Tensor, "batch n"]
) -> Float[Tensor, "batch n-1"]:
    """Return −log p(next token) for every token but the first, in nats.

    The logits are converted to float32 a few rows at a time, so that they are never copied as a whole.
    """
    count = max(1, _ENTRIES.get(logits.device.type, _ENTRIES["cpu"]) // logits.shape[-1])
    parts = [
        part.float().logsumexp(dim=-1) - part.float().gather(-1, target[:, None])[:, 0]
        for rows, targets in zip(logits[:, :-1], ids[:, 1:].to(logits.device), strict=True)
        for part, target in zip(torch.split(rows, count), torch.split(targets, count), strict=True)
    ]
    return torch.cat(parts).reshape(len(ids), -1)


def relative_distance(
    output: Float[Tensor, "batch ..."], reference: Float[Tensor, "batch ..."]
) -> Float[Tensor, " batch"]:
    """Return ‖output − reference‖F / ‖reference‖F for every window."""
    wanted = reference.double().flatten(1)
    distance: Tensor = (output.double().flatten(1) - wanted).norm(dim=1) / wanted.norm(dim=1)
    return distance
