"""Labels of the generated tasks against plain loops, and the facts that each task states."""

import itertools

import pytest
import torch

from depthgauge.base.errors import InputError
from depthgauge.papers.trained_depth.bounded_models import (
    GENERATED,
    bit_task,
    find_task,
    hop_labels,
    hop_task,
    pointer_task,
    recall_task,
    word_task,
)


def plain_hop(tokens: list[int], hops: int) -> int | None:
    """Walk backwards from the last token: find its last earlier occurrence, step to the token after it, repeat."""
    at = len(tokens) - 1
    for _ in range(hops):
        for earlier in range(at - 1, -1, -1):
            if tokens[earlier] == tokens[at]:
                at = earlier + 1
                break
        else:
            return None
    return tokens[at]


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_hops_against_a_walk_through_every_short_sequence(hops: int) -> None:
    tokens = torch.tensor(list(itertools.product(range(3), repeat=6)))
    labels = hop_labels(tokens, hops)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert label == (-1 if (walked := plain_hop(row, hops)) is None else walked)
    assert (labels < 0).any()
    assert (labels >= 0).any()


def test_drawn_hops_have_a_target() -> None:
    tokens, labels = hop_task(6, 5, 2).draw(500, seed=3)
    assert tokens.shape == (500, 6)
    assert [plain_hop(row, 2) for row in tokens.tolist()] == labels.tolist()


def test_recall_is_a_dictionary_lookup() -> None:
    task = recall_task(pairs=4, keys=5, values=3)
    tokens, labels = task.draw(300, seed=1)
    assert tokens.shape == (300, 9)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        table = dict(zip(row[:-1:2], row[1:-1:2], strict=True))
        assert len(table) == 4  # keys do not repeat
        assert set(table) <= set(range(5))
        assert set(table.values()) <= set(range(5, 8))
        assert table[row[-1]] - 5 == label


@pytest.mark.parametrize("hops", [1, 2, 4])
def test_pointers_are_followed(hops: int) -> None:
    tokens, labels = pointer_task(7, hops).draw(300, seed=2)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        *table, at = row
        assert sorted(table) == list(range(7))
        for _ in range(hops):
            at = table[at]
        assert at == label


def test_s3_is_the_product_of_permutation_matrices() -> None:
    tokens, labels = word_task("s3", 5).draw(200, seed=4)
    elements = list(itertools.permutations(range(3)))
    matrices = [torch.eye(3)[list(element)].T for element in elements]  # column p is the unit vector of element[p]
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        product = torch.eye(3)
        for token in row:
            product = matrices[token] @ product
        assert torch.equal(product, matrices[label])
    assert len(set(labels.tolist())) == 6


def test_s5_follows_point_0_through_the_swaps() -> None:
    tokens, labels = word_task("s5", 6).draw(200, seed=5)
    swaps = list(itertools.combinations(range(5), 2))
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        cups = [True, False, False, False, False]
        for token in row:
            a, b = swaps[token]
            cups[a], cups[b] = cups[b], cups[a]
        assert cups.index(True) == label


def test_bits() -> None:
    tokens, labels = bit_task("majority", 7).draw(200, seed=6)
    assert [int(sum(row) >= 4) for row in tokens.tolist()] == labels.tolist()
    tokens, labels = bit_task("parity", 6).draw(200, seed=6)
    assert [sum(row) % 2 for row in tokens.tolist()] == labels.tolist()


@pytest.mark.parametrize("name", GENERATED)
def test_every_task_fits_its_description(name: str) -> None:
    task = find_task(name)
    tokens, labels = task.draw(4000, seed=0)
    assert task.name == name
    assert tokens.shape == (4000, task.length)
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < task.vocabulary
    shares = torch.bincount(labels, minlength=task.classes) / 4000
    assert len(shares) == task.classes
    assert float((shares - task.chance).abs().max()) < 0.06  # labels are nearly uniform, so chance is 1/C
    again, same = task.draw(4000, seed=0)
    assert torch.equal(tokens, again)
    assert torch.equal(labels, same)
    assert not torch.equal(tokens, task.draw(4000, seed=1)[0])


def test_wrong_tasks_are_rejected() -> None:
    with pytest.raises(InputError, match="did you mean 'recall-2'"):
        find_task("recall2")
    with pytest.raises(InputError, match="must be odd"):
        bit_task("majority", 8)
    with pytest.raises(InputError, match="keys do not repeat"):
        recall_task(pairs=9, keys=8)
    with pytest.raises(InputError, match="group must be one of s3, s5"):
        word_task("s4")
    with pytest.raises(InputError, match="kind must be one of"):
        bit_task("minority")
