"""Train the models of figures T1 to T3 in large batches, and turn them into rows.

Two steps, on two machines if you like:

    python docs/figures/make_trained_depth.py train runs --device cuda      # needs torch, no other heavy package
    python docs/figures/make_trained_depth.py certify runs trained.db       # needs depthgauge, on the CPU

`train` keeps the weights of every batch in a file of `runs`; run it again to resume. Several processes may train
different tasks (`--problems`) at the same time. `certify` measures and certifies
every model, and commits its rows to a store; run it again to resume. Then

    depthgauge reproduce T1 T2 T3 --store trained.db --out figures
    depthgauge sweep --store trained.db --export trained-depth.csv

`gzip trained-depth.csv` makes the file that `depthgauge reproduce T1 T2 T3 --rows trained-depth.csv.gz` draws from.
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from depthgauge.papers.trained_depth.experiment import FULL, QUICK, ExperimentPlan, ModelFamily, families, member_seeds

SEED = 0


def parameters_of(plan: ExperimentPlan) -> Iterator[dict[str, Any]]:
    """Yield the parameters of every cell of T1, T2 and T3."""
    for lists in (*plan.depth_grids(), *plan.variant_grids()):
        for values in itertools.product(*lists.values()):
            yield dict(zip(lists, values, strict=True))


def batches(plan: ExperimentPlan, problems: Sequence[str] = ()) -> list[ModelFamily]:
    """Return the batches of the plan, the deepest first; `problems` names the tasks, and none of them means all."""
    found = families(list(parameters_of(plan)), member_seeds(SEED, plan.seeds))
    chosen = [family for family in found if not problems or family.parameters["problem"] in problems]
    return sorted(chosen, key=lambda family: -family.parameters["layers"])


def train(plan: ExperimentPlan, folder: Path, device: str, limit: float, problems: Sequence[str] = ()) -> None:
    """Train every batch and print its accuracies; stop before a batch if `limit` seconds have passed."""
    folder.mkdir(parents=True, exist_ok=True)
    begun, models = time.perf_counter(), 0
    for family in batches(plan, problems):
        if time.perf_counter() - begun > limit:
            print(f"stopped after {limit:.0f} s; run the same command again to resume")
            return
        start = time.perf_counter()
        accuracy = family.train(folder, device)
        models += len(accuracy)
        per_eta = [accuracy[i : i + plan.seeds] for i in range(0, len(accuracy), plan.seeds)]
        shown = " ".join(f"{eta}:{sum(a) / len(a):.2f}" for eta, a in zip(family.etas, per_eta, strict=True))
        print(f"{family.name} {time.perf_counter() - start:.0f} s  {shown}", flush=True)
    print(f"{models} models in {time.perf_counter() - begun:.0f} s on {device}")


def certify(plan: ExperimentPlan, folder: Path, store: Path, jobs: int) -> None:
    """Commit a row for every cell whose models `train` has finished."""
    import joblib

    from depthgauge.papers.sweep_tasks.tasks import TASKS
    from depthgauge.sweeps.cells import CellOutcome
    from depthgauge.sweeps.grid import Grid
    from depthgauge.sweeps.store import Store, run_lock

    lists = [*plan.depth_grids(), *plan.variant_grids()]
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

    from depthgauge.papers.sweep_tasks.training_task import records_of

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
    parser.add_argument(
        "--problems", nargs="*", default=[], help="train these tasks alone, all if none is named (train)"
    )
    parser.add_argument("--jobs", type=int, default=-1, help="processes (certify)")
    given = parser.parse_args()
    plan = QUICK if given.quick else FULL
    if given.step == "train":
        train(plan, given.folder, given.device, given.limit, given.problems)
    else:
        certify(plan, given.folder, given.store, given.jobs)


if __name__ == "__main__":
    main()
