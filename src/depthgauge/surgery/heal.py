"""Heal a shrunk model: train it towards the dense model's predictions on the fit windows."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge._io import write_atomically
from depthgauge.checkpoints.model_output import model_output
from depthgauge.progress import Step, silent

RATE = 0.012
"""Largest learning rate times √d, for width d; 5e-4 at d = 576 was the best of two tried on SmolLM2."""
WARMUP = 0.1
"""Share of the steps during which the learning rate grows."""
SAVE_EVERY = 50
"""Steps between two savings."""
_TOKENS = 8192
"""Tokens per step."""


def heal(
    student: Any,
    dense: Any,
    ids: Int[Tensor, "windows n"],
    *,
    steps: int,
    loss: bool,
    seed: int,
    saved: Path | None = None,
    progress: Step = silent,
) -> None:
    """Train all weights of `student` in place with AdamW, linear warm-up and cosine decay.

    The objective is the mean over tokens of KL(dense ‖ student), or for models without a head the mean of
    ‖student − dense‖²/‖dense‖² over tokens. On a GPU the matrix products run in bfloat16.

    Args:
        student: the shrunk transformers model.
        dense: the model it was made from.
        ids: token ids of the fit windows.
        steps: number of steps.
        loss: whether the models return logits.
        seed: order of the windows.
        saved: a file that keeps the weights and the optimizer every `SAVE_EVERY` steps; an existing one is continued.
        progress: called before every step.
    """
    device = student.get_input_embeddings().weight.device
    rate = RATE / math.sqrt(student.config.get_text_config().hidden_size)
    weights = [parameter for parameter in student.parameters() if parameter.requires_grad]
    # Small steps vanish in half precision, so AdamW works on float32 copies.
    masters = [weight.detach().float().clone().requires_grad_() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    batch = heal_batch(ids.shape[1])
    order = _order(len(ids), steps * batch, seed)
    dense.eval()
    student.eval()  # dropout stays off: the targets are exact
    first = 0 if saved is None else _load(saved, masters, weights, optimizer)
    for step in range(first, steps):
        progress(step, steps, "healing")
        for group in optimizer.param_groups:
            group["lr"] = rate * _schedule(step, steps)
        part = ids[order[step * batch : (step + 1) * batch]].to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            with torch.no_grad():
                target = model_output(dense, part, loss)
            made = model_output(student, part, loss)
        student.zero_grad()
        (_divergence if loss else _distance)(target, made).backward()  # type: ignore[no-untyped-call]
        for weight, master in zip(weights, masters, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
        if saved is not None and (step + 1) % SAVE_EVERY == 0:
            state = {"step": step + 1, "masters": masters, "optimizer": optimizer.state_dict()}
            write_atomically(saved, partial(torch.save, state))
    student.zero_grad()


def heal_batch(window: int) -> int:
    """Return how many windows of this length each step uses."""
    return max(1, _TOKENS // window)


@torch.no_grad()
def _load(saved: Path, masters: list[Tensor], weights: list[Tensor], optimizer: torch.optim.Optimizer) -> int:
    """Continue from a file, if it exists, and return the next step."""
    if not saved.is_file():
        return 0
    state = torch.load(saved, map_location=masters[0].device, weights_only=True)
    for master, weight, value in zip(masters, weights, state["masters"], strict=True):
        master.copy_(value)
        weight.copy_(value)
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


def _divergence(target: Float[Tensor, "batch n v"], made: Float[Tensor, "batch n v"]) -> Tensor:
    log_p, log_q = target.float().log_softmax(-1), made.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def _distance(target: Float[Tensor, "batch n d"], made: Float[Tensor, "batch n d"]) -> Tensor:
    apart = (made.float() - target.float()).square().sum(-1)
    return (apart / target.float().square().sum(-1).clamp_min(1e-30)).mean()
