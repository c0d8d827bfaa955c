"""The chosen model is never worse on the selection windows than any alternative, on trained models of every family."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DECODERS, MODELS, some_families, tiny_model
from trained_models import objective_of, sequences, trained_model

from depthgauge.base.journal import Journal
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.recovery import recover_model
from depthgauge.recovery.distillation import TrainingMemoryError, step_windows
from depthgauge.recovery.recover_model import Recovery
from depthgauge.recovery.training_data import RecoveryData
from depthgauge.results.recover_record import Amount
from depthgauge.surgery import candidates as module
from depthgauge.surgery.candidates import (
    GREEDY,
    PEERS,
    Candidates,
    Repaired,
    Search,
    difference,
    make_model,
    paired_weights,
)
from depthgauge.surgery.student import Effort, Student

SMALL = Effort(48, 24, 60, 12, 10**6, 4, 2, 24)
COUNT = 2
TRAINED = ("llama", "gemma3", "bert")
"""Norms before sublayers, around them, and after them. All kinds of maps are repaired in test_repair.py."""


def student_of(model: Any, effort: Effort = SMALL, **keywords: Any) -> Student:
    fit, select = sequences(5, effort.fit), sequences(6, effort.select)
    return Student(wrap(model), fit, select, effort=effort, **keywords)


@pytest.mark.parametrize("name", some_families(MODELS, TRAINED))
def test_no_alternative_is_better_than_what_is_written(name: str) -> None:
    """Adjacent blocks may be chosen instead of others that are better by less than the standard error."""
    torch.manual_seed(0)
    with student_of(trained_model(name)) as student:
        if name in DECODERS:
            assert student.dense < 0.8 * math.log(32)  # it has learned something
        search = Search(student)
        search.remove_until(COUNT)
        sets = search.sets(COUNT)
        made = make_model(Candidates(student, training=fitted(student)), sets, None)
        written = objective_of(student, made.model)
        assert written == pytest.approx(made.objective, rel=1e-4)
        chosen = next(one for one in made.candidates if one.chosen)
        assert chosen.removed == made.removed
        assert chosen.repaired == pytest.approx(made.objective - student.dense, abs=1e-5)
        bare = student.losses_without(sets.values())
        for removed, losses in bare.items():
            gain, error = difference(bare[made.removed], losses)
            assert written <= float(losses.mean()) + 1e-5 or gain <= error, removed
        assert [stage.name for stage in made.stages][-1] == "distillation"
        losses = [float(bare[made.removed].mean())]
        for stage in made.stages:
            # A stage that was undone left no trace.
            assert stage.before == pytest.approx(losses[-1], rel=1e-4), stage.name
            losses += [stage.after] if stage.kept else []
        assert losses == sorted(losses, reverse=True)
        assert written == pytest.approx(losses[-1], rel=1e-4)


def test_the_repair_helps_where_it_can() -> None:
    """A repair that is never kept would pass the test above."""
    kept = set()
    for name in TRAINED:
        with student_of(trained_model(name)) as student:
            search = Search(student)
            search.remove_until(1)
            removed = (search.steps[0].layer,)
            _, _, made = Candidates(student, training=fitted(student)).choose({"one": removed})
            kept |= {(name, stage.name) for stage in made.stages if stage.kept}
    assert {("gemma3", "distillation"), ("bert", "distillation")} < kept
    assert kept & {("llama", "least squares"), ("llama", "distillation")}
    assert not {("gemma3", "least squares"), ("bert", "least squares")} & kept


@pytest.mark.parametrize("rate", [1.0, 1e6])
def test_a_training_that_does_not_help_is_undone(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = recover_model.usual_rate
    monkeypatch.setattr(recover_model, "usual_rate", lambda weights: rate * usual(weights))
    with student_of(trained_model("gemma3")) as student:
        _, _, made = Candidates(student, training=fitted(student)).choose({"one": (3,)})
        assert [stage.kept for stage in made.stages] == [rate == 1.0]
        assert torch.allclose(student.losses(), made.losses)
        student.keep_all_but((3,))
        assert torch.equal(student.losses(), made.losses) == (rate == 1e6)


def test_sets_are_compared_after_a_short_training() -> None:
    """All of them, and the trained weights of the best one are where the recovery begins."""
    with student_of(trained_model("llama")) as student:
        sets, observed = {"one": (1,), "two": (2,), "three": (3,)}, list[Any]()
        trial = recovery_of(student, 20)
        candidates = Candidates(student, refits=False, trial=trial, observers=[observed.append])
        removed, records, made = candidates.choose(sets)
        assert {stage.name for stage in made.stages} == {"short training"}
        assert all(one.repaired is not None and one.repaired < one.increase for one in records)
        best = min(one.repaired for one in records if one.repaired is not None)
        assert made.losses.mean() - student.dense <= best + max(one.repaired_error or 0.0 for one in records)
        assert torch.allclose(student.losses(), made.losses)
        bare = student.losses_without([removed])[removed]
        assert objective_of(student, observed[0].model) == pytest.approx(float(bare.mean()), rel=1e-4)


def test_the_only_set_needs_no_short_training() -> None:
    with student_of(tiny_model("llama", layers=5)) as student:
        candidates = Candidates(student, refits=False, trial=recovery_of(student, 3))
        for sets, given in (({"one": (1,), "two": (1,)}, None), ({"one": (1,), "two": (2,)}, (2,))):
            assert candidates.choose(sets, given)[2].stages == ()


def test_the_set_with_the_smallest_loss_is_chosen() -> None:
    """Of sets of one block, all of which are adjacent, the mean decides."""
    with student_of(trained_model("llama")) as student:
        sets = {f"without {layer}": (layer,) for layer in range(4)}
        removed = Candidates(student, refits=False).choose(sets)[0]
        bare = {one: float(losses.mean()) for one, losses in student.losses_without(sets.values()).items()}
    assert removed == min(bare, key=bare.__getitem__)
    assert len({*bare.values()}) == 4


def test_adjacent_blocks_come_first_among_equals() -> None:
    scattered, adjacent = (1, 3), (4, 5)
    noise = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()

    def better(one: float) -> bool:
        """Return whether the adjacent blocks are preferred if they are worse by this many standard errors."""
        losses = {scattered: 3 + 0 * noise, adjacent: 3 + noise - noise.mean() + one * noise.std() / math.sqrt(40)}
        finished = {removed: Repaired((), value, []) for removed, value in losses.items()}
        forth = module._is_better(adjacent, scattered, finished)
        assert forth != module._is_better(scattered, adjacent, finished)
        return forth

    assert [better(one) for one in (-2.0, -0.5, 0.9, 1.1)] == [True, True, True, False]


def test_given_blocks_are_removed_and_shown_beside_the_others() -> None:
    with student_of(tiny_model("llama", layers=5)) as student:
        given = (0, 4)
        removed, records = Candidates(student).choose({"given": given, **Search(student).peer_sets(2)}, given)[:2]
    assert removed == given
    assert [one.removed for one in records if one.chosen] == [given]
    assert [one.removed for one in records if one.repaired is not None] == [given]
    assert {method for one in records for method in one.methods} > set(PEERS)


def test_protected_blocks_stay() -> None:
    search = Search(student_of(tiny_model("llama", layers=6)), protected=(1, 2))
    search.remove_until(3)
    for name, removed in search.sets(3).items():
        assert not {1, 2} & {*removed}, name
    assert search.sets(3)[GREEDY]


def test_a_repair_of_an_interrupted_run_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(journal: Journal) -> Any:
        with student_of(tiny_model("llama", layers=4), journal=journal) as student:
            made = Candidates(student).repair((2,))
            return made.stages, made.losses, student.model().state_dict()

    stages, losses, weights = run(Journal())
    with Journal(tmp_path / "out") as journal:
        run(journal)
        assert (tmp_path / "out.partial" / "repair-2.pt").is_file()
        monkeypatch.setattr(module, "refit_block", None)  # it must not be called again
        again = run(journal)
    assert again[0] == stages
    assert torch.equal(again[1], losses)
    assert all(torch.equal(weights[key], again[2][key]) for key in weights)


def test_differences_are_paired() -> None:
    """The spread between windows cancels: the error is that of the differences."""
    base = 100 * torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    mean, error = difference(base + 0.5, base)
    assert mean == pytest.approx(0.5)
    assert error < 1e-12
    assert difference(base[:1], base[:1])[1] == math.inf


def test_the_weights_of_the_dense_model_are_put_back() -> None:
    model = tiny_model("gemma3", layers=4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with student_of(model) as student:
        Candidates(student).choose({"one": (1,), "two": (2,)})
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        make_model(Candidates(student), {"one": (1,)}, None, recovery=recovery_of(student, 3))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("rate", [1.0, 1000.0])
def test_a_recovery_is_kept_only_if_it_helps(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written model is what the record says, whether the trained weights are in it or those of the repair."""
    usual = recover_model.usual_rate
    monkeypatch.setattr(recover_model, "usual_rate", lambda weights: rate * usual(weights))
    with student_of(trained_model("llama")) as student:
        made = make_model(Candidates(student), {"one": (2,)}, None, recovery=recovery_of(student, 20))
        assert made.recovery is not None
        assert made.recovery.kept == (rate == 1.0)
        assert objective_of(student, made.model) == pytest.approx(made.objective, rel=1e-4)
        expected = made.recovery.after if made.recovery.kept else made.recovery.before
        assert made.objective == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("stops", [True, False])
