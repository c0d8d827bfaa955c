"""Make shrunk models: with given blocks removed, or the smallest one whose loss stays within a limit.

A model is healed by training it towards the dense model's predictions on the fit windows.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge._io import write_atomically
from depthgauge.checkpoints.model_output import model_output
from depthgauge.progress import Step, silent
from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.results.shrink_record import HealRecord, RepairStep, TestedSize
from depthgauge.surgery.certify import Certifier
from depthgauge.surgery.extract import cast
from depthgauge.surgery.shrinker import Shrinker

_BEYOND = 2.0
"""`--max-increase a` searches until the objective on the selection windows grows by more than this times a."""
RATE = 0.012
"""Largest learning rate times √d, for width d; 5e-4 at d = 576 was the best of two tried on SmolLM2."""
WARMUP = 0.1
"""Share of the steps during which the learning rate grows."""
SAVE_EVERY = 50
"""Steps between two savings."""
_TOKENS = 8192
"""Tokens per step."""


@dataclass(frozen=True, eq=False)
class ShrunkModel:
    """A shrunk model and how it was made.

    - `model`: the transformers model
    - `removed`: the removed blocks
    - `repair`, `heal`: what changed the weights
    - `objective`: the objective on the selection windows after the repair
    """

    model: Any
    removed: tuple[int, ...]
    repair: tuple[RepairStep, ...]
    heal: HealRecord | None
    objective: float

    @property
    def repaired(self) -> bool:
        """Whether the repair has changed weights."""
        return any(step.step for step in self.repair)


def make_model(
    shrinker: Shrinker, removed: tuple[int, ...], settings: ShrinkOptions, stored: torch.dtype | None
) -> ShrunkModel:
    """Remove blocks, repair and heal the others, and return the model in the dtype in which it is written.

    `stored` is that dtype; None keeps the one of the dense model, which has its original weights afterwards.
    """
    repair, objective = shrinker.repair(removed)
    model = shrinker.model()
    shrinker.restore()
    healed = None if settings.heal is None else _heal(shrinker, model, removed, objective, settings.heal, settings.seed)
    return ShrunkModel(model if stored is None else cast(model, stored), removed, repair, healed, objective)


def _heal(shrinker: Shrinker, model: Any, removed: tuple[int, ...], before: float, steps: int, seed: int) -> HealRecord:
    """Train a model in place towards the dense one; undo it unless the objective on the selection windows falls."""
    folder = shrinker.journal.folder
    original = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    heal(
        model,
        shrinker.checkpoint.model,
        shrinker.fit.ids,
        steps=steps,
        loss=shrinker.checkpoint.objective == "loss",
        seed=seed,
        saved=None if folder is None else folder / f"heal-{'-'.join(map(str, removed))}.pt",
        progress=shrinker.progress,
    )
    after = shrinker.objective.of_model(model)
    if not after < before:
        model.load_state_dict(original)
    return HealRecord(steps=steps, before=before, after=after, kept=after < before)


def largest_within(
    shrinker: Shrinker, certifier: Certifier, limit: float, settings: ShrinkOptions, stored: torch.dtype | None
) -> tuple[ShrunkModel | None, tuple[TestedSize, ...]]:
    """Test sizes from gentle to harsh on the certify windows, and return the last model before one fails.

    A size passes if its bound is at most the limit. The test stops at the first size that fails. A wrong result
    requires that the first size whose increase exceeds the limit passes, and one bound fails with probability at most
    1 − confidence. No correction for the number of sizes is needed, because the selection windows alone decide their
    order. The result is the model, or None if no size passes, and the tested sizes.
    """
    shrinker.remove_until(len(shrinker.runner) - 1, _BEYOND * limit)
    order = [step.layer for step in shrinker.steps]
    best: ShrunkModel | None = None
    tested: tuple[TestedSize, ...] = ()
    for size in range(1, len(order) + 1):
        made = make_model(shrinker, tuple(sorted(order[:size])), settings, stored)
        bound = certifier.bound(certifier.measure(made.model, f"size {size}")).increase
        passed = bound is not None and bound <= limit
        tested += (TestedSize(removed=size, bound=bound, passed=passed),)
        if not passed:
            break
        best = made
    return best, tested


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
    ‖student − dense‖²/‖dense‖² over tokens (`loss=False`). On a GPU the matrix products run in bfloat16. The seed gives
    the order of the windows `ids`. The file `saved` keeps the weights and the optimizer every `SAVE_EVERY` steps; an
    existing one is continued.
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
