"""`train_bounded`: train many small models at once under a weight bound |w| ≤ η.

    w ← Π( w − r·(m̂/(√v̂ + ε) + λw) ),      Π the projection onto the box,

AdamW with the rate r, which rises linearly during the warm-up and then falls like a cosine. r is relative: it is
multiplied by min(η, s), where s is the spread of the initial weights without a bound. So a step has the same size
relative to the weights in every model and for every kind of weight.

This module needs torch alone, so that the models can be trained on a machine that cannot prove or draw anything.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from depthgauge.base.errors import (
    InputError,
    require_count,
    require_options,
    require_path,
    require_positive,
    require_seed,
    require_type,
)
from depthgauge.base.format import counted
from depthgauge.base.io import write_tensors
from depthgauge.base.progress import Step, silent
from depthgauge.papers.trained_depth.bounded_models import (
    BoundedModel,
    GeneratedTask,
    ModelShape,
    Weights,
    bounds_of,
    check_eta,
    find_task,
    initial_weights,
    logits,
    project,
    take_model,
)

CHUNK = 32
"""Training data are drawn for this many steps at once."""
_WEIGHTS, _DATA, _TEST = 1, 2, 3
"""Uses of random numbers; each has its own stream."""
_BETAS, _EPSILON = (0.9, 0.98), 1e-8
"""β₁, β₂ and ε of AdamW."""
FORMAT = 1


@dataclass(frozen=True)
class TrainingOptions:
    """How the models are built and trained.

    Attributes:
        key_dim: k, the width of queries and keys; None is d/H, rounded up.
        skip: whether the layers have skip connections.
        norm: LayerNorm, `"none"`, `"pre"` or `"post"`.
        mlp: the hidden width of an MLP in each layer, or None for no MLP.
        causal: whether a token sees only itself and earlier tokens.
        steps: the number of training steps.
        batch: the number of new sequences per model and step.
        rate: the largest learning rate, relative to the spread of the initial weights.
        warmup: the share of the steps in which the rate rises.
        decay: λ, the weight decay of AdamW.
        clip: the largest Euclidean norm of the gradient of a model; larger gradients are scaled down.
        test: the number of sequences on which the accuracy is measured.
        device: `"cpu"` or a CUDA device.
        dtype: `"float32"` or `"float64"`.
        save_every: with a checkpoint file, it is written after this many steps.
    """

    key_dim: int | None = None
    skip: bool = True
    norm: str = "none"
    mlp: int | None = None
    causal: bool = False
    steps: int = 2000
    batch: int = 64
    rate: float = 0.05
    warmup: float = 0.1
    decay: float = 0.0
    clip: float = 1.0
    test: int = 2000
    device: str = "cpu"
    dtype: str = "float32"
    save_every: int = 500

    def __post_init__(self) -> None:
        require_count("steps", self.steps, "the number of training steps")
        require_count("batch", self.batch, "the number of sequences per step")
        require_count("test", self.test, "the number of test sequences")
        require_count("save_every", self.save_every, "the number of steps between two checkpoints")
        require_positive("rate", self.rate, "the largest learning rate")
        require_positive("clip", self.clip, "the largest norm of a gradient")
        for name in ("warmup", "decay"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be from 0 to below 1, got {getattr(self, name)!r}")
        if self.dtype not in ("float32", "float64"):
            raise InputError(f"dtype must be float32 or float64, got {self.dtype!r}")

    def shape(self, layers: int, heads: int, dim: int) -> ModelShape:
        """Return the shape of the models."""
        require_count("heads", heads, "the number of heads per layer")
        require_count("dim", dim, "the width of a token")
        key_dim = -(-dim // heads) if self.key_dim is None else self.key_dim
        return ModelShape(layers, heads, dim, key_dim, self.skip, self.norm, self.mlp, self.causal)


@dataclass(frozen=True, eq=False, repr=False)
class TrainedModel:
    """A trained model with what was measured after training. Trained models compare by identity.

    Attributes:
        task: the task on which it was trained.
        model: the network, the embeddings and the readout.
        eta: η, the bound on the weights of the network, or None.
        seed: the seed of its initial weights and of its training data.
        accuracy: the share of correct labels on new sequences.
        loss: the mean cross-entropy on the same sequences.
    """

    task: GeneratedTask
    model: BoundedModel
    eta: float | None
    seed: int
    accuracy: float
    loss: float

    def __repr__(self) -> str:
        bound = "no bound" if self.eta is None else f"η = {self.eta:g}"
        layers = counted(len(self.model.network), "layer")
        return f"TrainedModel({self.task.name}, {layers}, {bound}, accuracy {self.accuracy:.3f})"


def rate_at(step: int, options: TrainingOptions) -> float:
    """Return the learning rate of a step: linear warm-up, then a cosine down to zero."""
    rising = options.warmup * options.steps
    if step < rising:
        return options.rate * (step + 1) / max(rising, 1.0)
    return options.rate * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(options.steps - rising, 1.0)))


def stream_seed(*parts: int) -> int:
    """Return the seed of one stream of random numbers, derived from a seed and the numbers of its use.

    >>> stream_seed(0, 2, 7) == stream_seed(0, 2, 7) != stream_seed(0, 2, 8)
    True
    """
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


class TrainingData:
    """New sequences for every step. Models with equal seeds see equal data; the data do not depend on the batch."""

    def __init__(self, task: GeneratedTask, seeds: Sequence[int], options: TrainingOptions) -> None:
        self.task, self.options = task, options
        self.seeds = list(dict.fromkeys(seeds))
        self.of_model = torch.tensor([self.seeds.index(seed) for seed in seeds], device=options.device)
        self._held: tuple[int, Tensor, Tensor] | None = None

    def at(self, step: int) -> tuple[Int64[Tensor, "models batch n"], Int64[Tensor, "models batch"]]:
        """Return the sequences and labels of all models at a step."""
        chunk, inside = divmod(step, CHUNK)
        if self._held is None or self._held[0] != chunk:
            size = CHUNK * self.options.batch
            drawn = [self.task.draw(size, stream_seed(seed, _DATA, chunk)) for seed in self.seeds]
            tokens, labels = (torch.stack(part).to(self.options.device) for part in zip(*drawn, strict=True))
            self._held = (chunk, tokens, labels)
        _, tokens, labels = self._held
        here = slice(inside * self.options.batch, (inside + 1) * self.options.batch)
        return tokens[self.of_model, here], labels[self.of_model, here]


def losses(
    outputs: Float[Tensor, "models samples classes"], labels: Int64[Tensor, "models samples"]
) -> Float[Tensor, " models"]:
    """Return the mean cross-entropy of every model; one-hot labels keep the gradient deterministic on a GPU."""
    wanted = F.one_hot(labels, outputs.shape[-1]).to(outputs.dtype)
    return -(outputs.log_softmax(dim=-1) * wanted).sum(dim=-1).mean(dim=1)


def gradients_of(
    shape: ModelShape, weights: Weights, tokens: Tensor, labels: Tensor, clip: float
) -> tuple[Weights, Float[Tensor, " models"]]:
    """Return the gradient of every model's loss, scaled down to the norm `clip`, and the losses."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    loss = losses(logits(shape, leaves, tokens), labels)
    found = torch.autograd.grad(loss.sum(), list(leaves.values()))
    square = sum((gradient.flatten(1).square().sum(dim=1) for gradient in found), torch.zeros_like(loss))
    factor = (clip / square.sqrt().clamp(min=1e-30)).clamp(max=1.0).detach()
    scaled = [gradient * factor.reshape(-1, *(1 for _ in gradient.shape[1:])) for gradient in found]
    return dict(zip(leaves, scaled, strict=True)), loss.detach()


