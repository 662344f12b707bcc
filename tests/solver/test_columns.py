"""Whole columns: against brute force over all sets, and dense float64 solves."""

from itertools import combinations

import pytest
import torch

from mrp_lightning import HessianError, MethodError, OptionError, TargetError, prune_columns
from mrp_lightning.pruning.units import measured_set


@pytest.fixture
def layer(problem, truth):
    """A weight and the Hessian of its inputs, both in float64."""

    def make(rows, columns, seed=0):
        weight, inputs = problem(rows=rows, columns=columns, seed=seed)
        return weight.double(), truth.hessian_of(inputs)

    return make


def optimum(weight, matrix, gone):
    """The damped loss, and the weight, of the optimum without some columns, by a dense solve."""
    kept = ~gone
    found = torch.zeros_like(weight)
    right = (weight @ matrix[:, kept]).T
    found[:, kept] = torch.linalg.solve(matrix[kept][:, kept], right).T
    change = found - weight
    return float(((change @ matrix) * change).sum()) / 2, found


def best_of_all(weight, matrix, count, group):
    groups = weight.shape[1] // group
    losses = {}
    for chosen in combinations(range(groups), count):
        gone = torch.zeros(groups, dtype=torch.bool)
        gone[list(chosen)] = True
        losses[chosen], _ = optimum(weight, matrix, gone.repeat_interleave(group))
    return min(losses.values())


@pytest.mark.parametrize("method", ["SM", "magnitude+M", "wanda+M"])
@pytest.mark.parametrize("group", [1, 4])
def test_it_is_the_optimum_of_its_own_set(layer, truth, method, group):
    weight, hessian = layer(rows=12, columns=96)
    solution = prune_columns(weight, hessian, 7, group=group, method=method)
    gone = solution.removed.repeat_interleave(group)
    assert int(solution.removed.sum()) == 7
    loss, expected = optimum(weight, truth.damped(hessian), gone)
    torch.testing.assert_close(solution.weight, expected, rtol=1e-9, atol=1e-11)
    assert not solution.weight[:, gone].any()
    assert solution.optimal_loss == pytest.approx(loss, rel=1e-9)
    assert solution.gap <= 1e-12
    change = solution.weight - weight
    assert solution.loss == pytest.approx(float(((change @ hessian) * change).sum()) / 2, rel=1e-9)


@pytest.mark.parametrize(("columns", "group", "count"), [(12, 1, 4), (12, 1, 9), (24, 3, 3)])
def test_it_is_near_the_best_of_all_sets(layer, truth, columns, group, count):
    ratios = []
    for seed in range(3):
        weight, hessian = layer(rows=5, columns=columns, seed=seed)
        matrix = truth.damped(hessian)
        solution = prune_columns(weight, hessian, count, group=group)
        ratios.append(solution.optimal_loss / best_of_all(weight, matrix, count, group))
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratios) / len(ratios) <= 1.05


