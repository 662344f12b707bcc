"""The estimate of a pruning against sums by hand, for one layer."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mrp_lightning import BlockTuning, MethodError, OptionError
from mrp_lightning.pruning.estimate import Estimate, estimate, products_per_second
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.targets.layers import layers_of
from mrp_lightning.targets.plan import make_plan


def expected(**options):
    model = nn.Sequential(nn.ModuleList([nn.Linear(40, 20, bias=False)]))
    settings = Settings(**{"method": "SM", "sparsity": 0.5, **options})
    plan = make_plan(model, settings.recipe.pattern)
    speeds = {"tokens_per_second": 100.0, "products_per_second": 1e4}
    return estimate(model, plan, settings, windows=5, length=100, **speeds)


def test_one_layer():
    forward, weights = 500 / 100, 40 * 20  # all of the model is in the layer
    hessian = forward * 40**2 / weights
    solver = (50 * weights * 40 + 3 * 40**3) / 1e4
    found = expected()
    assert found.seconds == pytest.approx(2 * forward + hessian + solver)
    of_matrices = 4 * 500 * 40 + 4 * (17.5 * weights + 9.1 * 40**2)
    assert found.num_bytes - 64 * 2**20 == pytest.approx(of_matrices)


def test_what_costs_more_is_expected_to():
    ways = [{"method": "magnitude"}, {}, {"bits": 4}, {"method": "JM"}]
    ways += [{"method": "JM", "tuning": True}]
    times = [expected(**options).seconds for options in ways]
    assert times == sorted(times)
    assert len(set(times)) == 5


def test_a_head_costs_its_solution_and_its_copy():
    model = nn.Sequential(nn.ModuleList([nn.Linear(40, 20, bias=False)]))
    head = layers_of("head", nn.Linear(40, 500, bias=False))[0]
    settings = Settings(method="SM", sparsity=0.5, head_grid="iq4_nl")
    plan = replace(make_plan(model, settings.recipe.pattern), head=head)
    speeds = {"tokens_per_second": 100.0, "products_per_second": 1e4}
    found = estimate(model, plan, settings, windows=5, length=100, **speeds)
    alone = expected()
    of_head = (20 * 500 * 40 * 40 + 3 * 40**3) / 1e4 + 500 / 100 * 40**2 / (40 * 20)
    assert found.seconds - alone.seconds == pytest.approx(of_head)
    solver = 4 * (17.5 * 500 * 40 + 9.1 * 40**2) - 4 * (17.5 * 20 * 40 + 9.1 * 40**2)
    assert found.num_bytes - alone.num_bytes == pytest.approx(solver + 4 * 500 * 40)


def test_what_is_done_before_takes_its_time_and_gives_its_memory_back():
    assert Estimate(5.0, 70).after(Estimate(2.0, 90)) == Estimate(7.0, 90)
    assert Estimate(5.0, 70).after(Estimate(0.0, 0)) == Estimate(5.0, 70)


def test_the_speed_is_that_of_products():
    found = products_per_second(torch.device("cpu"))
    assert 1e7 < found < 1e14


def made(method="SM", pattern=None, **options) -> Settings:
    sparsity = None if pattern else 0.5
    return Settings(**{"method": method, "sparsity": sparsity, "pattern": pattern} | options)


def test_all_is_off_by_default():
    settings = made()
    assert (settings.target, settings.block_tuning, settings.targets) == ("own", None, None)
    given = {"method": "SM", "sparsity": 0.5}
    assert settings.config() == Settings.defaults() | given


@pytest.mark.parametrize("tuning", [True, BlockTuning(), BlockTuning(epochs=5)])
def test_tuning_may_be_said_in_two_ways(tuning):
    assert made(tuning=tuning).block_tuning == BlockTuning()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "Dense"}, "`target` must be one of own, dense; got 'Dense'"),
        ({"allocation": "output", "pattern": "2:4"}, "all have the pattern 2:4"),
        ({"bits": 5}, "`bits` must be 3, 4 or 8; got 5"),
        ({"bits": "4"}, "`bits` must be a whole number or None"),
        ({"bits": 4, "group_size": 0}, "`group_size` must be a positive number of columns"),
        ({"targets": []}, "`targets` is empty, so nothing would be pruned"),
        ({"group_size": 32}, "`group_size` 32 means nothing without `bits`"),
        ({"allocation": "output", "sparsity": None, "bits": 4}, "all have the pattern dense"),
    ],
)
def test_what_does_not_go_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        made(**options)


@pytest.mark.parametrize("method", ["wanda", "magnitude", "S+none"])
def test_methods_without_compensation_can_aim_at_nothing(method):
    with pytest.raises(MethodError, match=rf"`target: dense` .* {method.replace('+', '.')} moves"):
        made(method, target="dense")
    assert made(method, tuning=True).block_tuning == BlockTuning()
