"""What a recipe refuses, before any layer is seen."""

import dataclasses
import inspect

import pytest

from mrp_lightning.errors import MethodError, OptionError, PatternError
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.solver.pruning import prune_weight
from mrp_lightning.solver.recipe import LayerSettings, Recipe


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
