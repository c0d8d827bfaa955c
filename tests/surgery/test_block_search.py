"""The search for removable blocks against brute force, and its resumption."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens

from depthgauge.base.journal import Journal
from depthgauge.checkpoints.weights.load import wrap
from depthgauge.results.shrink_record import SearchStep
from depthgauge.surgery.candidates import RUN, Search
from depthgauge.surgery.student import Effort, Student

WIDE = Effort(8, 4, 60, 4, 10**6, 0, 1, 5)


def deep(name: str, layers: int = 5, seed: int = 0) -> Any:
    return wrap(tiny_model(name, seed, layers=layers), name)


def search(checkpoint: Any, *, effort: Effort = WIDE, **changes: Any) -> Search:
    keywords: dict[str, Any] = {"effort": effort} | changes
    return Search(Student(checkpoint, tokens(12, 8, seed=1), tokens(12, 4, seed=2), **keywords))


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
    work = search(checkpoint, repair=False)
    work.remove_until(3)
    assert len(work.steps) == 3
    removed: set[int] = set()
    for step in work.steps:
        losses = {k: loss_without(checkpoint, removed | {k}, ids) for k in range(5) if k not in removed}
        assert losses[step.layer] == pytest.approx(min(losses.values()), rel=1e-6)  # equal ones are ordered by rounding
        assert step.objective == pytest.approx(losses[step.layer], rel=1e-5)
        removed.add(step.layer)


def test_exchanges_lower_the_objective_and_reach_the_best_block() -> None:
    """Start from the worst block: an exchange must find one that is better."""
    checkpoint, ids = deep("llama", seed=5), tokens(12, 4, seed=2)
    losses = {k: loss_without(checkpoint, {k}, ids) for k in range(5)}
    worst = max(losses, key=lambda k: losses[k])
    work = search(checkpoint, repair=False, effort=replace(WIDE, swaps=20))
    work.steps = (SearchStep(layer=worst, objective=losses[worst]),)
    (found,) = work.exchanged((worst,))
    assert losses[found] == pytest.approx(min(losses.values()), rel=1e-6)


def test_one_pass_over_the_blocks_measures_all_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, ids = deep("llama", 6), tokens(12, 4, seed=2)
    sets = [(), (1,), (2,), (1, 2), (1, 4), (1, 2, 4), (2, 3, 5), (0, 5), (0, 1, 2, 3, 4)]
    work = search(checkpoint).student
    applied, apply = list[int](), work.runner.block
    monkeypatch.setattr(work.runner, "block", lambda layer, x, inputs=None: (applied.append(layer), apply(layer, x))[1])
    monkeypatch.setattr(work.runner.batches, "size", 10**6)
    found = work.means_without(sets)
    assert applied == [*range(1, 6)]
    assert work.means_without(sets) == found
    assert applied == [*range(1, 6)]  # what is known is not measured again
    assert work.means_without([(1, 4)], 2)[1, 4] == pytest.approx(loss_without(checkpoint, {1, 4}, ids[:2]))
    assert applied == [*range(1, 6), 2, 3, 5]
    work.journal.entries.clear()
    monkeypatch.setattr("depthgauge.checkpoints.blocks.what_if.free_memory", lambda device: 0)
    assert work.means_without(sets) == pytest.approx(found, rel=1e-6)  # without memory, one set after the other
    assert found == pytest.approx({removed: loss_without(checkpoint, {*removed}, ids) for removed in sets}, rel=1e-5)


def test_the_best_run_is_the_best_of_all_runs() -> None:
    checkpoint, ids = deep("llama", 6, seed=2), tokens(12, 4, seed=2)
    losses = {k: loss_without(checkpoint, {*range(k, k + 3)}, ids) for k in range(4)}
    work = search(checkpoint, repair=False)
    run = work.peer_sets(3)[RUN]
    assert losses[run[0]] == pytest.approx(min(losses.values()), rel=1e-6)
    assert run == tuple(range(run[0], run[0] + 3))


def test_the_limit_stops_the_search() -> None:
    work = search(deep("llama"), repair=False)
    work.remove_until(4, limit=-100.0)
    assert len(work.steps) == 1


def test_an_interrupted_search_ranks_and_exchanges_as_an_uninterrupted_one() -> None:
    narrow = Effort(8, 4, 60, 2, 2, 6, 1, 5)

    def run(journal: Journal, progress: Any) -> Any:
        work = search(deep("llama", 6), journal=journal, effort=narrow, progress=progress)
        work.remove_until(3)
        return [step.layer for step in work.steps], work.ranked(), work.sets(3)

    def interrupt(done: int, total: int, label: str) -> None:
        if label.startswith("removal 3"):
            raise KeyboardInterrupt

    direct, journal = run(Journal(), lambda *report: None), Journal()
    with pytest.raises(KeyboardInterrupt):
        run(journal, interrupt)
    journal.entries = json.loads(json.dumps(journal.entries))  # as a resumed run reads them
    assert run(journal, lambda *report: None) == direct
