"""What is reported of one layer."""

import contextlib

import pytest
import torch
from torch import nn

from mrp_lightning.pruning.prune_layer import Calibrated, prune_layer
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
        row = prune_layer(layer, Calibrated(InputHessian(hessian), tokens=400), recipe)
        return row, linear.weight

    row, weight = prune()
    loss = ((weight - dense) @ inputs.T).square().sum()
    energy = (dense @ inputs.T).square().sum()
    assert row.relative_loss == pytest.approx(float(loss / energy), rel=1e-4)
    with settings():
        again, _ = prune()
    assert (again.loss, again.relative_loss) == (row.loss, row.relative_loss)
