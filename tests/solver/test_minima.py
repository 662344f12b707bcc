"""Grids with a minimum for each group, against brute force and a textbook sweep in float64."""

import itertools

import pytest
import torch

from mrp_lightning import prune_weight
from mrp_lightning.solver.grid import GRIDS, Grid, ScaleType
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.quantisation import _Descent

FLOAT16 = ScaleType(11, 2.0**-24, 65504.0)
COARSE = Grid(2, 5, tuple(range(4)), FLOAT16, "coarse", minimum=True)


def best_of_all(row, matrix):
    """The least loss of a row in one group: all codes, each with its optimal scale and minimum."""
    codes = torch.tensor(list(itertools.product(range(4), repeat=len(row))), dtype=torch.float64)
    codes = codes[(codes != codes[:, :1]).any(1)]
    design = torch.stack([codes, -torch.ones_like(codes)], 2)
    normal = design.mT @ matrix @ design
    solved = torch.linalg.solve(normal, (design.mT @ (matrix @ row))[..., None])[..., 0]
    change = (design @ solved[..., None])[..., 0] - row
    return float((change @ matrix * change).sum(1).min()) / 2


def test_it_is_near_the_best_of_all_codes_scales_and_minima(problem, truth):
    """Of 1,024 codes for each row; the codes that descent ends with need not be the best."""
    weight, inputs = problem(60, 5, dtype=torch.float64)
    weight += 0.3
    hessian = truth.hessian_of(inputs)
    matrix = truth.damped(hessian)
    quantised, _ = truth.on_grid_of(weight, hessian, COARSE)
    ours = torch.tensor(
        [truth.loss(quantised[i, None], weight[i, None], matrix) for i in range(60)]
    )
    best = torch.tensor([best_of_all(row, matrix) for row in weight])
    assert (ours >= best * (1 - 1e-3)).all()  # scales and minima are rounded to float16
    assert (ours / best).median() <= 1.05
    assert ours.sum() <= 1.7 * best.sum()


@pytest.mark.parametrize("name", ["q4_1", "q5_k"])
def test_starts_from_the_sweep_and_gets_no_worse(name, problem, truth):
    weight, inputs = problem(9, 256, dtype=torch.float64)
    hessian = truth.hessian_of(inputs)
    matrix, grid = truth.damped(hessian), GRIDS[name]
    descent = _Descent(
        weight.T.contiguous(), torch.ones_like(weight.T), InputHessian(hessian).damped(0.01), grid
    )
    descent.sweep()
    plain = truth.gptq(weight, matrix, grid, descent.scales.T, descent.minima.T)
    assert torch.allclose(descent.x.T, plain, rtol=0, atol=1e-9)
    quantised, parameters = truth.on_grid_of(weight, hessian, grid)
    assert grid.codes_of(quantised, parameters) is not None
    for row in range(9):
        swept, improved = (
            truth.loss(x[row, None], weight[row, None], matrix) for x in (plain, quantised)
        )
        assert improved <= swept * (1 + 1e-6)
    assert truth.loss(quantised, weight, matrix) < 0.95 * truth.loss(plain, weight, matrix)


@pytest.mark.parametrize("name", ["q4_k", "q5_k"])
def test_scales_and_minima_are_steps_of_two_units(name, problem, truth):
    grid, (weight, inputs) = GRIDS[name], problem(16, 512)
    weight[:4] += 0.5  # some minima would be negative
    weight[4, :256] = 0
    _, parameters = truth.on_grid_of(weight, truth.hessian_of(inputs).float(), grid)
    for numbers, lowest in ((parameters.scales, 1), (parameters.minima, 0)):
        units = grid.units(numbers)
        steps = numbers / units
        assert torch.equal(steps, steps.round())
        assert lowest <= int(steps.min())
        assert int(steps.max()) <= 63
        assert torch.equal(units.half().float(), units)
        assert torch.equal(units, units.view(16, 2, 8)[..., :1].expand(16, 2, 8).flatten(1))


def test_weights_on_one_side_of_zero_gain_most(problem, truth):
    weight, inputs = problem(32, 128)
    hessian = truth.hessian_of(inputs).float()

    def lost(name, shift):
        quantised, _ = truth.on_grid_of(weight + shift, hessian, GRIDS[name])
        return truth.loss(quantised, weight + shift, hessian)

    assert lost("q4_1", 0.5) < 1.1 * lost("q4_1", 0.0)
    assert lost("q4_0", 0.5) > 4 * lost("q4_1", 0.5)


@pytest.mark.parametrize("name", ["q4_1", "q4_k"])
def test_rows_and_inputs_of_zeros(name, problem, truth):
    weight, inputs = problem(4, 256)
    weight[1], weight[2, 32:64], weight[3] = 0, 0.25, 2.0**-30
    inputs[:, :32] = 0
    solution = prune_weight(weight, truth.hessian_of(inputs), grid=name)
    assert solution.weight.isfinite().all()
    assert not solution.weight[1].any()
    assert (solution.weight[3] - weight[3]).abs().max() <= 2.0**-23  # of float16's smallest scale
    assert GRIDS[name].codes_of(solution.weight, solution.grid_parameters) is not None
