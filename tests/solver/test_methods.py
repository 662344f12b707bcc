import dataclasses
import inspect
from typing import ClassVar

import pytest
import torch

from mrp_lightning import prune_weight
from mrp_lightning.errors import MethodError, OptionError, PatternError
from mrp_lightning.solver.arguments import MASK_NAMES
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.masks import Mask
from mrp_lightning.solver.patterns import SemiStructured, Unstructured
from mrp_lightning.solver.pruning import prune
from mrp_lightning.solver.recipe import MASKS, NAMED, LayerSettings, Method, Recipe, parse_method

PAIRS = [f"{m}+{c}" for m in ("magnitude", "wanda", "S", "M", "J") for c in ("none", "S", "M")]


def test_names_are_pairs():
    assert parse_method("SM").mask == parse_method("S+M").mask
    assert parse_method("SM").compensation == parse_method("S+M").compensation
    assert parse_method("sparsegpt").mask == parse_method("SS").mask
    assert parse_method("wanda+M").compensation.name == "M"
    assert parse_method("magnitude").compensation.name == "none"
    assert str(parse_method("sparsegpt")) == "sparsegpt"
    assert tuple(MASKS) == MASK_NAMES


@pytest.mark.parametrize(
    "name", ["sm", "SparseGPT", "S+", "S+M+M", "S+SM", "none+M", "", "+", "obc", None]
)
def test_an_unknown_method_lists_all(name):
    with pytest.raises(MethodError, match="`method` must be one of") as raised:
        parse_method(name)
    for known in NAMED:
        assert known in str(raised.value)


@pytest.mark.parametrize("name", ["MS", "MM", "M+none"])
def test_the_mask_m_needs_groups(name):
    with pytest.raises(MethodError, match=r'not defined for unstructured.*method="SM"'):
        parse_method(name).mask.check(Unstructured(0.5))


def test_the_mask_m_tries_at_most_100_combinations():
    parse_method("MM").mask.check(SemiStructured(4, 8))  # 70
    with pytest.raises(MethodError, match=r'pattern "5:10" has 252'):
        parse_method("MM").mask.check(SemiStructured(5, 10))


@pytest.mark.parametrize("name", ["magnitude", "wanda", "wanda+M", "magnitude+S", "JM"])
def test_blocks_mean_nothing_to_masks_of_a_whole_layer(problem, truth, name):
    weight, inputs = problem()
    hessian = truth.hessian_of(inputs)
    first = prune_weight(weight, hessian, pattern="2:4", method=name, block_size=30)
    second = prune_weight(weight, hessian, pattern="2:4", method=name, block_size=None)
    assert torch.equal(first.weight, second.weight)


def test_magnitude_removes_the_smallest_of_the_whole_layer(problem, truth):
    weight, inputs = problem()
    solution = prune_weight(weight, truth.hessian_of(inputs), sparsity=0.3, method="magnitude")
    order = weight.abs().flatten().argsort(stable=True)
    expected = torch.zeros(weight.numel(), dtype=torch.bool)
    expected[order[: int(0.3 * weight.numel() + 0.5)]] = True
    assert torch.equal(solution.pruned, expected.view_as(weight))
    assert torch.equal(solution.weight, weight.masked_fill(solution.pruned, 0))


def test_wanda_removes_the_same_number_from_each_row(problem, truth):
    weight, inputs = problem()
    solution = prune_weight(weight, truth.hessian_of(inputs), sparsity=0.3, method="wanda")
    scores = weight.abs() * inputs.norm(dim=0)
    for row, removed in zip(scores, solution.pruned, strict=True):
        expected = row.argsort()[: int(0.3 * 64 + 0.5)].sort().values
        assert torch.equal(removed.nonzero().flatten(), expected)


