"""Foldings: which layers a shallower network keeps, and which candidates to try."""

from itertools import groupby


def runs_between(depth: int, kept: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the runs of consecutive layers that are not kept."""
    runs = groupby(range(depth), key=lambda index: index in kept)
    return tuple(tuple(run) for is_kept, run in runs if not is_kept)


def cheapest_choices(costs: list[float], layers: int, most: int) -> list[tuple[int, ...]]:
    """Return the `most` choices of kept layers with the smallest total cost of the replaced ones.

    Dynamic programming over the layers. The bound is neither additive nor monotone in the replaced layers, so these
    choices are candidates, whose errors are computed afterwards.

    Args:
        costs: for each layer, the bound on the error of replacing it alone.
        layers: the number of layers of the folding.
        most: the number of choices to return.
    """
    # best[number of layers so far, whether the last layer was replaced] = the `most` cheapest (cost, kept).
    best: dict[tuple[int, bool], list[tuple[float, tuple[int, ...]]]] = {(0, False): [(0.0, ())]}
    for index, cost in enumerate(costs):
        following: dict[tuple[int, bool], list[tuple[float, tuple[int, ...]]]] = {}
        for (used, open_run), entries in best.items():
            for spent, kept in entries:
                following.setdefault((used + 1, False), []).append((spent, (*kept, index)))
                following.setdefault((used + (not open_run), True), []).append((spent + cost, kept))
        best = {key: sorted(entries)[:most] for key, entries in following.items() if key[0] <= layers}
    ends = [entry for (used, _), entries in best.items() if used == layers for entry in entries]
    return [kept for _, kept in sorted(ends)[:most]]
