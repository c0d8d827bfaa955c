"""Compare the speed and memory of two models, alternating in one run."""

import inspect
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.checkpoints.load import Checkpoint, context_length, wrap
from depthgauge.checkpoints.source import Source, weight_files
from depthgauge.errors import require_count


@dataclass(frozen=True)
class Cost:
    """What one model costs.

    - `prefill`: seconds for one window, the median over the repetitions
    - `decode`: seconds per generated token after that window, the median; None for models without a key–value cache
    - `parameters`: number of parameters, shared ones counted once
    - `memory`: bytes of memory, as `SpeedComparison.memory_kind` says
    """

    prefill: float
    decode: float | None
    parameters: int
    memory: int


@dataclass(frozen=True)
class SpeedComparison:
    """The costs of two models, measured in turns on the same device.

    - `before`, `after`: the costs of the two models
    - `device`: name of the device
    - `window`: tokens of the window
    - `new_tokens`: generated tokens per repetition
    - `repeats`: number of repetitions, without the warm-up
    - `memory_kind`: what `memory` includes
    """

    before: Cost
    after: Cost
    device: str
    window: int
    new_tokens: int
    repeats: int
    memory_kind: str

    @property
    def prefill(self) -> float:
        """Speed on one window, after ÷ before."""
        return self.before.prefill / self.after.prefill

    @property
    def decode(self) -> float | None:
        """Speed of generation, after ÷ before; None for models without a key–value cache."""
        if self.after.decode is None or self.before.decode is None:
            return None
        return self.before.decode / self.after.decode


@torch.no_grad()
def compare_speed(
    before: Any, after: Any, ids: Int[Tensor, "1 n"], *, repeats: int = 5, new_tokens: int = 16
) -> SpeedComparison:
    """Measure prefill and decode of two models in turns: before, after, before, after, …

    Alternating keeps a slow phase of the machine from counting against one of the models. One repetition of each model
    is run first and not counted.

    Args:
        before: a transformers model.
        after: another one, on the same device.
        ids: token ids of one window; shortened if the models' context has no room for `new_tokens` after it.
        repeats: how often each model is measured.
        new_tokens: tokens to generate after the window; ignored for models that do not generate.
    """
    require_count("repeats", repeats, "how often each model is measured")
    require_count("new_tokens", new_tokens, "the number of tokens to generate")
    checkpoints = (wrap(before), wrap(after))
    generates = all(checkpoint.objective == "loss" for checkpoint in checkpoints)
    new_tokens = new_tokens if generates else 0
    context = context_length(checkpoints[0].config)
    if context is not None:
        new_tokens = min(new_tokens, context - 1)
        ids = ids[:, : context - new_tokens]
    runs: tuple[list[_Run], list[_Run]] = ([], [])
    for _ in range(repeats + 1):
        for checkpoint, found in zip(checkpoints, runs, strict=True):
            found.append(_run(checkpoint, ids, new_tokens))
    on_gpu = checkpoints[0].device.type == "cuda"
    kind = (
        "weights, and the peak of activations and key–value cache"
        if on_gpu
        else "weights and key–value cache; activations are not included"
        if new_tokens
        else "weights; activations are not included"
    )
    costs = [_summary(checkpoint.model, found[1:]) for checkpoint, found in zip(checkpoints, runs, strict=True)]
    return SpeedComparison(
        costs[0], costs[1], _device_name(checkpoints[0].device), ids.shape[1], new_tokens, repeats, kind
    )


def weight_bytes(source: Source) -> int:
    """Return the size of the weight files of a checkpoint on disk.

    Args:
        source: the checkpoint, from `depthgauge.checkpoints.load.find`.
    """
    if source.gguf is not None:
        return source.path.stat().st_size
    return sum(path.stat().st_size for path in weight_files(source))


@dataclass(frozen=True)
class _Run:
    """Seconds for the window, seconds per generated token, and bytes beyond the weights."""

    prefill: float
    decode: float | None
    memory: int


def _run(checkpoint: Checkpoint, ids: Int[Tensor, "1 n"], new_tokens: int) -> _Run:
    model, device = checkpoint.model, checkpoint.device
    takes = inspect.signature(model.forward).parameters
    keywords: dict[str, Any] = {"use_cache": new_tokens > 0} if "use_cache" in takes else {}
    if "logits_to_keep" in takes:
        keywords["logits_to_keep"] = 1  # as in generation: the prompt needs no logits but the last
    ids = ids.to(device)
    held = _allocated(device)
    started = _now(device)
    out = model(input_ids=ids, **keywords)
    prefill = _now(device) - started
    if not new_tokens:
        return _Run(prefill, None, _peak(device, held, None))
    token = out.logits[:, -1:].argmax(dim=-1)
    cache = out.past_key_values
    started = _now(device)
    for _ in range(new_tokens):
        out = model(input_ids=token, past_key_values=cache, use_cache=True)
        token, cache = out.logits[:, -1:].argmax(dim=-1), out.past_key_values
    return _Run(prefill, (_now(device) - started) / new_tokens, _peak(device, held, cache))


def _summary(model: Any, runs: Sequence[_Run]) -> Cost:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    decodes = [run.decode for run in runs if run.decode is not None]
    return Cost(
        prefill=statistics.median(run.prefill for run in runs),
        decode=statistics.median(decodes) if decodes else None,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        memory=weights + max(run.memory for run in runs),
    )


def _now(device: torch.device) -> float:
    """Return the time after all work on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _allocated(device: torch.device) -> int:
    """Return the bytes in use on a GPU and start to record the peak; 0 on other devices."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def _peak(device: torch.device, held: int, cache: Any) -> int:
    """Return the bytes used beyond the weights: the peak on a GPU, the size of the cache on other devices."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) - held
    layers = getattr(cache, "layers", ())
    held_by_cache = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in held_by_cache)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
