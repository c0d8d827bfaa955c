"""The search for removable blocks against brute force, and its resumption."""

import json
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens

from depthgauge._journal import Journal
from depthgauge.checkpoints.load import wrap
from depthgauge.surgery.shrinker import PEERS, Shrinker
from depthgauge.surgery.student import Effort

WIDE = Effort(8, 4, 60, 4, 10**6, 10**6, 0, (1.0, 0.5))


def deep(name: str, layers: int = 5, seed: int = 0) -> Any:
    return wrap(tiny_model(name, seed, layers=layers), name)


def shrinker(checkpoint: Any, *, effort: Effort = WIDE, **changes: Any) -> Shrinker:
    keywords: dict[str, Any] = {"effort": effort} | changes
    return Shrinker(checkpoint, tokens(12, 8, seed=1), tokens(12, 4, seed=2), **keywords)


def loss_without(checkpoint: Any, removed: set[int], ids: torch.Tensor) -> float:
    """Return the loss of the model with blocks left out of its list, computed by the model itself."""
    import copy

    model = copy.deepcopy(checkpoint.model)
    kept = [block for k, block in enumerate(model.model.layers) if k not in removed]
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def test_without_repair_each_step_is_the_best_of_all() -> None:
    checkpoint, ids = deep("llama"), tokens(12, 4, seed=2)
    with shrinker(checkpoint, repair=False) as work:
        work.remove_until(3)
    assert len(work.steps) == 3
    removed: set[int] = set()
    for step in work.steps:
        losses = {k: loss_without(checkpoint, removed | {k}, ids) for k in range(5) if k not in removed}
        assert losses[step.layer] == pytest.approx(min(losses.values()), rel=1e-6)  # equal ones are ordered by rounding
        assert step.objective == pytest.approx(losses[step.layer], rel=1e-5)
        removed.add(step.layer)


def test_repair_never_loses_to_no_repair() -> None:
    checkpoint = deep("llama", seed=3)
    with shrinker(checkpoint) as work:
        work.remove_until(2)
        assert [step.objective <= step.unrepaired for step in work.steps] == [True, True]
        assert (
            work.steps[1].objective < work.steps[1].unrepaired
        )  # a repair was found, so the comparison is not of equals
        removed = work.removed
        unrepaired = loss_without(checkpoint_of(work), set(removed), tokens(12, 4, seed=2))
        repair, value = work.repair(removed)
        assert value <= unrepaired + 1e-6
        values = [step.objective for step in repair]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)


def checkpoint_of(work: Shrinker) -> Any:
    """Return the checkpoint with its original weights, which the student has changed."""
    kept = list(work.kept)
    work.restore()
    work.kept = kept
    return work.checkpoint


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_neox", "bert"])
def test_the_weights_are_put_back(name: str) -> None:
    checkpoint = deep(name, 4)
    before = {key: value.clone() for key, value in checkpoint.model.state_dict().items()}

    def interrupted() -> None:
        with shrinker(checkpoint) as work:
            work.remove_until(1)
            work.repair(work.removed)
            assert any(not torch.equal(value, before[key]) for key, value in checkpoint.model.state_dict().items())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(torch.equal(value, before[key]) for key, value in checkpoint.model.state_dict().items())


def test_the_extracted_model_has_the_objective_of_the_repair() -> None:
    checkpoint = deep("qwen2")
    with shrinker(checkpoint) as work:
        work.remove_until(2)
        _, value = work.repair(work.removed)
        model = work.model()
    assert work.objective.of_model(model) == pytest.approx(value, rel=1e-5)
    assert len(model.model.layers) == 3


@pytest.mark.parametrize("stop", ["search", "repair"])
def test_an_interrupted_run_ends_with_the_same_weights(stop: str) -> None:
    def run(journal: Journal) -> Any:
        with shrinker(deep("llama"), journal=journal, effort=WIDE) as work:
            work.remove_until(2)
            work.repair(work.removed)
            return work.removed, work.model().state_dict(), journal

    removed, weights, journal = run(Journal())
    cut = Journal()
    cut.put("search", journal.get("search")[: 1 if stop == "search" else 2])
    if stop == "repair":
        name = next(key for key in journal.entries if key.startswith("repair"))
        cut.put(name, journal.get(name)[:1])
    resumed, again, _ = run(cut)
    assert resumed == removed
    assert all(torch.equal(weights[key], again[key]) for key in weights)


def test_exchanges_lower_the_objective_and_reach_the_best_pair() -> None:
    """Start from the worst block: an exchange must find one that is better."""
    effort = Effort(8, 4, 60, 4, 10**6, 10**6, 20, (1.0,))
    checkpoint, ids = deep("llama", seed=5), tokens(12, 4, seed=2)
    losses = {k: loss_without(checkpoint, {k}, ids) for k in range(5)}
    worst = max(losses, key=lambda k: losses[k])
    with shrinker(checkpoint, repair=False, effort=effort) as work:
        work.journal.put("search", [{"layer": worst, "step": 0.0, "unrepaired": losses[worst],
                                     "objective": losses[worst]}])  # fmt: skip
        work.remove_until(1)
        work.exchange()
        assert work.swaps
        assert losses[work.removed[0]] == pytest.approx(min(losses.values()), rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_blocks_of_published_methods_are_taken_if_they_are_better(family: str) -> None:
    """Without exchanges of single blocks, the result is the best of the search and of what the peers would remove."""
    effort = Effort(8, 4, 60, 4, 10**6, 10**6, 0, (1.0,))
    taken = set()
    for seed in range(6):
        checkpoint = deep(family, 6, seed=seed)
        with shrinker(checkpoint, repair=False, effort=effort) as work:
            others = {choose(work.select, 3) for choose in PEERS.values()}
            losses = {gone: work.repair(gone)[1] for gone in {*others, (0, 1, 2)}}
            work.keep_all_but(())
            work.journal.put("search", [{"layer": layer, "step": 0.0, "unrepaired": 0.0, "objective": 0.0}
                                        for layer in (1, 0, 2)])  # fmt: skip
            work.remove_until(3)
            work.exchange()
            removed = work.removed
        assert losses[removed] == pytest.approx(min(losses.values()), rel=1e-6)
        back, instead = ({*layers} for layers in zip(*work.swaps, strict=True)) if work.swaps else (set(), set())
        assert {0, 1, 2} - back | instead == {*removed}
        taken.add(removed in others)
    assert True in taken


def test_the_limit_stops_the_search() -> None:
    with shrinker(deep("llama"), repair=False) as work:
        work.remove_until(4, limit=-100.0)
        assert len(work.steps) == 1


def test_an_interrupted_search_ranks_and_exchanges_as_an_uninterrupted_one() -> None:
    narrow = Effort(8, 4, 60, 2, 2, 1, 6, (1.0,))

    def run(journal: Journal, progress: Any) -> Any:
        with shrinker(deep("llama", 6), journal=journal, effort=narrow, progress=progress) as work:
            work.remove_until(3)
            ranked = work.candidates()
            work.exchange()
            return [step.layer for step in work.steps], ranked, work.swaps, work.removed

    def interrupt(done: int, total: int, label: str) -> None:
        if label.startswith("removal 3"):
            raise KeyboardInterrupt

    direct, journal = run(Journal(), lambda *report: None), Journal()
    with pytest.raises(KeyboardInterrupt):
        run(journal, interrupt)
    journal.entries = json.loads(json.dumps(journal.entries))  # as a resumed run reads them
    assert run(journal, lambda *report: None) == direct
