"""Layers of one input: their reports, and their rows on one grid."""

import contextlib

import pytest
import torch
from torch import nn

from mrp_lightning import prune_weight
from mrp_lightning.pruning.prune_layers import Calibrated, prune_layers
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import layers_of


@contextlib.contextmanager
def narrow_products():
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "settings",
    [narrow_products, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["medium", "autocast"],
)
@torch.no_grad()
def test_the_relative_loss_does_not_depend_on_the_precision_of_the_user(settings):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 64, generator=generator)
    dense = torch.randn(24, 64, generator=generator)
    hessian = 2 * inputs.T @ inputs / 400

    def prune():
        linear = nn.Linear(64, 24)
        linear.weight.copy_(dense)
        (layer,) = layers_of("fc1", linear)
        recipe = Recipe.of(method="SM", pattern="2:4")
        calibrated = Calibrated(InputHessian(hessian), tokens=400)
        (result,) = prune_layers([layer], calibrated, [recipe])
        return result.row, linear.weight

    row, weight = prune()
    loss = ((weight - dense) @ inputs.T).square().sum()
    energy = (dense @ inputs.T).square().sum()
    assert row.relative_loss == pytest.approx(float(loss / energy), rel=1e-4)
    with settings():
        again, _ = prune()
    assert (again.loss, again.relative_loss) == (row.loss, row.relative_loss)


@pytest.mark.parametrize("settings", [{}, {"sparsity": 0.5}, {"pattern": "2:4", "method": "JM"}])
@torch.no_grad()
def test_layers_of_one_input_get_the_weights_that_each_gets_alone(settings):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(300, 96, generator=generator) @ torch.randn(96, 96, generator=generator)
    hessian = 2 * inputs.T @ inputs / 300
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    linears = [nn.Linear(96, rows, dtype=t) for rows, t in zip((40, 8, 24), dtypes, strict=True)]
    dense = [linear.weight.clone() for linear in linears]
    layers = [layers_of(f"layer{i}", linear)[0] for i, linear in enumerate(linears)]
    settings = {"method": "SM", **settings}
    recipe = Recipe.of(**settings, grid="q4_0")
    calibrated = Calibrated(InputHessian(hessian), tokens=300)
    rows = [result.row for result in prune_layers(layers, calibrated, [recipe] * 3)]
    for row, linear, weight in zip(rows, linears, dense, strict=True):
        alone = prune_weight(weight, hessian, **settings, grid="q4_0")
        assert torch.equal(linear.weight, alone.weight)
        assert (row.loss, row.grid.zeros_loss) == pytest.approx((alone.loss, alone.zeros_loss))
        energy = float(((weight.double() @ inputs.T.double()) ** 2).sum()) / 300
        assert row.relative_loss == pytest.approx(row.loss / energy, rel=1e-3)
    assert [row.seconds / rows[0].seconds for row in rows] == pytest.approx([1, 0.2, 0.6])
