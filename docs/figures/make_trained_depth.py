"""Train the models of figures T1 to T4 in large batches, and turn them into rows.

Two steps, on two machines if you like:

    python docs/figures/make_trained_depth.py train runs --device cuda      # needs torch, no other heavy package
    python docs/figures/make_trained_depth.py certify runs trained.db       # needs depthgauge, on the CPU

`train` keeps the weights of every batch in a file of `runs`, and `certify` measures and certifies every model, and
commits its rows to a store; run them again to resume. `--jobs` trains several batches at once, which fills a GPU if
NVIDIA's MPS runs there. Then

    depthgauge reproduce T1 T2 T3 T4 --store trained.db --out figures
    depthgauge sweep --store trained.db --export trained-depth.csv

`gzip trained-depth.csv` makes the file that `depthgauge reproduce T1 T2 T3 T4 --rows trained-depth.csv.gz` draws from.
"""

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthgauge.papers.trained_depth.bounded_models import find_task
from depthgauge.papers.trained_depth.bounded_training import (
    DEFAULTS,
    FULL,
    QUICK,
    BatchTrainer,
    ExperimentPlan,
    member_seeds,
    options_of,
    shape_of,
)

SEED = 0


@dataclass(frozen=True)
class ModelFamily:
    """Models that are trained at once: one task and shape, every η and seed.

    Attributes:
        parameters: the parameters of a cell, without `eta`.
        etas: the values of η, in order; `"none"` is no bound.
        seeds: the seeds, in order.
    """

    parameters: Mapping[str, Any]
    etas: tuple[float | str, ...]
    seeds: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the file that keeps the weights."""
        p = self.parameters
        skip = ("skip" if p["skip"] else "noskip") + ("-causal" if p["causal"] else "")
        return f"{p['problem']}-L{p['layers']}-H{p['heads']}-d{p['dim']}-{skip}-{p['norm']}-mlp{p['mlp'] or 0}.pt"

    def trainer(self, device: str = "cpu") -> BatchTrainer:
        """Return the training run at its start: one model for each η and seed."""
        pairs = [(None if isinstance(eta, str) else eta, seed) for eta in self.etas for seed in self.seeds]
        etas, seeds = [eta for eta, _ in pairs], [seed for _, seed in pairs]
        task, options = find_task(self.parameters["problem"]), options_of(self.parameters, device)
        return BatchTrainer(task, shape_of(self.parameters), etas, seeds, options)

    def train(self, folder: Path, device: str) -> list[float]:
        """Train the models, keep their weights in `folder`, and return their accuracies."""
        trainer = self.trainer(device)
        return [model.accuracy for model in trainer.run(folder / self.name)]

    def load(self, folder: Path) -> BatchTrainer:
        """Return the run that `train` kept in `folder`, on the CPU."""
        trainer = self.trainer()
        trainer.resume(folder / self.name)
        return trainer


def families(cells: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[ModelFamily]:
    """Group the parameters of cells into batches, which share everything but `eta`; equal cells are trained once."""
    groups: dict[tuple[tuple[str, Any], ...], list[float | str]] = {}
    for cell in cells:
        full = {**DEFAULTS, **cell}
        full["key_dim"] = shape_of(full).key_dim
        key = tuple((name, value) for name, value in sorted(full.items()) if name not in ("eta", "depths", "seed"))
        groups.setdefault(key, []).append(full["eta"])
    return [ModelFamily(dict(key), tuple(dict.fromkeys(etas)), tuple(seeds)) for key, etas in groups.items()]


def parameters_of(plan: ExperimentPlan) -> Iterator[dict[str, Any]]:
    """Yield the parameters of every cell of T1 to T4."""
    for lists in (*plan.depth_grids(), *plan.variant_grids(), *plan.decoder_grids()):
        for values in itertools.product(*lists.values()):
            yield dict(zip(lists, values, strict=True))


def batches(plan: ExperimentPlan) -> list[ModelFamily]:
    """Return the batches of the plan, the deepest first."""
    found = families(list(parameters_of(plan)), member_seeds(SEED, plan.seeds))
    return sorted(found, key=lambda family: -family.parameters["layers"])


def trained(work: tuple[ModelFamily, Path, str, float]) -> tuple[list[float], float] | None:
    """Train a batch, and return its accuracies and seconds; None if it is too late to start."""
    family, folder, device, until = work
    start = time.time()
    return None if start > until else (family.train(folder, device), time.time() - start)


def train(plan: ExperimentPlan, folder: Path, device: str, limit: float, jobs: int = 1) -> None:
    """Train every batch and print its accuracies; start none after `limit` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    begun, models = time.time(), 0
    work = [(family, folder, device, begun + limit) for family in batches(plan)]
    with multiprocessing.get_context("spawn").Pool(jobs) if jobs > 1 else nullcontext() as pool:
        done = map(trained, work) if pool is None else pool.imap(trained, work)
        for (family, *_), result in zip(work, done, strict=True):
            if result is None:
                print(f"stopped after {limit:.0f} s; run the same command again to resume")
                return
            accuracy, seconds = result
            models += len(accuracy)
            per_eta = [accuracy[i : i + plan.seeds] for i in range(0, len(accuracy), plan.seeds)]
            shown = " ".join(f"{eta}:{sum(a) / len(a):.2f}" for eta, a in zip(family.etas, per_eta, strict=True))
            print(f"{family.name} {seconds:.0f} s  {shown}", flush=True)
    print(f"{models} models in {time.time() - begun:.0f} s on {device}")


