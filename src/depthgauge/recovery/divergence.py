"""How far a smaller model, the student, is from its source, the teacher, on a batch of windows.

For a model with a head this is the mean over predictions of KL(teacher ‖ student) at temperature 1. For other models it
is the mean of ‖student − teacher‖²/‖teacher‖² of the output. Logits are computed in float32, a few tokens at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.blocks.model_output import WindowBatches, batch_size, model_output, no_cache, window_losses
from depthgauge.checkpoints.inputs.windows import Inputs, as_samples, shortened
from depthgauge.checkpoints.weights.load import BY_TARGETS, Checkpoint

ENTRIES = {"cpu": 2**22, "cuda": 2**26}
"""The most logits that exist at once for each of the two models."""
TRAIN, SELECT, APART = "train", "select", "apart"
"""Windows to train on, those that choices are made by, and those of a text that nothing is chosen by."""
_TRIED = 16
"""Tokens on which the way from the states to the logits is checked."""


@dataclass(frozen=True, eq=False)
class LogitHead:
    """A model as two parts: logits = finish(head(states)).

    - `body`: returns the states
    - `head`: the linear map to the vocabulary
    - `finish`: what the model does with its result: nothing, a scale, or a soft cap
    """

    body: Any
    head: nn.Module
    finish: Callable[[Tensor], Tensor]

    def states(self, inputs: dict[str, Any]) -> Float[Tensor, "tokens d"]:
        """Return the states of all tokens."""
        hidden: Tensor = self.body(**inputs, **no_cache(self.body)).last_hidden_state
        return hidden.flatten(0, 1)

    def logits(self, states: Float[Tensor, "tokens d"]) -> Float[Tensor, "tokens vocabulary"]:
        """Return the logits of some tokens in float32."""
        return self.finish(self.head(states).float())


@torch.no_grad()
def find_head(checkpoint: Checkpoint, inputs: Inputs) -> LogitHead | None:
    """Return the parts of a causal language model; None if its logits on a few tokens are not found from its states.

    Nothing is assumed about the family: a scale is measured, and a soft cap is read from the configuration.
    """
    model, body = checkpoint.model, checkpoint.model.base_model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if checkpoint.objective != "loss" or head is None or body is model:
        return None
    given = arguments(checkpoint, shortened(inputs, _TRIED))
    wanted = model(**given, **no_cache(model)).logits.flatten(0, 1).float()
    found = LogitHead(body, head, lambda logits: logits)
    try:
        raw = found.logits(found.states(given))
    except (TypeError, AttributeError, RuntimeError):  # the body takes other arguments, or returns other states
        return None
    caps = [value for name, value in vars(checkpoint.config).items() if "softcap" in name and value]
    scale = float((raw * wanted).sum() / raw.square().sum()) if raw.shape == wanted.shape else 0.0
    near = 2e-2 if model.dtype.itemsize < 4 else 1e-4
    for finish in (found.finish, lambda logits: scale * logits, *(_soft_cap(float(cap)) for cap in caps)):
        if raw.shape == wanted.shape and (finish(raw) - wanted).norm() <= near * wanted.norm():
            return LogitHead(body, head, finish)
    return None


def _soft_cap(cap: float) -> Callable[[Tensor], Tensor]:
    return lambda logits: cap * torch.tanh(logits / cap)


def arguments(checkpoint: Checkpoint, inputs: Inputs) -> dict[str, Any]:
    """Return the arguments of a model on its device."""
    return as_samples(inputs, checkpoint.reads).keywords(checkpoint.device, checkpoint.model.dtype)


class Pair(nn.Module):
    """A student and its teacher. The forward pass returns their divergence on some of the windows.

    Both models stay in evaluation mode, so that the predictions of the teacher are exact and dropout is off.
    """

    def __init__(self, student: Checkpoint, teacher: Checkpoint, windows: Mapping[str, Inputs]) -> None:
        super().__init__()
        self.checkpoints, self.windows = (student, teacher), windows
        self.student, self.teacher = student.model, teacher.model
        self.heads = tuple(find_head(one, windows[TRAIN][:1]) for one in self.checkpoints)
        self._keys_to_ignore_on_save = None  # the trainer reads it when it continues
        self._no_split_modules = getattr(student.model, "_no_split_modules", None)  # how FSDP divides a model
        self.tokens = int(as_samples(windows[TRAIN], student.reads).main.shape[1])
        size = batch_size(student.model, self.tokens, student.objective == "loss")
        self.batches = WindowBatches(size if student.batched else 1)

    def forward(self, index: Int[Tensor, " batch"], part: str = TRAIN) -> Tensor:
        """Return the divergence on the windows with these numbers; of another part, the objective of each window."""
        inputs, (student, teacher) = self.windows[part][index.cpu()], self.checkpoints
        mine, other = self.heads
        if part != TRAIN:
            output = model_output(student, inputs)
            reference = output if student.objective in BY_TARGETS else model_output(teacher, inputs)
            return window_losses(student.objective, output, inputs, reference)
        if mine is None or other is None:
            with torch.no_grad():
                target = model_output(teacher, inputs)
            apart = divergence if student.objective in BY_TARGETS else distance
            return apart(target, model_output(student, inputs))
        with torch.no_grad(), torch.autocast(teacher.device.type, enabled=False):
            targets = other.states(arguments(teacher, inputs))
        states = mine.states(arguments(student, inputs))
        found: Tensor = _InParts.apply(states, targets, mine, other)  # type: ignore[no-untyped-call]
        return found

    @torch.no_grad()
    def losses(self, part: str, model: Any = None) -> Float[Tensor, " windows"]:
        """Return the objective of the student on all windows of a part; `model` is this pair as accelerate wraps it."""
        count = len(self.windows[part])
        self.eval()

        def measure(these: slice) -> Tensor:
            losses: Tensor = (self if model is None else model)(torch.arange(count)[these], part)
            return losses.double().cpu()

        return torch.cat(self.batches.map(measure, count))

    def train(self, mode: bool = True) -> "Pair":
        """Stay in evaluation mode; activation checkpointing alone needs the student in training mode."""
        self.teacher.eval()
        self.student.train(mode and bool(getattr(self.student, "is_gradient_checkpointing", False)))
        self.training = mode
        return self

    def state_dict(self, *args: Any, **keywords: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the weights that are trained."""
        trained = {name for name, weight in self.named_parameters() if weight.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **keywords).items() if name in trained}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the weights that are trained."""
        return super().load_state_dict(state_dict, False, assign)


class _InParts(torch.autograd.Function):
    """The mean of KL(teacher ‖ student) over tokens, and its gradient with respect to the states, in one pass."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, mine: LogitHead, other: LogitHead) -> Tensor:
        """Compute loss and gradient in parts of `ENTRIES` logits; the heads have no gradient."""
        vocabulary = int(getattr(mine.head, "weight", states).shape[0])
        count = max(1, ENTRIES.get(states.device.type, ENTRIES["cpu"]) // vocabulary)
        slopes, total = torch.empty_like(states), torch.zeros((), device=states.device)
        for part in (slice(start, start + count) for start in range(0, len(states), count)):
            target = other.logits(targets[part])
            with torch.enable_grad():
                own = states[part].detach().requires_grad_()
                loss = divergence(target, mine.logits(own)) * (len(own) / len(states))
            (slopes[part],) = torch.autograd.grad(loss, own)
            total += loss.detach()
        ctx.save_for_backward(slopes)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Scale the gradient that the forward pass has computed."""
        (slopes,) = ctx.saved_tensors
        return gradients[0] * slopes, None, None, None


def divergence(target: Float[Tensor, "*n v"], made: Float[Tensor, "*n v"]) -> Tensor:
    """Return the mean over predictions of KL(target ‖ made)."""
    own, wanted = (one.flatten(0, -2).float().log_softmax(-1) for one in (made, target))
    return functional.kl_div(own, wanted, log_target=True, reduction="batchmean")


def distance(target: Float[Tensor, "*n d"], made: Float[Tensor, "*n d"]) -> Tensor:
    """Return the mean of ‖made − target‖²/‖target‖²."""
    apart = (made.float() - target.float()).square().sum(-1)
    return (apart / target.float().square().sum(-1).clamp_min(1e-30)).mean()


def require_pair(student: Checkpoint, teacher: Checkpoint) -> None:
    """Raise unless the outputs of two models can be compared entry by entry."""
    sizes = [getattr(one.config, "vocab_size", None) for one in (student, teacher)]
    if student.objective != teacher.objective or sizes[0] != sizes[1]:
        raise InputError(
            f"{student.name} ({student.objective}, vocabulary {sizes[0]}) cannot be recovered towards {teacher.name} "
            f"({teacher.objective}, vocabulary {sizes[1]}); give the model that it was made from"
        )


@contextmanager
def trained_alone(model: nn.Module, weights: list[nn.Parameter]) -> Iterator[None]:
    """Compute gradients of these weights of a model alone."""
    before = [(weight, weight.requires_grad) for weight in model.parameters()]
    model.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_()
    try:
        yield
    finally:
        for weight, required in before:
            weight.requires_grad_(required)
            weight.grad = None
