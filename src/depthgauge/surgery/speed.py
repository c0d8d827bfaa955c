"""Compare the speed and memory of two models, alternating in one run."""

import inspect
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from depthgauge._format import counted
from depthgauge.checkpoints.input_kinds import AUDIO, IMAGES, TEXT
from depthgauge.checkpoints.load import Checkpoint, context_length, wrap
from depthgauge.checkpoints.model_output import cached_tensors, decoded, no_cache
from depthgauge.checkpoints.samples import Inputs, Samples, as_samples, shortened
from depthgauge.results.shrink_record import BeforeAfter, SpeedRecord

REPEATS, NEW_TOKENS = 3, 8
"""How often each model is measured, and the tokens that each repetition generates, by default."""


@torch.no_grad()
def compare_speed(
    before: Any, after: Any, inputs: Inputs, *, repeats: int = REPEATS, new_tokens: int = NEW_TOKENS
) -> tuple[SpeedRecord, BeforeAfter, str]:
    """Measure prefill and decode of two models in turns: before, after, before, after, …

    Alternating keeps a slow phase of the machine from counting against one of the models. The times are medians over
    `repeats` repetitions; one more comes first and is not counted. The window `inputs` is shortened if the models'
    context has no room for `new_tokens` after it. Models that do not generate, or keep no cache, make no new tokens.

    Returns:
        The speed, the memory in bytes, and what the memory includes.
    """
    checkpoints = (wrap(before), wrap(after))
    device, context = checkpoints[0].device, context_length(checkpoints[0].config)
    if isinstance(inputs, Samples) or not all(map(_has_cache, checkpoints)):
        new_tokens = 0
    if context is not None:
        new_tokens = min(new_tokens, context - 1)
        inputs = shortened(inputs, context - new_tokens)
    turns = [[_run(checkpoint, inputs, new_tokens) for checkpoint in checkpoints] for _ in range(repeats + 1)]
    runs = [list(zip(*found, strict=True)) for found in zip(*turns[1:], strict=True)]  # of each model
    prefill = [statistics.median(times) for times, _, _ in runs]
    decode = [statistics.median(times) for _, times, _ in runs] if new_tokens else [None, None]
    memory = [_weights(one.model) + max(found[2]) for one, found in zip(checkpoints, runs, strict=True)]
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    has_two = getattr(checkpoints[0].config, "is_encoder_decoder", False)
    nouns = {TEXT: "pair" if has_two else "text", IMAGES: "image", AUDIO: "recording"}
    what = f"1 {nouns[checkpoints[0].reads]}, on {place}"
    if not isinstance(inputs, Samples):
        window = as_samples(inputs, TEXT).main.shape[1]
        what = f"{counted(window, 'token')}, then {counted(new_tokens, 'new token')}, on {place}"
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


def _has_cache(checkpoint: Checkpoint) -> bool:
    """Return whether a model generates and returns a cache; the first GPT and RecurrentGemma do not."""
    if checkpoint.objective != "loss":
        return False
    try:
        return bool(decoded(checkpoint.model, torch.zeros(1, 1, dtype=torch.long, device=checkpoint.device), {})[1])
    except (TypeError, ValueError):
        return False


def _run(checkpoint: Checkpoint, inputs: Inputs, new_tokens: int) -> tuple[float, float, int]:
    """Return seconds for the window, seconds per generated token (0 without any), and bytes beyond the weights."""
    model, device = checkpoint.model, checkpoint.device
    # As in generation: the prompt needs no logits but the last.
    keywords = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    given = as_samples(inputs, checkpoint.reads).keywords(device, model.dtype)
    held = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = int(torch.cuda.memory_allocated(device))
    started = device_time(device)
    cache: Mapping[str, Any] = {}
    if new_tokens:
        out, cache = decoded(model, given[TEXT], cache, **keywords)
    else:
        model(**given, **keywords, **no_cache(model))
    prefill = device_time(device) - started
    started = device_time(device)
    for _ in range(new_tokens):
        token = out.logits[:, -1:].argmax(dim=-1)
        out, cache = decoded(model, token, cache)
    return prefill, (device_time(device) - started) / max(1, new_tokens), _peak(device, held, cache)


def _weights(model: Any) -> int:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def device_time(device: torch.device) -> float:
    """Return the time after all work on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _peak(device: torch.device, held: int, cache: Mapping[str, Any]) -> int:
    """Return the bytes used beyond the weights: the peak on a GPU, the size of the cache on other devices."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) - held
    return sum(tensor.numel() * tensor.element_size() for tensor in cached_tensors(cache))
