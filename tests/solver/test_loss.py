"""The energy of a layer's outputs, against the outputs themselves."""

import math

import pytest
import torch

from mrp_lightning import prune_weight
from mrp_lightning.solver.problem import output_energy


def test_it_is_the_mean_squared_output(problem, truth):
    weight, inputs = problem()
    hessian = truth.hessian_of(inputs)
    expected = float((weight.double() @ inputs.double().T).square().sum()) / len(inputs)
    for dtype in (torch.float32, torch.float64):
        for given in (weight, weight.double()):
            assert output_energy(given, hessian.to(dtype)) == pytest.approx(expected, rel=1e-5)
    narrow = weight.bfloat16()
    expected = float((narrow.double() @ inputs.double().T).square().sum()) / len(inputs)
    assert output_energy(narrow, hessian.float()) == pytest.approx(expected, rel=1e-5)


def test_outputs_that_cancel_are_summed_in_float64(problem, truth):
    _, inputs = problem(columns=32, tokens=8)
    null_space = torch.linalg.svd(inputs.double(), full_matrices=True).Vh[8:]
    change = (null_space[:4] + 1e-5 * torch.randn(4, 32).double()).float()
    expected = float((change.double() @ inputs.double().T).square().sum()) / len(inputs)
    hessian = truth.hessian_of(inputs)
    rounded = float(((change @ hessian.float()) * change).sum()) / 2
    assert rounded != pytest.approx(expected, rel=0.05)
    assert output_energy(change, hessian.float()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("method", ["magnitude", "SM"])
def test_a_loss_beyond_float32_is_a_number(problem, truth, method):
    weight, inputs = problem(rows=8, columns=32)
    weight, hessian = weight * 2.0**62, truth.hessian_of(inputs).float() * 2.0**10
    solution = prune_weight(weight, hessian, pattern="2:4", method=method)
    expected = truth.loss(solution.weight, weight, hessian)
    assert torch.finfo(torch.float32).max < expected < math.inf
    assert solution.loss == pytest.approx(expected, rel=1e-4)
    assert output_energy(weight, hessian) == pytest.approx(
        truth.loss(weight, torch.zeros_like(weight), hessian), rel=1e-4
    )


def test_the_sum_of_many_losses_is_one_of_float64():
    # In float32 a sum that has come to 2²⁴ is not moved by 1 any more.
    change = torch.ones(2**14, 1)
    change[0] = 2.0**12
    assert output_energy(change, torch.full((1, 1), 2.0)) == 2**24 + 2**14 - 1