def certify(plan: ExperimentPlan, folder: Path, store: Path, jobs: int) -> None:
    """Commit a row for every cell whose models `train` has finished."""
    import joblib

    from depthgauge.papers.sweep_tasks import TASKS
    from depthgauge.sweeps.grid import CellOutcome, Grid
    from depthgauge.sweeps.store import Store, run_lock

    lists = [*plan.depth_grids(), *plan.variant_grids(), *plan.decoder_grids()]
    grids = [Grid(TASKS["trained-depth"], {**one, "seed": [SEED]}, plan.seeds) for one in lists]
    cells = {cell.identity: cell for grid in grids for cell in grid.cells()}
    with run_lock(store), Store.open(store, create=True) as opened:
        for grid in grids:
            opened.plan("trained-depth", grid.document(), grid.cells())
        missing = [cell for key, cell in cells.items() if key not in opened.settled(cells, failed=False)]
        work = [(folder, plan.seeds, dict(cell.parameters)) for cell in missing]
        results = joblib.Parallel(jobs, return_as="generator")(joblib.delayed(examined)(*one) for one in work)
        for index, (cell, (result, seconds)) in enumerate(zip(missing, results, strict=True)):
            if result is not None:
                opened.record(CellOutcome(cell.identity, result, None, seconds))
            if index % 20 == 0:
                print(f"{index} of {len(missing)}", flush=True)
        print(opened.count())


def examined(folder: Path, seeds: int, parameters: Mapping[str, Any]) -> tuple[dict[str, Any] | None, float]:
    """Return the result of a cell from the weights in `folder`, or None if its batch is not finished."""
    import torch

    from depthgauge.papers.sweep_tasks import records_of

    torch.set_num_threads(1)
    begun = time.perf_counter()
    (alone,) = families([parameters], member_seeds(SEED, seeds))
    for family in itertools.chain(batches(FULL), batches(QUICK)):
        if family.parameters == alone.parameters and family.seeds == alone.seeds:
            if not (folder / family.name).exists():
                return None, 0.0
            trainer = family.load(folder)
            if trainer.step < trainer.options.steps:
                return None, 0.0
            first = family.etas.index(parameters["eta"]) * seeds
            models = trainer.models()[first : first + seeds]
            return records_of(models, parameters), time.perf_counter() - begun
    return None, 0.0


def main() -> None:
    """Run the step that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("train", "certify"))
    parser.add_argument("folder", type=Path, help="folder of the weights")
    parser.add_argument("store", type=Path, nargs="?", default=Path("trained.db"), help="store of the rows (certify)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (train)")
    parser.add_argument("--quick", action="store_true", help="the small version")
    parser.add_argument("--limit", type=float, default=1e9, help="start no batch after this many seconds (train)")
    parser.add_argument("--jobs", type=int, help="processes; by default one to train, one for each core to certify")
    given = parser.parse_args()
    plan = QUICK if given.quick else FULL
    if given.step == "train":
        train(plan, given.folder, given.device, given.limit, given.jobs or 1)
    else:
        certify(plan, given.folder, given.store, given.jobs or -1)


if __name__ == "__main__":
    main()
