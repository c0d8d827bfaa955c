"""Repair every kept block in order, with step lengths chosen on the selection windows."""

from typing import Any

from depthgauge._journal import Journal
from depthgauge.progress import Step, silent
from depthgauge.results.shrink_record import RepairStep
from depthgauge.surgery.effort import Effort
from depthgauge.surgery.objective import Objective
from depthgauge.surgery.repair_block import repair_block
from depthgauge.surgery.states import DenseStates
from depthgauge.surgery.student import Student, suffix_objective


def repair_all(
    student: Student,
    fit: DenseStates,
    select: DenseStates,
    objective: Objective,
    effort: Effort,
    *,
    journal: Journal,
    progress: Step = silent,
) -> tuple[RepairStep, ...]:
    """Repair the kept blocks in order and return the steps.

    Each block is fitted on the outputs of the repaired blocks before it. Its step length is the one of `effort.steps`
    with the smallest objective on the selection windows, or 0 if none is smaller than without the repair. The
    objective therefore never increases.

    Args:
        student: the model, with its original weights.
        fit: the dense model on the windows that repairs are fitted on.
        select: the dense model on the selection windows.
        objective: the objective on the selection windows.
        effort: the step lengths.
        journal: steps of an interrupted run; their step lengths are used again.
        progress: called before every block.
    """
    runner, name = student.runner, "repair " + ",".join(map(str, student.removed))
    known: list[dict[str, Any]] = journal.get(name, [])
    fit_state, select_state = fit.at(0), select.at(0)
    value = suffix_objective(runner, objective, student.kept, select_state)
    steps: list[RepairStep] = []
    for place, layer in enumerate(student.kept):
        progress(place, len(student.kept), f"repair of block {layer}")
        later, best = student.kept[place + 1 :], (value, 0.0)
        change = repair_block(runner, layer, fit_state, fit.at(student.following(layer)), joint=True)
        if place < len(known):
            best = (known[place]["objective"], known[place]["step"])
        else:
            for length in effort.steps:
                change.apply(length)
                best = min(best, (suffix_objective(runner, objective, [layer, *later], select_state), length))
        value = best[0]
        student.apply(change, best[1])
        steps.append(RepairStep(layer=layer, step=best[1], objective=value))
        if place >= len(known):
            journal.put(name, [step.to_json() for step in steps])
        fit_state, select_state = runner.run([layer], fit_state), runner.run([layer], select_state)
    return tuple(steps)