@pytest.mark.parametrize("group", [1, 8])
def test_it_removes_what_costs_least_each_time(layer, truth, group):
    weight, hessian = layer(rows=6, columns=80)
    matrix = truth.damped(hessian)
    gone = torch.zeros(80 // group, dtype=torch.bool)
    for _ in range(8):
        costs = {}
        for j in (~gone).nonzero()[:, 0].tolist():
            other = gone.clone()
            other[j] = True
            costs[j], _ = optimum(weight, matrix, other.repeat_interleave(group))
        gone[min(costs, key=costs.get)] = True
    solution = prune_columns(weight, hessian, 8, group=group)
    assert torch.equal(solution.removed, gone)
    assert solution.optimal_loss == pytest.approx(min(costs.values()))


def test_a_long_removal_does_not_drift(layer, truth):
    """More removals than a panel: each costs least, by a dense solve without those before it."""
    weight, hessian = layer(rows=24, columns=256)
    matrix = truth.damped(hessian)
    before, after = (prune_columns(weight, hessian, count).removed for count in (149, 150))
    assert not (before & ~after).any()
    losses = {}
    for j in (~before).nonzero()[:, 0].tolist():
        other = before.clone()
        other[j] = True
        losses[j], _ = optimum(weight, matrix, other)
    assert after[min(losses, key=losses.get)]


def test_scores_without_compensation(layer):
    weight, hessian = layer(rows=6, columns=40)
    for method, scores in (
        ("magnitude", weight.square().sum(0)),
        ("wanda", weight.square().sum(0) * hessian.diagonal()),
    ):
        solution = prune_columns(weight, hessian, 10, method=method)
        assert set(solution.removed.nonzero()[:, 0].tolist()) == set(scores.argsort()[:10].tolist())
        assert torch.equal(solution.weight, weight.masked_fill(solution.removed, 0))
        assert solution.gap is None


def test_dead_inputs_go_first_and_the_others_stay_as_they_are(layer):
    weight, hessian = layer(rows=6, columns=40)
    dead = torch.zeros(40, dtype=torch.bool)
    dead[[3, 17, 18, 30]] = True
    hessian = hessian.masked_fill(dead, 0).masked_fill(dead[:, None], 0)
    for method in ("SM", "magnitude", "wanda", "wanda+M"):
        few = prune_columns(weight, hessian, 3, method=method)
        assert few.removed[dead].sum() == 3
        assert few.loss == 0
        left = dead & ~few.removed
        assert torch.equal(few.weight[:, left], weight[:, left])
        assert prune_columns(weight, hessian, 6, method=method).removed[dead].all()


def test_narrower_types_are_rounded_once(layer):
    weight, hessian = layer(rows=8, columns=48)
    exact = prune_columns(weight.bfloat16().double(), hessian, 12)
    rounded = prune_columns(weight.bfloat16(), hessian.float(), 12)
    assert rounded.weight.dtype == torch.bfloat16
    assert torch.equal(rounded.removed, exact.removed)
    torch.testing.assert_close(rounded.weight.double(), exact.weight, rtol=2**-8, atol=1e-6)
    assert prune_columns(weight.float(), hessian.float(), 12).gap <= 1e-6


def test_what_cannot_be_is_refused(layer):
    weight, hessian = layer(rows=4, columns=12)
    for count in (0, 12, 2.5, True):
        with pytest.raises(OptionError, match="`count`"):
            prune_columns(weight, hessian, count)
    for group in (0, 5):
        with pytest.raises(OptionError, match="`group`"):
            prune_columns(weight, hessian, 2, group=group)
    with pytest.raises(OptionError, match="`damping`"):
        prune_columns(weight, hessian, 2, damping=-1.0)
    for method in ("SS", "JM", "MM"):
        with pytest.raises(MethodError, match="whole columns"):
            prune_columns(weight, hessian, 2, method=method)
    with pytest.raises(HessianError, match="12 columns, its Hessian 11"):
        prune_columns(weight, hessian[:11, :11], 2)


def test_a_weight_out_of_the_range_of_its_dtype_is_refused():
    weight, hessian = torch.tensor([[6e4, 6e4]]), torch.tensor([[2.0, 1.99], [1.99, 2.0]])
    assert float(prune_columns(weight, hessian, 1).weight.max()) > torch.finfo(torch.float16).max
    with pytest.raises(HessianError, match=r"out of the range of torch.float16. Raise `damping`"):
        prune_columns(weight.half(), hessian, 1)


@pytest.mark.parametrize("name", ["weight", "hessian"])
@pytest.mark.parametrize("of", [lambda x: x.to("meta"), torch.Tensor.to_sparse])
def test_tensors_without_values_or_not_dense_are_refused(name, of):
    tensors = {"weight": torch.ones(2, 4), "hessian": torch.eye(4)}
    tensors[name] = of(tensors[name])
    with pytest.raises(TargetError, match=f"`{name}` must be a dense tensor with values"):
        prune_columns(**tensors, count=1)


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
def test_a_measured_set_grows_by_the_cheapest_unit(seed):
    measure, asked = quadratic(seed)
    removed, loss = measured_set(measure, 8, 3)
    assert [len(sets) for sets in asked] == [8, 7, 6]
    cheapest = set()
    for size in (1, 2, 3):
        sets = [{*each} for each in combinations(range(8), size) if cheapest <= {*each}]
        losses = measure(sets)
        cheapest = sets[losses.index(min(losses))]
    assert (removed, loss) == (sorted(cheapest), min(losses))


def test_one_is_the_best_of_all_and_costs_one_round():
    measure, asked = quadratic(0)
    removed, loss = measured_set(measure, 8, 1)
    alone = measure([(i,) for i in range(8)])
    assert (removed, loss) == ([alone.index(min(alone))], min(alone))
    assert asked[0] == [(i,) for i in range(8)]


def test_equal_losses_go_by_position():
    removed, _ = measured_set(lambda sets: [1.0] * len(sets), 6, 3)
    assert removed == [0, 1, 2]