class BatchedAdamW:
    """AdamW (Loshchilov and Hutter, 2019) with one learning rate for each model and weight; in place.

    All operations are entrywise, so models of a batch do not influence each other. `linalg.adam.Adam` has one rate and
    no state that can be saved, and torch's AdamW cannot take a tensor of rates per parameter.
    """

    def __init__(self, weights: Weights) -> None:
        self.steps = 0
        self.first = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        self.second = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def step(self, weights: Weights, gradients: Weights, rates: Weights, decay: float) -> None:
        """Move the weights: w ← w − r·(m̂/(√v̂ + ε) + λw)."""
        self.steps += 1
        one, two = _BETAS
        for name, gradient in gradients.items():
            first, second, weight = self.first[name], self.second[name], weights[name]
            first.mul_(one).add_(gradient, alpha=1 - one)
            second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
            size = (second / (1 - two**self.steps)).sqrt_().add_(_EPSILON)
            move = (first / (1 - one**self.steps)).div_(size)
            if decay:
                move.add_(weight, alpha=decay)
            weight.sub_(move.mul_(rates[name]))


class BatchTrainer:
    """The state of a training run: weights, optimiser and step. It can be saved and continued exactly.

    One model is trained for each pair (η, seed), all at once; `etas` and `seeds` have equal length. The result of a
    model does not depend on the other models of the batch, apart from rounding.
    """

    def __init__(
        self,
        task: GeneratedTask,
        shape: ModelShape,
        etas: Sequence[float | None],
        seeds: Sequence[int],
        options: TrainingOptions,
    ) -> None:
        self.task, self.shape, self.options = task, shape, options
        self.etas, self.seeds = tuple(etas), tuple(seeds)
        dtype = {"float32": torch.float32, "float64": torch.float64}[options.dtype]
        bounds = bounds_of(shape, task, etas, dtype)
        starts = [stream_seed(seed, _WEIGHTS) for seed in seeds]
        weights = initial_weights(shape, task, bounds, starts, dtype)
        self.bounds = {name: bound.to(options.device) for name, bound in bounds.items()}
        self.weights = {name: weight.to(options.device) for name, weight in weights.items()}
        self.scale = {name: bound.clamp(max=shape.spread(name)) for name, bound in self.bounds.items()}  # of the rate
        self.adam = BatchedAdamW(self.weights)
        self.data = TrainingData(task, seeds, options)

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self.adam.steps

    def advance(self) -> None:
        """Do one step."""
        tokens, labels = self.data.at(self.step)
        rate = rate_at(self.step, self.options)
        gradients, _ = gradients_of(self.shape, self.weights, tokens, labels, self.options.clip)
        rates = {name: rate * scale for name, scale in self.scale.items()}
        self.adam.step(self.weights, gradients, rates, self.options.decay)
        project(self.weights, self.bounds)

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint must share with this run to continue it."""
        task, options = self.task, asdict(replace(self.options, device="cpu", save_every=1))
        drawn = {"task": (task.name, task.vocabulary, task.length, task.classes), "shape": asdict(self.shape)}
        return {**drawn, "etas": self.etas, "seeds": self.seeds, "options": options}

    def save(self, path: str | Path) -> None:
        """Write the state to a file, atomically; a finished run keeps the weights alone."""
        done = self.step >= self.options.steps
        state = {
            "format": FORMAT,
            "identity": self.identity(),
            "steps": self.step,
            "weights": self.weights,
            "first": {} if done else self.adam.first,
            "second": {} if done else self.adam.second,
        }
        write_tensors(path, state)

    def resume(self, path: str | Path) -> None:
        """Continue from a file that `save` wrote; raise `InputError` if it belongs to another run."""
        try:
            state = torch.load(path, map_location=self.options.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, UnpicklingError) as error:
            raise InputError(f"cannot read the checkpoint {path}; delete it to train from the start") from error
        if state.get("format") != FORMAT or state.get("identity") != self.identity():
            raise InputError(f"{path} is the checkpoint of a training run with other settings; give another file")
        self.weights = state["weights"]
        self.adam.first, self.adam.second, self.adam.steps = state["first"], state["second"], state["steps"]

    def run(self, checkpoint: str | Path | None = None, progress: Step = silent) -> list[TrainedModel]:
        """Train to the end, from the checkpoint file if it exists, and return the models."""
        steps = self.options.steps
        if checkpoint is not None and Path(checkpoint).exists():
            self.resume(checkpoint)
        while self.step < steps:
            self.advance()
            if checkpoint is not None and (self.step % self.options.save_every == 0 or self.step == steps):
                self.save(checkpoint)
            if self.step % CHUNK == 0:
                progress(self.step, steps, self.task.name)
        progress(steps, steps, "")
        return self.models()

    def measure(self) -> tuple[Float[Tensor, " models"], Float[Tensor, " models"]]:
        """Return the accuracy and the loss of every model on new sequences, the same for all models."""
        tokens, labels = held_out(self.task, self.options.test)
        right, loss = torch.zeros(len(self.etas)), torch.zeros(len(self.etas))
        with torch.no_grad():
            for part, wanted in zip(torch.split(tokens, 250), torch.split(labels, 250), strict=True):
                many = part.to(self.options.device).expand(len(self.etas), *part.shape)
                wanted = wanted.to(self.options.device).expand(len(self.etas), -1)
                outputs = logits(self.shape, self.weights, many)
                right += (outputs.argmax(dim=-1) == wanted).sum(dim=1).cpu()
                loss += losses(outputs, wanted).cpu() * len(part)
        return right / len(tokens), loss / len(tokens)

    def models(self) -> list[TrainedModel]:
        """Return every model with its accuracy."""
        found = zip(self.etas, self.seeds, *(measured.tolist() for measured in self.measure()), strict=True)
        return [
            TrainedModel(self.task, take_model(self.shape, self.weights, index), *values)
            for index, values in enumerate(found)
        ]


def held_out(task: GeneratedTask, count: int) -> tuple[Int64[Tensor, "samples n"], Int64[Tensor, " samples"]]:
    """Return the test sequences of a task with their labels; training data use other random numbers."""
    return task.draw(count, stream_seed(0, _TEST))


def train_bounded(
    task: GeneratedTask | str,
    layers: int,
    heads: int,
    dim: int,
    eta: float | Sequence[float | None] | None,
    *,
    seeds: Sequence[int] = (0,),
    options: TrainingOptions | None = None,
    checkpoint: str | Path | None = None,
    progress: Step = silent,
) -> list[TrainedModel]:
    """Train attention models on a generated task with every weight of the network in [−η, η].

    A model embeds tokens and positions (entries at most ½ each), applies a `SelfAttentionNetwork`, and reads the label
    from the last token by a linear map with entries at most 1. After every step of AdamW the weights are projected onto
    their box. All models are trained at once.

    Args:
        task: A task, or its name: `recall-2`, `recall-3`, `1-hop`, `2-hop`, `pointer-2`, `pointer-4`, `s3`, `s5`,
            `majority` or `parity`.
        layers: L, the number of layers.
        heads: H, the number of heads per layer.
        dim: d, the width of a token.
        eta: η, the largest |weight| of the network; None is no bound; a list trains every seed at every η of it.
        seeds: One model is trained for each seed and η. A seed determines the initial weights and the training data.
        options: Architecture, optimiser, device and precision; see `TrainingOptions`.
        checkpoint: File that keeps the state of the run. If it exists, the run continues from it.
        progress: Called as `progress(done, total, label)`.

    Returns:
        The trained models, for the first η with all seeds, then for the next η.

    Raises:
        InputError: An argument is out of range, or the checkpoint belongs to a run with other settings.

    Example:
        >>> (model,) = train_bounded("majority", 1, 1, 4, 0.5, options=TrainingOptions(steps=150, batch=32, test=200))
        >>> model.accuracy > 0.8
        True
    """
    require_options(options, TrainingOptions, "train_bounded")
    require_type("task", task, (str, GeneratedTask), "a GeneratedTask or the name of one")
    require_type("seeds", seeds, Sequence, "a list of whole numbers, one for each model")
    if checkpoint is not None:
        require_path("checkpoint", checkpoint)
    options = TrainingOptions() if options is None else options
    task = find_task(task) if isinstance(task, str) else task
    etas = [check_eta(one) for one in (eta if isinstance(eta, Sequence) else [eta])]
    seeds = [require_seed(seed) for seed in seeds]
    if not etas or not seeds:
        raise InputError("give at least one eta and one seed; one model is trained for each pair")
    every = [one for one in etas for _ in seeds], [seed for _ in etas for seed in seeds]
    return BatchTrainer(task, options.shape(layers, heads, dim), *every, options).run(checkpoint, progress)


# --- The trained-depth experiment: which models figures T1 to T4 train -----------------------------------------------
# This module needs torch alone, so that the models can be trained on a machine that cannot prove or draw anything.

UNBOUNDED = "none"
"""The value of `eta` that stands for no bound."""
_OPTIONS = ("key_dim", "skip", "norm", "mlp", "causal", "steps", "batch", "rate", "test")
DEFAULTS: Mapping[str, Any] = {name: getattr(TrainingOptions, name) for name in _OPTIONS} | {
    "test": 1000,
    "depths": True,
}
"""Defaults of the optional parameters of a cell of `trained-depth`."""
_MEMBERS = 4
"""The use of random numbers from which the seeds of models are drawn."""

Lists = dict[str, list[Any]]
"""A grid: a list of values for each parameter."""
Eta = float | str


@dataclass(frozen=True)
class ExperimentPlan:
    """The models of figures T1 to T4 at one scale.

    T1 and T2 have the tasks `problems` and the values `etas` of η, T3 has the tasks `contrasted` and the values `few`,
    and T4 the tasks `decoded`, the depths `decoder_layers` and the values `smallest` as well as `etas`. `shape` holds
    heads, width and training options; `seeds` is the number of models at every setting.
    """

    problems: tuple[str, ...]
    contrasted: tuple[str, ...]
    etas: tuple[float, ...]
    few: tuple[float, ...]
    layers: tuple[int, ...]
    shape: Mapping[str, Any]
    seeds: int
    contrast_layers: int = 4
    """The larger number of layers in T3."""
    decoded: tuple[str, ...] = ()
    smallest: tuple[float, ...] = ()
    decoder_layers: tuple[int, ...] = (2, 4)

    @property
    def deepest(self) -> int:
        """The largest number of layers."""
        return max(self.layers)

    @property
    def wide(self) -> int:
        """The number of heads of one layer with as many heads as the deepest network."""
        return self.deepest * int(self.shape["heads"])

    @property
    def decoder_etas(self) -> tuple[float, ...]:
        """The values of η of T4."""
        return self.smallest + self.etas

    def depth_grids(self) -> list[Lists]:
        """Return the grids of T1: every task, depth and η; and one layer with the heads of the deepest network.

        Depths are computed for the deepest networks alone, in the second grid; T2 draws these.
        """
        etas: list[Eta] = [*self.etas, UNBOUNDED]
        problems, fewer = list(self.problems), [layers for layers in self.layers if layers != self.deepest]
        return [
            self._lists(problem=problems, layers=fewer, eta=etas, depths=[False]),
            self._lists(problem=problems, layers=[self.deepest], eta=etas, depths=[True]),
            self._lists(problem=problems, layers=[1], heads=[self.wide], eta=etas, depths=[False]),
        ]

    def variant_grids(self) -> list[Lists]:
        """Return the grids of T3: with and without skips and LayerNorm, one layer and several."""
        if not self.contrasted:
            return []
        variants: Lists = {"skip": [True, False], "norm": ["none", "pre"], "depths": [False]}
        layers = [1, self.contrast_layers]
        return [self._lists(problem=list(self.contrasted), layers=layers, eta=list(self.few), **variants)]

    def decoder_grids(self) -> list[Lists]:
        """Return the grids of T4: causal blocks with LayerNorm before attention and MLP."""
        if not self.decoded:
            return []
        etas: list[Eta] = [*self.decoder_etas, UNBOUNDED]
        kind: Lists = {"causal": [True], "norm": ["pre"], "mlp": [2 * int(self.shape["dim"])], "depths": [False]}
        return [self._lists(problem=list(self.decoded), layers=list(self.decoder_layers), eta=etas, **kind)]

    def _lists(self, **lists: list[Any]) -> Lists:
        return {name: [value] for name, value in self.shape.items()} | lists


FULL = ExperimentPlan(
    problems=("recall-3", "pointer-2", "1-hop", "s3", "majority", "parity"),
    contrasted=("recall-3", "pointer-2"),
    etas=(0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0),
    few=(0.01, 0.03, 0.1, 0.2, 0.5, 1.0),
    layers=(1, 2, 4, 8),
    shape={"heads": 2, "dim": 32, "key_dim": 16, "steps": 3000, "batch": 64, "rate": 0.05},
    seeds=5,
    decoded=("recall-3", "1-hop", "pointer-2"),
    smallest=(0.0001, 0.0002, 0.0005),
)
QUICK = ExperimentPlan(
    problems=("recall-2", "pointer-2", "majority"),
    contrasted=("pointer-2",),
    etas=(0.001, 0.03, 0.2, 1.0),
    few=(0.03, 0.2, 1.0),
    layers=(1, 2, 4, 8),
    shape={"heads": 2, "dim": 32, "key_dim": 16, "steps": 400, "batch": 32, "rate": 0.05, "test": 500},
    seeds=2,
    decoded=("recall-2",),
)


def member_seeds(seed: int, count: int) -> list[int]:
    """Return the seeds of `count` models; a larger count extends the list."""
    return [stream_seed(seed, _MEMBERS, index) for index in range(count)]


def options_of(parameters: Mapping[str, Any], device: str = "cpu") -> TrainingOptions:
    """Return the training options of a cell of the task `trained-depth`."""
    return TrainingOptions(**{name: parameters[name] for name in _OPTIONS}, device=device)


def shape_of(parameters: Mapping[str, Any]) -> ModelShape:
    """Return the shape of the models of a cell."""
    return options_of(parameters).shape(parameters["layers"], parameters["heads"], parameters["dim"])
