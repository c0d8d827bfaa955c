"""What the parts of a model cost, measured on a few of its blocks without its weights.

A model with one block of each kind is built from the configuration, with random weights, on the device and in the dtype
of the run. In its forward passes the time inside a block counts for all blocks of its kind.
"""

import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from depthgauge.base.format import size_text
from depthgauge.checkpoints.block_lists import blocks_of
from depthgauge.checkpoints.block_runner import tokens_of
from depthgauge.checkpoints.layers import batch_size
from depthgauge.checkpoints.library import CheckpointError, attempt, short
from depthgauge.checkpoints.load import HEADROOM, Checkpoint, Placement, parameter_count
from depthgauge.checkpoints.memory import free_memory
from depthgauge.checkpoints.model_output import model_output, window_losses
from depthgauge.checkpoints.model_samples import even_rows, fitting_rows, sample_windows
from depthgauge.checkpoints.samples import Inputs, repeated, shortened
from depthgauge.checkpoints.source import Source, weight_bytes, weight_files
from depthgauge.checkpoints.stored_weights import built_model
from depthgauge.surgery.extract import shrunk_config
from depthgauge.surgery.speed import device_time

LIBRARIES = {"cpu": 0.6e9, "cuda": 3e9}
"""Bytes of memory that Python with torch and transformers takes, by type of device."""
_LONG = 1.0
"""Seconds from which on a part is timed once, and windows are not timed in batches."""
_REPEATS = 3
"""How often a part is timed at most."""
_ROWS = 32
"""Samples that are drawn together to time this on a CPU, where the time is proportional to their number."""
_STEPS = 4
"""Tokens of each of these samples."""
_TOGETHER = 8
"""The most windows that are timed together on a CPU."""
_CONVERTED = 1e-9
"""Seconds in which a parameter is converted to its dtype and checked on a CPU."""
_UNPACKED = 4e-8
"""Seconds in which a parameter of a GGUF file is unpacked."""
_OPENED = 3.0
"""Seconds that the configuration, the tokenizer and the texts take."""
_SPEED_BYTES = 2**26
"""Bytes of the weight files that are read, hashed and copied to measure how fast this is."""
_UPDATED = 2**25
"""Weights that AdamW changes in main memory to measure how fast this is: more than a processor's cache holds."""


