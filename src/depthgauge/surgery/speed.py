"""Compare the speed and memory of two models, alternating in one run."""

import inspect
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge._format import counted
from depthgauge.checkpoints.load import Checkpoint, context_length, wrap
from depthgauge.checkpoints.source import Source, weight_files
from depthgauge.results.shrink_record import BeforeAfter, SpeedRecord


@torch.no_grad()
def compare_speed(
    before: Any, after: Any, ids: Int[Tensor, "1 n"], *, repeats: int = 5, new_tokens: int = 16
) -> tuple[SpeedRecord, BeforeAfter, str]:
    """Measure prefill and decode of two models in turns: before, after, before, after, …

    Alternating keeps a slow phase of the machine from counting against one of the models. One repetition of each model
    is run first and not counted. The times are medians.

    Args:
        before: a transformers model.
        after: another one, on the same device.
        ids: token ids of one window; shortened if the models' context has no room for `new_tokens` after it.
        repeats: how often each model is measured.
        new_tokens: tokens to generate after the window; ignored for models that do not generate.

    Returns:
        The speed, the memory in bytes, and what the memory includes.
    """
    checkpoints = (wrap(before), wrap(after))
    device, context = checkpoints[0].device, context_length(checkpoints[0].config)
    if any(checkpoint.objective != "loss" for checkpoint in checkpoints):
        new_tokens = 0
    if context is not None:
        new_tokens = min(new_tokens, context - 1)
        ids = ids[:, : context - new_tokens]
    turns = [[_run(checkpoint, ids, new_tokens) for checkpoint in checkpoints] for _ in range(repeats + 1)]
    runs = list(zip(*turns[1:], strict=True))
    prefill = [statistics.median(run.prefill for run in found) for found in runs]
    decode = [statistics.median(run.decode for run in found) for found in runs] if new_tokens else [None, None]
    memory = [
        _weights(checkpoint.model) + max(run.memory for run in found)
        for checkpoint, found in zip(checkpoints, runs, strict=True)
    ]
    what = f"{counted(ids.shape[1], 'token')}, then {counted(new_tokens, 'new token')}, on {_device_name(device)}"
    record = SpeedRecord(
        prefill=prefill[0] / prefill[1],
        decode=None if decode[0] is None or decode[1] is None else decode[0] / decode[1],
        prefill_before=prefill[0],
        prefill_after=prefill[1],
        decode_before=decode[0],
        decode_after=decode[1],
        what=what,
    )
    held = "weights and key–value cache" if new_tokens else "weights"
    kind = f"{held}; activations are not included"
    if device.type == "cuda":
        kind = "weights, and the peak of activations and key–value cache"
    return record, BeforeAfter(before=memory[0], after=memory[1]), kind


def weight_bytes(source: Source) -> int:
    """Return the size of the weight files of a checkpoint on disk."""
    return sum(path.stat().st_size for path in weight_files(source))


@dataclass(frozen=True)
class TimedRun:
    """Seconds for the window, seconds per generated token (0 if there are none), and bytes beyond the weights."""

    prefill: float
    decode: float
    memory: int


def _run(checkpoint: Checkpoint, ids: Int[Tensor, "1 n"], new_tokens: int) -> TimedRun:
    model, device = checkpoint.model, checkpoint.device
    takes = inspect.signature(model.forward).parameters
    keywords: dict[str, Any] = {"use_cache": new_tokens > 0} if "use_cache" in takes else {}
    if "logits_to_keep" in takes:
        keywords["logits_to_keep"] = 1  # as in generation: the prompt needs no logits but the last
    ids = ids.to(device)
    held = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = int(torch.cuda.memory_allocated(device))
    started = _now(device)
    out = model(input_ids=ids, **keywords)
    prefill = _now(device) - started
    cache = out.past_key_values if new_tokens else None
    started = _now(device)
    for _ in range(new_tokens):
        token = out.logits[:, -1:].argmax(dim=-1)
        out = model(input_ids=token, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
    return TimedRun(prefill, (_now(device) - started) / max(1, new_tokens), _peak(device, held, cache))


def _weights(model: Any) -> int:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _now(device: torch.device) -> float:
    """Return the time after all work on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak(device: torch.device, held: int, cache: Any) -> int:
    """Return the bytes used beyond the weights: the peak on a GPU, the size of the cache on other devices."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) - held
    layers = getattr(cache, "layers", ())
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
