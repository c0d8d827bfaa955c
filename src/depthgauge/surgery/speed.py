"""Compare the speed and the memory of two models, in turns."""

import inspect
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.base.format import counted, number
from depthgauge.checkpoints.blocks.model_output import cached_tensors, decoded, no_cache
from depthgauge.checkpoints.inputs.windows import Inputs, Samples, as_samples, repeated, shortened
from depthgauge.checkpoints.source.model_class import context_length
from depthgauge.checkpoints.weights.load import Checkpoint, wrap
from depthgauge.checkpoints.weights.stored_weights import free_memory
from depthgauge.results.shrink_record import BeforeAfter, SpeedRecord
from depthgauge.surgery.fresh_process import FEW, WITHIN, PairedTimes, enough, paired_times

SECONDS = 20.0
"""The time limit for timing two models, half of it for prefill."""


@torch.no_grad()
def compare_speed(before: Any, after: Any, inputs: Inputs) -> tuple[SpeedRecord, BeforeAfter, str]:
    """Time prefill and decode of two models with `paired_times`, and measure their memory.

    Prefill is timed on so many tokens, images, pairs or recordings that the device is what takes the time, not the
    launching of its kernels; see `enough`. Decode continues the window `inputs` token by token, or less of it where the
    context is less than twice as long. Models that do not generate, or keep no cache, are not timed there.

    Returns:
        The speed, the memory in bytes, and what the memory includes.
    """
    dense, context = wrap(before), context_length(before.config)
    generates = dense.objective == "loss" and not isinstance(inputs, Samples) and context != 1
    window = inputs[:1] if context is None else shortened(inputs, context // 2 if generates else context)
    models = [_TimedModel(checkpoint, window, generates) for checkpoint in (dense, wrap(after))]
    tokens = window.shape[1] if isinstance(window, Tensor) and window.dim() == 2 else 0

    def given(size: int) -> Inputs:
        """Return so many tokens in one window or several of the same length, or so many other inputs."""
        rows = -(-size // tokens) if tokens else size
        return repeated(window[:, : size // rows] if tokens else window, rows)

    started, most = time.perf_counter(), max(1, tokens) * free_memory(dense.device) / max(1, 2 * models[0].bytes)
    size = enough(lambda size: models[1].prefill(given(size)), min(FEW, tokens) or 1, most, SECONDS)
    read, decode = given(size), None
    prefill = paired_times(lambda which: models[which].prefill(read), started + SECONDS / 2)
    if all(model.cache for model in models):
        decode = paired_times(lambda which: models[which].token(), started + SECONDS)
    amount = f"{len(read)} × {size // len(read)} tokens" if tokens else counted(size, "input")
    place, held = str(dense.device), f"weights{' and key–value cache' if decode else ''}; activations are not included"
    if dense.device.type == "cuda":
        place = torch.cuda.get_device_name(dense.device)
        held = "weights, and the peak of activations and key–value cache"
    memory = [model.weights + model.bytes for model in models]
    record = speed_record(amount, prefill, decode, f"on {place}")
    return record, BeforeAfter(before=memory[0], after=memory[1]), held


def speed_record(amount: str, prefill: PairedTimes, decode: PairedTimes | None, place: str) -> SpeedRecord:
    """Return the record of what was timed: a prompt of `amount`, and one new token at a time. `place` says where."""
    fields, what = dict[str, Any](decode=None), []
    parts = (("prefill", f"prefill of {amount}", prefill), ("decode", "decode of one token at a time", decode))
    for part, name, times in parts:
        if times is not None:
            fields |= zip((part + end for end in ("", "_low", "_high", "_before", "_after")), times[1:], strict=True)
            settled = f" (no number: its 95 % interval did not come within ± {100 * WITHIN:.0f} %)"
            what.append(f"{name} in {counted(times.pairs, 'pair')} of runs{'' if times.ratio else settled}")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = [f"with a load average of {number(load)} on {counted(cores, 'core')}"] if load > cores else []
    return SpeedRecord(**fields, what=", ".join((*what, place, *busy)))


class _TimedModel:
    """A model that has read a prompt, and continues it if it keeps a cache.

    - `weights`, `bytes`: bytes of the weights, and beyond them: on a GPU at the peak, on other devices of the cache
    """

    def __init__(self, checkpoint: Checkpoint, prompt: Inputs, generates: bool) -> None:
        self.checkpoint, self.model, self.device, self.prompt = checkpoint, checkpoint.model, checkpoint.device, prompt
        takes = inspect.signature(self.model.forward).parameters
        # As in generation: the prompt needs no logits but the last.
        self.keywords: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.cache: Mapping[str, Any] = {}
        self.weights, held = sum(one.nbytes for one in (*self.model.parameters(), *self.model.buffers())), 0
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            held = torch.cuda.memory_allocated(self.device)
        if generates:
            with suppress(TypeError, ValueError):  # the first GPT and RecurrentGemma keep no cache
                self._read()
        if not self.cache:
            self.prefill(prompt)
        self.bytes = sum(tensor.nbytes for tensor in cached_tensors(self.cache))
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - held

    def prefill(self, inputs: Inputs) -> float:
        """Return the seconds of reading without a cache."""
        given = as_samples(inputs, self.checkpoint.reads).keywords(self.device, self.model.dtype)
        keywords = self.keywords | no_cache(self.model)
        return timed(self.device, lambda: self.model(**given, **keywords))

    def token(self) -> float:
        """Return the seconds of the next token; after as many as the prompt has, the prompt is read again before."""
        if not self.left:
            self._read()
        self.left -= 1
        return timed(self.device, lambda: self._step(self.token_id, self.cache))

    def _read(self) -> None:
        given = as_samples(self.prompt).main.to(self.device)
        self.left = given.shape[1]
        self._step(given, {}, **self.keywords)

    def _step(self, ids: Int[Tensor, "1 n"], cache: Mapping[str, Any], **keywords: Any) -> None:
        out, self.cache = decoded(self.model, ids, cache, **keywords)
        self.token_id = out.logits[:, -1:].argmax(dim=-1)


def timed(device: torch.device, work: Callable[[], Any]) -> float:
    """Return the seconds that work takes, by the clock of a GPU if the device is one."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1000