def test_without_memory_to_train_the_rest_is_done(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a recovery of an amount that the user has given ends in an error."""
    tried = []

    def fails(*args: Any, **keywords: Any) -> Any:
        tried.append(args)
        raise TrainingMemoryError("there is not enough memory")

    monkeypatch.setattr(recover_model, "distil", fails)
    with student_of(trained_model("llama")) as student:
        repairing = Candidates(student, training=fitted(student))
        _, _, made = repairing.choose({"one": (2,)})
        assert [stage.name for stage in made.stages] == ["least squares"]
        assert repairing.notes == ["the repair did not train weights: there is not enough memory"]
        assert torch.allclose(student.losses(), made.losses)
        more = recovery_of(student, 20)
        comparing = Candidates(student, refits=False, trial=more)
        recovery = replace(more, amount=replace(more.amount, stops=stops))
        if not stops:
            with pytest.raises(TrainingMemoryError):
                make_model(comparing, {"one": (1,), "two": (2,)}, None, recovery=recovery)
            return
        shrunk = make_model(comparing, {"one": (1,), "two": (2,)}, None, recovery=recovery)
        assert len(tried) == 3  # the repair, one trial, since the others would fail as well, and the recovery
        assert shrunk.recovery is None
        assert shrunk.stages == ()
        assert comparing.notes == [
            "the sets of blocks were compared without training: there is not enough memory",
            "the smaller model was not recovered: there is not enough memory",
        ]
        assert objective_of(student, shrunk.model) == pytest.approx(shrunk.objective, rel=1e-4)


def recovery_of(student: Student, steps: int, windows: int = 400) -> Recovery:
    """Return a training on windows that the student has not seen."""
    rows = sequences(8, windows)
    return training_on(student, rows, steps)


def fitted(student: Student) -> Recovery:
    """Return a training on the windows to fit."""
    return training_on(student, student.fit.inputs, SMALL.steps)


def training_on(student: Student, rows: torch.Tensor, steps: int) -> Recovery:
    amount = Amount(tokens=steps * rows.shape[1] * step_windows(len(rows), rows.shape[1]))
    return Recovery(RecoveryData(rows, len(rows), {"more": rows.numel()}), student.select.inputs, None, amount, 0)


def test_weights_are_paired_by_name_and_value() -> None:
    """As in Zamba 2: a block of the smaller model lacks a part, or has another one of the same name."""
    dense = [torch.nn.ModuleDict({"mlp": torch.nn.Linear(2, 2), "adapter": torch.nn.Linear(2, 2)}) for _ in range(2)]
    smaller = [torch.nn.ModuleDict({"mlp": torch.nn.Linear(2, 2)}), copy.deepcopy(dense[1])]
    smaller[0]["mlp"].load_state_dict(dense[0]["mlp"].state_dict())
    with torch.no_grad():
        smaller[1]["adapter"].weight.add_(1)
    chosen = [weight for block in dense for weight in block.parameters() if weight is not dense[0]["mlp"].bias]
    pairs = paired_weights(dense, smaller, set(chosen))
    assert pairs.keys() == {dense[0]["mlp"].weight, *dense[1]["mlp"].parameters(), dense[1]["adapter"].bias}
    assert pairs[dense[0]["mlp"].weight] is smaller[0]["mlp"].weight
    assert pairs[dense[1]["adapter"].bias] is smaller[1]["adapter"].bias
