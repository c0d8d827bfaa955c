"""The chosen model is never worse on the selection windows than any alternative, on trained models of every family."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DECODERS, MODELS, tiny_model
from trained_models import objective_of, sequences, trained_model

from depthgauge._journal import Journal
from depthgauge.checkpoints.load import wrap
from depthgauge.recovery import recover_model
from depthgauge.recovery.distillation import STEP_TOKENS
from depthgauge.recovery.recover_model import Recovery
from depthgauge.recovery.training_data import RecoveryData
from depthgauge.results.recover_options import Amount
from depthgauge.surgery import candidates as module
from depthgauge.surgery import distill as training
from depthgauge.surgery.candidates import Candidates, difference
from depthgauge.surgery.shrinker import GREEDY, PEERS, Shrinker
from depthgauge.surgery.shrunk_model import make_model
from depthgauge.surgery.student import Effort

SMALL = Effort(48, 24, 60, 12, 10**6, 4, 2, 24, 96)
COUNT = 2


def shrinker_of(model: Any, effort: Effort = SMALL, **keywords: Any) -> Shrinker:
    fit, select = sequences(5, effort.fit), sequences(6, effort.select)
    return Shrinker(wrap(model), fit, select, effort=effort, **keywords)


@pytest.mark.parametrize("name", MODELS)
def test_no_alternative_is_better_than_what_is_written(name: str) -> None:
    torch.manual_seed(0)
    with shrinker_of(trained_model(name)) as shrinker:
        if name in DECODERS:
            assert shrinker.dense < 0.8 * math.log(32)  # it has learned something
        shrinker.remove_until(COUNT)
        sets = shrinker.sets(COUNT)
        made = make_model(Candidates(shrinker, 0), sets, None)
        written = objective_of(shrinker, made.model)
        assert written == pytest.approx(made.objective, rel=1e-4)
        chosen = next(one for one in made.candidates if one.chosen)
        assert chosen.removed == made.removed
        for removed in sets.values():
            assert written <= shrinker.means_without([removed])[removed] + 1e-5
        for one in made.candidates:
            finished = one.increase if one.repaired is None else one.repaired
            assert made.objective - shrinker.dense <= finished + 1e-6
        repaired = [one for one in made.candidates if one.repaired is not None]
        assert len(repaired) == min(SMALL.finalists, len(made.candidates))
        for stage in made.stages:
            assert stage.kept == (stage.before - stage.after > stage.error)


def test_the_repair_helps_where_it_can() -> None:
    """A repair that is never kept would pass the test above."""
    kept = set()
    for name in ("llama", "gemma3", "bert"):
        with shrinker_of(trained_model(name)) as shrinker:
            shrinker.remove_until(1)
            made = Candidates(shrinker, 0).repair((shrinker.steps[0].layer,))
            kept |= {(name, stage.name) for stage in made.stages if stage.kept}
    assert {("gemma3", "distillation"), ("bert", "distillation")} < kept
    assert kept & {("llama", "least squares"), ("llama", "distillation")}
    assert not {("gemma3", "least squares"), ("bert", "least squares")} & kept


def test_weights_are_not_trained_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "free_memory", lambda device: 1000)
    with shrinker_of(tiny_model("llama", layers=4)) as shrinker:
        candidates = Candidates(shrinker, 0)
        assert [stage.name for stage in candidates.repair((2,)).stages] == ["least squares"]
    (note,) = candidates.notes
    assert "did not train weights: this needs" in note


@pytest.mark.parametrize("damage", [0.5, -0.5])
def test_a_stage_that_does_not_help_is_undone(damage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(shrinker: Shrinker, place: int, weights: list[Any], **keywords: Any) -> None:
        with torch.no_grad():
            for weight in weights:
                weight += damage * weight

    monkeypatch.setattr(module, "distill", spoil)
    with shrinker_of(trained_model("gemma3")) as shrinker:
        candidates = Candidates(shrinker, 0)
        made = candidates.repair((3,))
        assert [stage.kept for stage in made.stages] == [False]
        shrinker.keep_all_but((3,))
        assert torch.equal(shrinker.losses(), made.losses)


def test_given_blocks_are_removed_and_shown_beside_the_others() -> None:
    with shrinker_of(tiny_model("llama", layers=5)) as shrinker:
        given = (0, 4)
        removed, records = Candidates(shrinker, 0).choose({"given": given, **shrinker.peer_sets(2)}, given)
    assert removed == given
    assert [one.removed for one in records if one.chosen] == [given]
    assert [one.removed for one in records if one.repaired is not None] == [given]
    assert {method for one in records for method in one.methods} > set(PEERS)


def test_protected_blocks_stay() -> None:
    with shrinker_of(tiny_model("llama", layers=6), protected=(1, 2)) as shrinker:
        shrinker.remove_until(3)
        for name, removed in shrinker.sets(3).items():
            assert not {1, 2} & {*removed}, name
        assert shrinker.sets(3)[GREEDY]


def test_a_repair_of_an_interrupted_run_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(journal: Journal) -> Any:
        with shrinker_of(tiny_model("llama", layers=4), journal=journal) as shrinker:
            made = Candidates(shrinker, 0).repair((2,))
            return made.stages, made.losses, shrinker.model().state_dict()

    stages, losses, weights = run(Journal())
    with Journal(tmp_path / "out") as journal:
        run(journal)
        assert (tmp_path / "out.partial" / "repair-2.pt").is_file()
        monkeypatch.setattr(module, "distill", None)  # it must not be called again
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
    with shrinker_of(model) as shrinker:
        Candidates(shrinker, 0).choose({"one": (1,), "two": (2,)})
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        make_model(Candidates(shrinker, 0), {"one": (1,)}, None, recovery=recovery_of(shrinker, 3))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("rate", [1.0, 1000.0])
def test_a_recovery_is_kept_only_if_it_helps(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written model is what the record says, whether the trained weights are in it or those of the repair."""
    usual = recover_model.usual_rate
    monkeypatch.setattr(recover_model, "usual_rate", lambda weights: rate * usual(weights))
    with shrinker_of(trained_model("llama")) as shrinker:
        made = make_model(Candidates(shrinker, 0), {"one": (2,)}, None, recovery=recovery_of(shrinker, 20))
        assert made.recovery is not None
        assert made.recovery.kept == (rate == 1.0)
        assert objective_of(shrinker, made.model) == pytest.approx(made.objective, rel=1e-4)
        expected = made.recovery.after if made.recovery.kept else made.recovery.before
        assert made.objective == pytest.approx(expected, rel=1e-4)


def recovery_of(shrinker: Shrinker, steps: int) -> Recovery:
    """Return a training on windows that the shrinker has not seen."""
    windows = sequences(8, 400)
    amount = Amount(tokens=steps * STEP_TOKENS)
    return Recovery(
        RecoveryData(windows, len(windows), {"more": windows.numel()}), shrinker.select.inputs, None, amount, 0
    )
