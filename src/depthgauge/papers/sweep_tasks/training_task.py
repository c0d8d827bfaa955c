"""The task `trained-depth`: train models under a weight bound, and record what depth does in them.

One cell trains one model for each repetition, all at once. The seeds of the models depend on the parameter `seed` and
the number of the repetition alone, so models of different depth and η start from the same random numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from depthgauge.network.network import NORMS
from depthgauge.papers.trained_depth.bounded_training import BatchTrainer, TrainedModel
from depthgauge.papers.trained_depth.experiment import DEFAULTS, UNBOUNDED, member_seeds, options_of, shape_of
from depthgauge.papers.trained_depth.generated_tasks import GENERATED, find_task
from depthgauge.papers.trained_depth.trained_records import examine
from depthgauge.sweeps.cells import Cell
from depthgauge.sweeps.parameters import SEED, Check, Parameter, choice, count, flag, or_word, positive

_OPTIONAL: Mapping[str, Check] = {
    "key_dim": count("the width k of queries and keys"),
    "skip": flag("whether layers have skip connections"),
    "norm": choice(*NORMS),
    "mlp": count("the hidden width of the MLPs"),
    "steps": count("the number of training steps"),
    "batch": count("the number of sequences per step"),
    "rate": positive("the largest learning rate"),
    "test": count("the number of test sequences"),
    "depths": flag("whether the certified and the measured depth are computed"),
}
PARAMETERS = {
    "problem": Parameter(choice(*GENERATED)),
    "layers": Parameter(count("the number of layers L")),
    "heads": Parameter(count("the number of heads H per layer")),
    "dim": Parameter(count("the width d of a token")),
    "eta": Parameter(or_word(UNBOUNDED, positive("η, the largest |weight|, or the word none"))),
    **{name: Parameter(check, DEFAULTS[name]) for name, check in _OPTIONAL.items()},
    "seed": SEED,
}


def complete(parameters: dict[str, Any]) -> dict[str, Any]:
    """Fill in the key width, and check the shape and the options of the models."""
    return {**parameters, "key_dim": shape_of(parameters).key_dim}


def trained_depth(cell: Cell) -> dict[str, Any]:
    """Train the models of a cell, and return their records; every value but `chance` is a list over repetitions."""
    p = cell.parameters
    eta, seeds = None if p["eta"] == UNBOUNDED else p["eta"], member_seeds(p["seed"], cell.repetition)
    trainer = BatchTrainer(find_task(p["problem"]), shape_of(p), [eta] * len(seeds), seeds, options_of(p))
    return records_of(trainer.run(), p)


def records_of(models: Sequence[TrainedModel], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of a cell from its trained models."""
    found = [asdict(examine(model, parameters["test"], depths=parameters["depths"])) for model in models]
    return {"chance": models[0].task.chance, **{name: [record[name] for record in found] for name in found[0]}}
