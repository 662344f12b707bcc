"""The search over sets whose losses are measured, against trying all of them."""

from itertools import combinations

import pytest
import torch

from mrp_lightning.pruning.units import measured_set


def quadratic(seed, units=8):
    """Losses vᵀAv of sets, with A random and positive, and a count of those that were asked for."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(units, units, generator=generator, dtype=torch.float64)
    matrix = factor @ factor.T

    def measure(sets):
        asked.append(list(sets))
        return [float(matrix[list(s)][:, list(s)].sum()) for s in sets]

    asked: list[list[tuple[int, ...]]] = []
    return measure, asked


@pytest.mark.parametrize("seed", range(8))
def test_no_exchange_is_better_and_few_other_sets_are(seed):
    measure, _ = quadratic(seed)
    removed, loss, swaps = measured_set(measure, 8, 3)
    every = list(combinations(range(8), 3))
    losses = dict(zip(every, measure(every), strict=True))
    assert removed == sorted(removed)
    assert loss == losses[tuple(removed)]
    assert swaps >= 0
    for other, lower in losses.items():
        if len({*removed} & {*other}) == 2:
            assert lower >= loss * (1 - 1e-6)
    assert sum(x < loss * (1 - 1e-6) for x in losses.values()) <= 8


def test_exchanges_find_what_greedy_misses():
    found = [measured_set(quadratic(seed)[0], 8, 3)[2] for seed in range(20)]
    assert any(found)


def test_one_is_the_best_of_all_and_costs_one_round():
    measure, asked = quadratic(0)
    removed, loss, swaps = measured_set(measure, 8, 1)
    alone = measure([(i,) for i in range(8)])
    assert (removed, loss, swaps) == ([alone.index(min(alone))], min(alone), 0)
    assert asked[0] == [(i,) for i in range(8)]


def test_equal_losses_go_by_position():
    removed, _, swaps = measured_set(lambda sets: [1.0] * len(sets), 6, 3)
    assert removed == [0, 1, 2]
    assert swaps == 0
