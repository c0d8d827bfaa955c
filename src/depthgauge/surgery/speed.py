"""Compare the speed and the memory of two models, in turns."""

import inspect
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from depthgauge._format import counted, number
from depthgauge.checkpoints.input_kinds import AUDIO, IMAGES, TEXT
from depthgauge.checkpoints.load import Checkpoint, context_length, wrap
from depthgauge.checkpoints.memory import free_memory
from depthgauge.checkpoints.model_output import cached_tensors, decoded, no_cache
from depthgauge.checkpoints.samples import Inputs, Samples, as_samples, repeated, shortened
from depthgauge.results.shrink_record import BeforeAfter, SpeedRecord
from depthgauge.surgery.paired_times import WITHIN, PairedTimes, enough, paired_times, prompt_lengths

T = TypeVar("T")
SECONDS = 20.0
"""The time limit for timing two models, half of it for prefill."""


@torch.no_grad()
def compare_speed(
    before: Any, after: Any, inputs: Inputs, *, processes: int = 1
) -> tuple[SpeedRecord, BeforeAfter, str]:
    """Time prefill and decode of two models with `paired_times`, and measure their memory.

    Prefill is timed on so many tokens, images, pairs or recordings that the device is what takes the time, not the
    launching of its kernels; see `enough`. Decode continues the window `inputs` token by token, or a prompt of half the
    context if that is shorter. Models that do not generate, or keep no cache, are not timed there. `processes` is how
    many the run has; the record says so.

    Returns:
        The speed, the memory in bytes, and what the memory includes.
    """
    checkpoints = (wrap(before), wrap(after))
    device, context = checkpoints[0].device, context_length(checkpoints[0].config)
    generates = not isinstance(inputs, Samples) and context != 1 and all(map(_has_cache, checkpoints))
    window = inputs[:1] if context is None else shortened(inputs, context // 2 if generates else context)
    models = [_TimedModel(one, window, generates) for one in checkpoints]
    work, parts, started = *_work(window), time.perf_counter()
    most = parts * free_memory(device) / max(1, 2 * models[0].bytes)
    given = work(enough(lambda units: models[1].prefill(work(units)), most, SECONDS))
    prefill = paired_times(lambda k: models[k].prefill(given), started + SECONDS / 2)
    decode = paired_times(lambda k: models[k].token(), started + SECONDS) if generates else None

    noun = "pair" if getattr(checkpoints[0].config, "is_encoder_decoder", False) else "text"
    amount = counted(len(given), {IMAGES: "image", AUDIO: "recording"}.get(checkpoints[0].reads, noun))
    if isinstance(given, Tensor) and given.dim() == 2:
        amount = (f"{len(given)} × " if len(given) > 1 else "") + counted(given.shape[1], "token")
    place = f"on {torch.cuda.get_device_name(device) if device.type == 'cuda' else device}"
    record = speed_record(prefill, decode, amount, place, processes)
    sizes = [_weights(one.model) + timed.bytes for one, timed in zip(checkpoints, models, strict=True)]
    held = f"weights and the key–value cache of {counted(len(window[0]), 'token')}" if generates else "weights"
    kind = f"{held}; activations are not included"
    if device.type == "cuda":
        kind = "weights, and the peak of activations and key–value cache"
    return record, BeforeAfter(before=sizes[0], after=sizes[1]), kind


def speed_record(
    prefill: PairedTimes, decode: PairedTimes | None, amount: str, place: str, processes: int = 1
) -> SpeedRecord:
    """Return the record of what was timed: a prompt of `amount`, and one new token at a time. `place` says where."""
    what, load, cores = [_said(f"prefill of {amount}", prefill)], os.getloadavg()[0], os.cpu_count() or 1
    if decode is not None:
        what.append(_said("decode of one token at a time", decode))
    what.append(place)
    if processes > 1:
        what.append(f"in one of {processes} processes of the run")
    if load > cores:
        what.append(f"with a load average of {number(load)} on {counted(cores, 'core')}")
    parts = ("", "_low", "_high", "_before", "_after")
    found = {"prefill": prefill, "decode": decode or PairedTimes(pairs=0)}
    fields = {name + part: getattr(one, part[1:] or "ratio") for name, one in found.items() for part in parts}
    return SpeedRecord(**fields, what=", ".join(what))


def _said(name: str, times: PairedTimes) -> str:
    """Return how often a part was timed, and why it has no number if it has none."""
    pairs = f"{name} in {counted(times.pairs, 'pair')} of runs"
    if times.ratio is not None:
        return pairs
    return f"{pairs} (no number is shown, because its 95 % interval did not come within ± {100 * WITHIN:.0f} %)"


def _work(window: Inputs) -> tuple[Callable[[int], Inputs], int]:
    """Return a function from units of work to what the model reads, and how many units the window has.

    Units are a few tokens of a text, and otherwise whole windows. Beyond one window, the window is repeated.
    """
    if not isinstance(window, Tensor) or window.dim() != 2:
        return lambda units: repeated(window, units), 1
    unit, whole = prompt_lengths(window.shape[1])
    return lambda n: repeated(window[:, : min(n * unit, whole)], max(1, n * unit // whole)), whole // unit


def _has_cache(checkpoint: Checkpoint) -> bool:
    """Return whether a model generates and returns a cache; the first GPT and RecurrentGemma do not."""
    if checkpoint.objective != "loss":
        return False
    try:
        return bool(decoded(checkpoint.model, torch.zeros(1, 1, dtype=torch.long, device=checkpoint.device), {})[1])
    except (TypeError, ValueError):
        return False


class _TimedModel:
    """A model that has read a prompt, and continues it if it `generates`.

    - `bytes`: what reading took beyond the weights: the peak on a GPU, the size of the cache on other devices
    """

    def __init__(self, checkpoint: Checkpoint, prompt: Inputs, generates: bool) -> None:
        self.checkpoint, self.model, self.device = checkpoint, checkpoint.model, checkpoint.device
        takes = inspect.signature(self.model.forward).parameters
        # As in generation: the prompt needs no logits but the last.
        self.keywords: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.prompt, self.left = prompt, 0
        self.cache: Mapping[str, Any] = {}
        held = 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            held = int(torch.cuda.memory_allocated(self.device))
        if generates:
            self._read()
        else:
            self.prefill(prompt)
        self.bytes = sum(tensor.numel() * tensor.element_size() for tensor in cached_tensors(self.cache))
        if self.device.type == "cuda":
            self.bytes = int(torch.cuda.max_memory_allocated(self.device)) - held

    def prefill(self, inputs: Inputs) -> float:
        """Return the seconds of reading without a cache."""
        given = as_samples(inputs, self.checkpoint.reads).keywords(self.device, self.model.dtype)
        keywords = self.keywords | no_cache(self.model)
        return timed(self.device, lambda: self.model(**given, **keywords))[0]

    def token(self) -> float:
        """Return the seconds of the next token; after as many as the prompt has, the prompt is read again before."""
        if not self.left:
            self._read()
        self.left -= 1
        token = self.out.logits[:, -1:].argmax(dim=-1)
        seconds, (self.out, self.cache) = timed(self.device, lambda: decoded(self.model, token, self.cache))
        return seconds

    def _read(self) -> None:
        given = as_samples(self.prompt, TEXT)
        self.left = given.main.shape[1]
        self.out, self.cache = decoded(self.model, given.main.to(self.device), {}, **self.keywords)


def _weights(model: Any) -> int:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def timed(device: torch.device, work: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that work takes on a device, by its own clock on a GPU, and the result of the work."""
    if device.type != "cuda":
        started = time.perf_counter()
        result = work()
        return time.perf_counter() - started, result
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        result = work()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1000, result


def device_time(device: torch.device) -> float:
    """Return the time after all work on a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