@dataclass(frozen=True, eq=False)
class FewBlocks:
    """A model with a few blocks, one of each kind, and random weights.

    - `whole`: the model with all blocks, on the device `meta`
    - `few`: the small model
    - `counts`: its blocks, and how many blocks of the whole model each one stands for
    """

    whole: Checkpoint
    few: Checkpoint
    counts: Mapping[nn.Module, int]

    def seconds(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Return how long a forward pass of the whole model takes in its blocks and outside of them.

        `run` is such a pass of the small model; the first one is not counted, unless it is long. Others on the machine
        slow down the run as they slow down the passes, so the result is the mean of several.
        """
        found = [attempt(self.whole.name, "output", lambda: self._timed(run), "compute")]
        if sum(found[0]) < _LONG or self.few.device.type != "cpu":  # the first pass on a GPU loads its kernels
            begun = time.perf_counter()
            found = [self._timed(run)]
            while len(found) < _REPEATS and time.perf_counter() - begun < _LONG / 2:
                found.append(self._timed(run))
        blocks, rest = (sum(one) / len(found) for one in zip(*found, strict=True))
        return blocks, rest

    def _timed(self, run: Callable[[], Any]) -> tuple[float, float]:
        device, inside, started = self.few.device, dict.fromkeys(self.counts, 0.0), dict[nn.Module, float]()

        def before(module: nn.Module, args: Any) -> None:
            started[module] = device_time(device)

        def after(module: nn.Module, args: Any, out: Any) -> None:
            inside[module] += device_time(device) - started[module]

        with torch.no_grad(), ExitStack() as hooks:
            for block in self.counts:
                hooks.enter_context(block.register_forward_pre_hook(before))
                hooks.enter_context(block.register_forward_hook(after))
            begun = device_time(device)
            run()
            total = device_time(device) - begun
        return sum(count * inside[block] for block, count in self.counts.items()), total - sum(inside.values())


def few_blocks(whole: Checkpoint, placement: Placement) -> FewBlocks:
    """Build the few blocks of a model that is on the device `meta`.

    Raises:
        CheckpointError: its blocks are not found, it cannot be built with a few of them, or even these do not fit.
    """
    blocks, spans, listed = blocks_of(whole), whole.spans, getattr(whole.config, "layer_types", None) or ()
    if not blocks:
        raise CheckpointError(
            f"the time of {whole.name} cannot be estimated: no list of its modules has {whole.layers} blocks"
        )
    alike: dict[Any, list[int]] = {}
    for layer, block in enumerate(blocks):
        stack = next(index for index, span in enumerate(spans) if layer in span)
        shapes = tuple(weight.shape for weight in block.parameters())
        alike.setdefault((stack, type(block), shapes, *listed[layer : layer + 1]), []).append(layer)
    kept = sorted(layers[0] for layers in alike.values())
    config, device = whole.config, placement.torch_device()
    try:
        for key, span in zip(whole.layer_keys, spans, strict=True):
            config = shrunk_config(config, [layer - span.start for layer in kept if layer in span], key)
    except Exception as error:  # configurations check themselves
        raise CheckpointError(
            f"the time of {whole.name} cannot be estimated: transformers does not accept its configuration with the "
            f"blocks {kept} alone: {short(error)}"
        ) from error
    if whole.model.config is not whole.config:  # a text model inside of another one
        outer = type(whole.model.config).from_dict(whole.model.config.to_dict())
        outer.text_config, config = config, outer
    chosen = whole.model.dtype
    least = parameter_count(whole.model) - sum(parameter_count(blocks[k]) for k in range(len(blocks)) if k not in kept)
    if (needed := HEADROOM * least * chosen.itemsize) > (free := free_memory(device)):
        raise CheckpointError(
            f"the time of {whole.name} cannot be estimated: its embedding and {len(kept)} of its blocks need "
            f"{size_text(needed)}, and {size_text(free)} are free on {device}; use --dtype bfloat16 or a larger machine"
        )
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        trusted, kind = placement.trust_remote_code, type(whole.model)
        model = built_model(whole.name, config, kind, trusted, device=device, dtype=chosen)
    families = tuple(whole.families[layer] for layer in kept)
    few = replace(whole, model=model.eval(), config=model.config.get_text_config(), families=families)
    if len(built := blocks_of(few)) != len(kept):
        raise CheckpointError(
            f"the time of {whole.name} cannot be estimated: the number of its blocks does not follow its configuration"
        )
    numbers = {layers[0]: len(layers) for layers in alike.values()}
    return FewBlocks(whole, few, {block: numbers[layer] for layer, block in zip(kept, built, strict=True)})


@dataclass(frozen=True)
class PartCosts:
    """Measured seconds of the parts of a model, and its sizes.

    - `blocks`, `head`: of a forward pass of one window, what all blocks take and what the rest takes with the loss
    - `token`: a forward pass of one token; 0 for models that do not generate
    - `step`: drawing one more token of each of `rows` samples
    - `load`, `hashed`: loading the weights, and hashing their files
    - `passed`: bringing the weights of all blocks to the device once, where they are streamed
    - `moved`: bringing the states of one window to the device and back, before and after each block
    - `room`: bytes that are free on the device beside the weights
    - `files`, `read_speed`: bytes of the weight files, and bytes that are read per second; None without files
    - `batch`: windows that are computed together
    - `layers`, `parameters`, `block_parameters`: the numbers of blocks and of parameters, in total and in all blocks
    - `itemsize`: bytes of a parameter in memory
    - `tokens`, `width`, `output`: tokens of a window, their width, and the bytes of the output of one batch
    """

    blocks: float
    head: float
    token: float
    step: float
    rows: int
    load: float
    hashed: float
    passed: float
    moved: float
    room: int
    files: int
    read_speed: float | None
    layers: int
    parameters: int
    block_parameters: int
    itemsize: int
    tokens: int
    width: int
    output: int
    batch: int = 1

    @property
    def window(self) -> float:
        """A forward pass of one window."""
        return self.blocks + self.head

    def described(self, parts: FewBlocks) -> dict[str, Any]:
        """Return what an estimate says about the model and the machine, by the names of `EstimateRecord`."""
        return {
            "name": parts.whole.name, "parameters": self.parameters, "layers": self.layers, "window": self.tokens,
            "device": str(parts.few.device), "dtype": str(parts.whole.model.dtype).removeprefix("torch."),
            "read_speed": self.read_speed,
        }  # fmt: skip


def measure_costs(
    parts: FewBlocks,
    example: Inputs,
    *,
    together: bool = True,
    samples: int = 0,
    sample_tokens: int = 0,
    streams: bool = False,
) -> PartCosts:
    """Time the parts of a model on an example window.

    Args:
        parts: the model.
        example: a window.
        together: whether the run computes several windows together.
        samples: the number of samples that the run draws from the model.
        sample_tokens: the tokens of each sample.
        streams: whether the weights of the blocks are streamed.

    Raises:
        CheckpointError: the small model cannot be run.
    """
    whole, few = parts.whole, parts.few
    config, is_loss, on_cpu = whole.config, few.objective == "loss", few.device.type == "cpu"

    def forward(inputs: Inputs) -> tuple[float, float]:
        def run() -> None:
            output = model_output(few, inputs)
            window_losses(few.objective, output, inputs, output)

        blocks, head = parts.seconds(run)
        return blocks / len(inputs), head / len(inputs)

    tokens = attempt(whole.name, "output", lambda: tokens_of(few, example), "compute")
    size, free = whole.model.dtype.itemsize, free_memory(few.device)
    later = 0 if streams else size * (parameter_count(whole.model) - parameter_count(few.model))
    room = free - later if later < free else free  # of a larger machine, if the weights do not fit
    batch = batch_size(few.model, tokens, is_loss, room) if few.batched and together else 1
    timed = min(batch, _TOGETHER) if on_cpu else batch
    blocks, head = forward(example[:1])
    if timed > 1 and timed * (blocks * len(parts.counts) / whole.layers + head) < _LONG:
        blocks, head = forward(repeated(example, timed))
    token = step = 0.0
    if is_loss and few.stack is None:
        token = sum(parts.seconds(lambda: model_output(few, shortened(example, 1))))
    rows = even_rows(samples, fitting_rows(whole, sample_tokens, room)) if samples else 0
    if rows:
        drawn = min(rows, _ROWS) if on_cpu else rows
        given: Any = {"windows": drawn, "window": _STEPS + 1, "before": (), "seed": 0, "starts": [0], "batch": drawn}
        step = sum(parts.seconds(lambda: sample_windows(few, **given))) / _STEPS * rows / drawn
    parameters, source, width = parameter_count(whole.model), whole.source, int(config.hidden_size)
    files = 0 if source is None or not weight_files(source) else weight_bytes(source)
    read, hashed, copied = file_speeds(source if files else None, few.device)
    is_packed = source is not None and source.gguf is not None
    unpacked = _UNPACKED if is_packed else _CONVERTED if on_cpu else 0.0
    stored = parameters * size if is_packed or not files else files
    is_cached = stored < free_memory()  # what was read once stays in memory
    return PartCosts(
        blocks=blocks,
        head=head,
        token=token,
        step=step,
        rows=rows,
        load=0.0 if source is None else files / read + files / copied + unpacked * parameters + _OPENED,
        hashed=files / hashed,
        passed=stored / (copied if is_cached else min(read, copied)),
        moved=2 * whole.layers * tokens * width * size / copied,
        room=room,
        files=files,
        read_speed=read if files else None,
        layers=whole.layers,
        parameters=parameters,
        block_parameters=sum(parameter_count(block) for block in blocks_of(whole)),
        itemsize=size,
        tokens=tokens,
        width=width,
        output=4 * batch * tokens * (int(config.vocab_size) if is_loss else 8 * width),
        batch=batch,
    )


def file_speeds(source: Source | None, device: torch.device) -> tuple[float, float, float]:
    """Return how many bytes of the weight files are read, hashed and copied to the device per second.

    Files are hashed in threads. Without files, only the last number is measured.
    """
    files = [] if source is None else weight_files(source)
    data, read = bytearray(_SPEED_BYTES), math.inf
    if files:
        started = time.perf_counter()
        with open(max(files, key=lambda one: one.stat().st_size), "rb") as handle:
            data = bytearray(handle.read(_SPEED_BYTES)) or data
        read = len(data) / (time.perf_counter() - started)
    started = time.perf_counter()
    hashlib.sha256(data)
    hashed = len(data) / (time.perf_counter() - started) * max(1, min(len(files), os.cpu_count() or 1))
    weights = torch.frombuffer(data, dtype=torch.uint8)
    started = device_time(device)
    weights.to(device, copy=True)
    return read, hashed, len(data) / (device_time(device) - started)


def update_time(device: torch.device) -> float:
    """Return the seconds in which AdamW changes one weight of a GPU in main memory.

    Its gradient is brought there, and the changed weight is brought back.
    """
    weights = torch.zeros(_UPDATED, dtype=torch.bfloat16, device=device)
    copies = torch.zeros(_UPDATED)
    optimizer = torch.optim.AdamW([copies], fused=True)
    for _ in range(2):  # the first step allocates memory
        started = device_time(device)
        copies.grad = weights.cpu().float()
        torch.nn.utils.clip_grad_norm_([copies], 1.0)
        optimizer.step()
        weights.copy_(copies.to(weights.dtype))
        taken = device_time(device) - started
    return taken / _UPDATED
