"""Train the kept blocks of a shrunk model towards the dense model's predictions.

The loss is the mean over predictions of KL(dense ‖ student), or for models that are compared with the dense model's
output the mean of ‖student − dense‖²/‖dense‖² of that output. The states X_ℓ of the dense model on the fit windows are
known, so nothing before the first block that may change is computed, and the dense model's predictions only need its
head.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from depthgauge._io import write_tensors
from depthgauge.checkpoints.load import BY_TARGETS
from depthgauge.checkpoints.memory import free_memory
from depthgauge.surgery.student import Student

RATE = 0.006
"""Largest learning rate times √d, for width d: 2.4e-4 for Gemma-3-270m. Four times as much ended in a worse model on
Gemma-3-270m and on MiniLM; on SmolLM2-135M, a third of it was worse after the same number of steps."""
WARMUP = 0.1
"""Share of the steps during which the learning rate grows."""
SHARE = 24
"""Each step uses at most one window of this many. For the same number of tokens, small steps reached more than large
ones: on SmolLM2 (2,048 against 8,192 tokens) and on MiniLM (96 against 288)."""
TRAINING = 16
"""Bytes that training takes per weight: a copy in float32, its gradient, and the two moments of AdamW."""
_FUSED = ("cpu", "cuda")
"""Devices on which AdamW needs no memory beside its moments."""
SAVE_EVERY = 50
"""Steps between two savings."""


def distill(
    student: Student,
    place: int,
    parameters: Sequence[nn.Parameter],
    *,
    steps: int,
    tokens: int,
    seed: int,
    saved: Path | None = None,
    label: str = "distillation",
) -> None:
    """Train `parameters` of the kept blocks in place with AdamW, linear warm-up and cosine decay.

    The kept blocks before `place` are the first blocks of the dense model, with their original weights; all weights to
    train are in the others. A step takes about `tokens` tokens, and `seed` gives the order of the windows. The file
    `saved` keeps the weights and the optimizer every `SAVE_EVERY` steps; an existing one is continued.
    """
    runner, fit = student.runner, student.fit
    layers, states = student.kept[place:], fit.at(place)
    model, device = runner.checkpoint.model, runner.device
    apart = _divergence if runner.checkpoint.objective in BY_TARGETS else _distance
    rate = RATE / math.sqrt(states.shape[-1])
    # Small steps vanish in half precision, so AdamW works on float32 copies.
    ranks, home = runner.ranks, None if has_room(parameters) else torch.device("cpu")
    if any(ranks.exchanged(home is not None)):  # the gradients of all processes are added on one kind of device
        home = torch.device("cpu")
    masters = [weight.detach().to(home or weight.device, torch.float32, copy=True) for weight in parameters]
    fused = masters[0].device.type in _FUSED
    optimizer = torch.optim.AdamW(masters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    batch = windows_per_step(tokens, fit.windows, states.shape[1])
    order = _order(fit.windows, steps * batch, seed)
    first = _load(student.journal.loaded(saved), masters, parameters, optimizer)

    def find_gradients(own: Int[Tensor, " own"], of: int) -> None:
        for weight in (*masters, *parameters):  # of the last step, or of a call that failed
            weight.grad = None
        for part in torch.split(own, runner.batches.size) if len(own) else ():
            inputs = fit.inputs[part]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                with torch.no_grad():
                    target = runner.output(runner.on_device(fit.final[part]), inputs)
                made = runner.on_device(states[part])
                for layer in layers:
                    made = runner.block(layer, made, inputs)
                made = runner.output(made, inputs)
            loss = apart(target, made) * (len(part) / of)
            loss.backward()  # type: ignore[no-untyped-call]

    with _only(model, parameters), _gradients_to(masters, parameters):
        for step in range(first, steps):
            student.progress(step, steps, label)
            for group in optimizer.param_groups:
                group["lr"] = rate * _schedule(step, steps)
            chosen = order[step * batch : (step + 1) * batch]
            own = chosen[chosen % ranks.count == ranks.index] // ranks.count
            runner.batches.again(partial(find_gradients, own, len(chosen)), len(own))
            if ranks.count > 1:
                slopes = [torch.zeros_like(one) if one.grad is None else one.grad for one in masters]
                for master, slope in zip(masters, ranks.sums(slopes), strict=True):
                    master.grad = slope
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            _copy(masters, parameters)
            if saved is not None and (step + 1) % SAVE_EVERY == 0:
                state = {"step": step + 1, "masters": masters, "optimizer": optimizer.state_dict()}
                write_tensors(saved, state)


def windows_per_step(tokens: int, windows: int, window: int) -> int:
    """Return how many of the fit windows of this length each step uses: a small share of them at most.

    >>> windows_per_step(2048, 192, 512), windows_per_step(2048, 192, 12)
    (4, 8)
    """
    return max(1, min(tokens // window, windows // SHARE))


def has_room(weights: Sequence[nn.Parameter], on: torch.device | None = None) -> bool:
    """Return whether the copies and moments of AdamW have room on a device; by default where their weights are."""
    needed = Counter[torch.device]()
    for weight in weights:
        needed[on or weight.device] += TRAINING * weight.numel()
    return all(count <= free_memory(device) for device, count in needed.items())


@contextmanager
def _gradients_to(masters: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Add the gradient of every weight to that of its copy, as soon as it is known."""

    def moved(weight: Tensor, master: Tensor) -> None:
        assert weight.grad is not None
        gradient = weight.grad.to(master.device).float()  # half as many bytes are moved in half precision
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        weight.grad = None

    with ExitStack() as hooks:
        for weight, master in zip(parameters, masters, strict=True):
            handle = weight.register_post_accumulate_grad_hook(partial(moved, master=master))  # type: ignore[no-untyped-call]
            hooks.callback(handle.remove)
        yield


@contextmanager
def _only(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Compute gradients of these parameters alone, in evaluation mode: dropout stays off, the targets are exact."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    was_training = model.training
    model.eval().requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_()
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
            parameter.grad = None
        model.train(was_training)


@torch.no_grad()
def _copy(masters: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    for weight, master in zip(parameters, masters, strict=True):
        weight.copy_(master.to(weight.dtype))


@torch.no_grad()
def _load(
    state: Mapping[str, Any] | None,
    masters: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> int:
    """Continue from a saved state, if there is one, and return the next step."""
    if state is None:
        return 0
    for master, value in zip(masters, state["masters"], strict=True):
        master.copy_(value)
    _copy(masters, parameters)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _schedule(step: int, steps: int) -> float:
    """Return the learning rate as a share of the largest one."""
    warm = max(1, round(WARMUP * steps))
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _order(windows: int, count: int, seed: int) -> Int[Tensor, " count"]:
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(windows, generator=generator) for _ in range(-(-count // windows))]
    return torch.cat(rounds)[:count]


def _divergence(target: Float[Tensor, "batch *n v"], made: Float[Tensor, "batch *n v"]) -> Tensor:
    """Return the mean of KL(target ‖ made), up to the entropy of the target, which no weight changes."""
    return functional.cross_entropy(made.flatten(0, -2).float(), target.flatten(0, -2).float().softmax(-1))


def _distance(target: Float[Tensor, "batch *n d"], made: Float[Tensor, "batch *n d"]) -> Tensor:
    apart = (made.float() - target.float()).square().sum(-1)
    return (apart / target.float().square().sum(-1).clamp_min(1e-30)).mean()