@pytest.mark.parametrize("name", ["S+none", "M+none"])
def test_without_compensation_every_block_is_scored_from_the_dense_weight(problem, truth, name):
    weight, inputs = problem(rows=6, columns=24)
    hessian = truth.hessian_of(inputs)
    inverse = torch.linalg.inv(truth.damped(hessian))
    solution = prune_weight(weight, hessian, pattern="2:4", method=name, block_size=8)
    for row in range(6):
        for first in range(0, 24, 4):
            w = weight[row, first : first + 4].double()
            corner = inverse[first : first + 4, first : first + 4]
            if name[0] == "S":
                expected = (w**2 / corner.diagonal()).argsort()[:2].tolist()
            else:
                expected = truth.cheapest_combination(w, corner, 2)
            found = solution.pruned[row, first : first + 4].nonzero().flatten().tolist()
            assert found == sorted(expected)
    assert torch.equal(solution.weight, weight.masked_fill(solution.pruned, 0))


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:4", "4:8", "1:2", "2:5"])
def test_the_choice_of_m_is_the_cheapest_of_all_combinations(problem, truth, pattern):
    kept, group = map(int, pattern.split(":"))
    weight, inputs = problem(rows=8, columns=40, seed=3)
    hessian = truth.hessian_of(inputs)
    inverse = torch.linalg.inv(truth.damped(hessian))
    solution = prune_weight(weight, hessian, pattern=pattern, method="M+none", block_size=None)
    for row in range(8):
        for first in range(0, 40, group):
            block = slice(first, first + group)
            expected = truth.cheapest_combination(
                weight[row, block].double(), inverse[block, block], group - kept
            )
            assert solution.pruned[row, block].nonzero().flatten().tolist() == sorted(expected)


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_ends_at_its_pattern_and_says_whether_it_needs_the_inverse(
    problem, truth, name, monkeypatch
):
    asked, damped = [], InputHessian.damped
    monkeypatch.setattr(
        InputHessian, "damped", lambda *given: asked.append(given) or damped(*given)
    )
    weight, inputs = problem()
    solution = prune_weight(weight, truth.hessian_of(inputs), pattern="2:4", method=name)
    assert (solution.pruned.view(24, 16, 4).sum(2) == 2).all()
    assert (solution.weight[solution.pruned] == 0).all()
    assert (solution.gap is None) == (solution.iterations is None) == (not name.endswith("M"))
    assert (
        bool(asked)
        == parse_method(name).needs_inverse
        == (name not in ("magnitude+none", "wanda+none"))
    )


class OddColumns(Mask):
    """A mask of a whole layer that no method has."""

    name: ClassVar[str] = "odd"
    by_block: ClassVar[bool] = False
    needs_inverse: ClassVar[bool] = False

    def bind(self, problem, inverse_blocks):
        return lambda current, start: ((torch.arange(current.shape[1]) + start) % 2 == 1).expand_as(
            current
        )


@pytest.mark.parametrize("compensation", ["none", "S", "M"])
def test_a_new_mask_needs_nothing_but_itself(problem, truth, compensation):
    weight, inputs = problem(rows=6, columns=24)
    hessian = truth.hessian_of(inputs)
    method = Method("odd", OddColumns(), parse_method(f"S+{compensation}").compensation)
    recipe = Recipe(pattern=SemiStructured(2, 4), method=method, block_size=8, damping=0.01)
    solution = prune(weight, InputHessian(hessian), recipe)
    assert torch.equal(solution.pruned, (torch.arange(24) % 2 == 1).expand(6, 24))
    if "M" in compensation:
        best = truth.exact_optimum(weight, truth.damped(hessian), solution.pruned)
        torch.testing.assert_close(solution.weight.double(), best, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["SS", "SM", "MM", "S+none"])
def test_blocks_may_not_split_groups(name):
    with pytest.raises(PatternError, match=r"`block_size` must be a multiple of 4 .* got 30"):
        Recipe.of(method=name, pattern="2:4", block_size=30)


@pytest.mark.parametrize("block_size", [0, -4, 2.5, "128", True])
@pytest.mark.parametrize("method", ["SM", "magnitude"])
def test_a_block_size_is_a_positive_integer_or_none(method, block_size):
    with pytest.raises(OptionError, match="`block_size` must be a positive number of columns"):
        Recipe.of(method=method, sparsity=0.5, block_size=block_size)


@pytest.mark.parametrize("damping", [-0.1, float("nan"), float("inf"), "0.01", True, None])
def test_damping_is_a_finite_number(damping):
    with pytest.raises(OptionError, match="`damping` must be a finite number ≥ 0; got"):
        Recipe.of(method="magnitude", pattern="2:4", damping=damping)


@pytest.mark.parametrize("tolerance", [0, -1e-6, float("nan"), float("inf"), "1e-6", True])
@pytest.mark.parametrize("method", ["SM", "SS"])
def test_tolerance_is_positive_whatever_the_method(method, tolerance):
    with pytest.raises(OptionError, match="`tolerance` must be a finite number > 0; got"):
        Recipe.of(method=method, pattern="2:4", tolerance=tolerance)


def test_a_changed_recipe_is_checked_again():
    recipe = Recipe.of(method="MM", pattern="2:4")
    with pytest.raises(MethodError, match="not defined for unstructured"):
        dataclasses.replace(recipe, pattern=Unstructured(0.5))
    with pytest.raises(OptionError, match="`damping`"):
        dataclasses.replace(recipe, damping=-1)


def test_the_tolerance_is_that_of_the_exact_compensation():
    recipe = Recipe.of(method="SM", pattern="2:4", tolerance=1e-3)
    assert recipe.method.compensation.tolerance == 1e-3


def test_prune_weight_takes_the_settings_of_a_layer():
    """It spells them out, since they are its public signature."""
    spelled = inspect.signature(prune_weight).parameters
    for field in dataclasses.fields(LayerSettings):
        if field.name not in ("method", "head_grid"):
            parameter = spelled[field.name]
            assert (parameter.annotation, parameter.default) == (field.type, field.default)
