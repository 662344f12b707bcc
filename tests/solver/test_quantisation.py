"""Kept weights on a grid, against brute force, dense float64 solves and GPTQ written plainly."""

import itertools
import math
import warnings

import pytest
import torch

from mrp_lightning import prune_weight
from mrp_lightning.errors import NumericalWarning, OptionError, PatternError
from mrp_lightning.solver.grid import GRIDS, Grid, ScaleType, decompose, grid_of_bits
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.quantisation import _FACTORS, _Descent

SETTINGS = [{"sparsity": 0.5}, {"sparsity": 0.7}, {"pattern": "2:4"}, {}]


def all_scales(least, most):
    """All numbers of five significant bits from `least` to `most`."""
    exponents = range(math.floor(math.log2(least)), math.ceil(math.log2(most)) + 1)
    found = [m * 2.0 ** (e - 4) for e in exponents for m in range(16, 32)]
    return [s for s in found if least <= s <= most]


def best_on_grid(row, kept, matrix, largest):
    """The least loss of a row in one group: every scale, and every code of each kept weight."""
    places = kept.nonzero().flatten()
    codes = torch.tensor(list(itertools.product(range(-largest, largest + 1), repeat=len(places))))
    peak = float(row.abs().max())
    best = float("inf")
    for scale in all_scales(peak / (4 * largest), 4 * peak):
        x = torch.zeros(len(codes), len(row), dtype=torch.float64)
        x[:, places] = codes.double() * scale
        change = x - row
        best = min(best, float((change @ matrix * change).sum(1).min()) / 2)
    return best


def test_near_to_brute_force_over_all_scales_and_codes(problem, truth):
    ratios = []
    for seed in range(6):
        weight, inputs = problem(3, 4, tokens=40, seed=seed, dtype=torch.float64)
        hessian = 2 * inputs.T @ inputs / 40
        matrix = truth.damped(hessian)
        free = prune_weight(weight, hessian, sparsity=0.25, method="JM", tolerance=1e-12)
        found = prune_weight(
            weight, hessian, sparsity=0.25, method="JM", tolerance=1e-12, bits=3, group_size=4
        )
        assert torch.equal(free.pruned, found.pruned)
        best = sum(
            best_on_grid(w, ~p, matrix, 4) for w, p in zip(weight, found.pruned, strict=True)
        )
        ours = truth.loss(found.weight, weight, matrix)
        assert ours >= best * (1 - 1e-9)
        ratios.append(ours / best)
    assert sum(ratios) / len(ratios) < 1.1


@pytest.mark.parametrize(
    ("bits", "group_size", "zero_has_a_code"),
    [(3, 8, True), (4, 20, False), (4, 300, True), (8, 7, False)],
)
def test_starts_from_the_sweep_and_gets_no_worse(problem, truth, bits, group_size, zero_has_a_code):
    weight, inputs = problem(9, 150, dtype=torch.float64)
    hessian = 2 * inputs.T @ inputs / len(inputs)
    kept = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) > 0.4
    kept = torch.ones_like(kept) if zero_has_a_code else kept
    grid = grid_of_bits(bits, group_size, zero_has_a_code=zero_has_a_code)
    target = weight * kept
    inputs = InputHessian(hessian)
    descent = _Descent(
        target.T.contiguous(), kept.T.to(torch.float64).contiguous(), inputs.damped(0.01), grid
    )
    descent.sweep()
    plain = truth.gptq(target, truth.damped(hessian), grid, descent.scales.T, kept=kept)
    assert torch.allclose(descent.x.T, plain, rtol=0, atol=1e-9)
    found, _ = truth.on_grid_of(weight, hessian, grid, kept)
    for row in range(9):
        before = truth.loss(plain[row : row + 1], target[row : row + 1], truth.damped(hessian))
        after = truth.loss(found[row : row + 1], target[row : row + 1], truth.damped(hessian))
        assert after <= before * (1 + 1e-9)
    assert truth.loss(found, target, truth.damped(hessian)) < 0.95 * truth.loss(
        plain, target, truth.damped(hessian)
    )


def test_the_first_scales_fit_the_weights_best(problem, truth):
    weight, inputs = problem(6, 16, dtype=torch.float64)
    hessian = 2 * inputs.T @ inputs / len(inputs)
    grid, diagonal = grid_of_bits(4, 16), truth.damped(hessian).diagonal()
    ones = torch.ones_like(weight.T)
    descent = _Descent(weight.T.contiguous(), ones, InputHessian(hessian).damped(0.01), grid)
    descent.sweep()
    for row, scale in zip(weight, descent.scales[0], strict=True):
        errors = {}
        for factor in _FACTORS:
            tried = grid.round_scales(row.abs().max() / 8 * factor)
            codes = (row / tried).round().clamp(-8, 8)
            errors[float(tried)] = float((diagonal * (codes * tried - row) ** 2).sum())
        assert errors[float(scale)] == pytest.approx(min(errors.values()))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize(
    ("bits", "dtype"),
    [
        *((3, torch.bfloat16), (4, torch.bfloat16), (8, torch.bfloat16)),
        *((3, torch.float64), (4, torch.float16), (8, torch.float32)),
    ],
)
def test_values_lie_on_the_grid_in_every_dtype(problem, truth, setting, bits, dtype):
    weight, inputs = problem(11, 100 if "pattern" in setting else 90, dtype=torch.float64)
    weight, hessian = weight.to(dtype), truth.hessian_of(inputs).float()
    before = weight.clone(), hessian.clone()
    free = prune_weight(weight, hessian, **setting) if setting else None
    found = prune_weight(weight, hessian, **setting, bits=bits, group_size=32)
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])
    assert found.weight.dtype == dtype
    grid = grid_of_bits(bits, 32, zero_has_a_code=not setting)
    codes, scales = decompose(grid, found.weight)
    assert scales.shape == (11, 4 if "pattern" in setting else 3)
    assert torch.equal(found.weight, found.weight.to(torch.bfloat16).to(dtype))
    assert not found.weight[found.pruned].any()
    if free is None:
        assert not found.pruned.any()
        assert found.zeros_loss == 0
        spread = codes.int().split(32, dim=1)
        widths = [part.amax(1) - part.amin(1) for part in spread]
        assert int(torch.stack(widths).max()) <= (254 if bits == 8 else 2**bits - 1)
    else:
        assert torch.equal(found.pruned, free.pruned)
        assert found.zeros_loss == free.loss
        assert free.zeros_loss is None
        assert free.grid_loss is None
    assert found.zeros_loss + found.grid_loss == pytest.approx(found.loss)


def test_more_bits_lose_less_and_smaller_groups_too(problem, truth):
    weight, inputs = problem(16, 128)
    hessian = truth.hessian_of(inputs)
    lost = [prune_weight(weight, hessian, pattern="2:4", bits=b).grid_loss for b in (3, 4, 8)]
    assert lost[0] > 2 * lost[1] > 20 * lost[2] > 0
    grouped = [prune_weight(weight, hessian, bits=3, group_size=g).loss for g in (16, 64, 128)]
    assert grouped == sorted(grouped)


def test_the_grid_adds_little_to_what_the_optimum_loses(problem, truth):
    """The damped losses of zeros and grid add up, since the first ends at an optimum."""
    weight, inputs = problem(8, 64, dtype=torch.float64)
    hessian = truth.hessian_of(inputs)
    free = prune_weight(weight, hessian, sparsity=0.5, tolerance=1e-12)
    found = prune_weight(weight, hessian, sparsity=0.5, tolerance=1e-12, bits=4)
    matrix = truth.damped(hessian)
    apart = truth.loss(free.weight, weight, matrix) + truth.loss(found.weight, free.weight, matrix)
    assert truth.loss(found.weight, weight, matrix) == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
@pytest.mark.parametrize("bits", [3, 8])
def test_the_size_of_weights_has_no_say(problem, truth, scale, bits):
    weight, inputs = problem(4, 32)
    found = prune_weight(weight * scale, truth.hessian_of(inputs), sparsity=0.5, bits=bits)
    plain = prune_weight(weight, truth.hessian_of(inputs), sparsity=0.5, bits=bits)
    assert torch.equal(found.weight, plain.weight * scale)


def test_rows_and_inputs_of_zeros(problem, truth):
    weight, inputs = problem(4, 32)
    weight[1] = 0
    weight[2, :16] = 0
    inputs[:, [0, 5, 16]] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        for setting in SETTINGS:
            found = prune_weight(weight, truth.hessian_of(inputs), **setting, bits=4, group_size=16)
            _, scales = decompose(grid_of_bits(4, 16), found.weight)
            assert found.weight.isfinite().all()
            assert not found.weight[1].any()
            assert scales[1].tolist() == [1, 1]


@pytest.mark.parametrize("grid", ["mxfp4", "int8-g32", "int4-g32"])
def test_zeros_stay_zeros_beside_the_smallest_inputs(grid, problem, truth):
    """The smallest scale, times the curvature of small inputs, is below all numbers of float32."""
    weight, inputs = problem(8, 64)
    weight[1] = 0
    weight[2] *= 1e-38
    weight[3:, :32] = 0
    found = prune_weight(weight, truth.hessian_of(inputs * 1e-3), grid=grid)
    assert found.weight.isfinite().all()
    assert not found.weight[1].any()
    assert not found.weight[3:, :32].any()
    _, scales = decompose(GRIDS[grid], found.weight)
    assert (scales[1] == 1).all()
    assert (scales[3:, 0] == 1).all()


def test_what_does_not_go_is_refused(problem, truth):
    weight, inputs = problem(4, 32)
    hessian = truth.hessian_of(inputs)
    with pytest.raises(OptionError, match="`bits` must be 3, 4 or 8; got 5"):
        prune_weight(weight, hessian, bits=5)
    with pytest.raises(OptionError, match="`group_size`"):
        prune_weight(weight, hessian, bits=4, group_size=0)
    with pytest.raises(OptionError, match="`group_size` 32 means nothing without `bits`"):
        prune_weight(weight, hessian, sparsity=0.5, group_size=32)
    with pytest.raises(PatternError, match="`bits` alone"):
        prune_weight(weight, hessian)


@pytest.mark.parametrize("method", ["SM", "JM", "magnitude"])
def test_a_pruned_weight_keeps_its_zeros_if_its_pattern_is_given_again(problem, truth, method):
    weight, inputs = problem(8, 64)
    hessian = truth.hessian_of(inputs)
    pruned = prune_weight(weight, hessian, pattern="2:4")
    found = prune_weight(pruned.weight, hessian, pattern="2:4", method=method, bits=4)
    assert torch.equal(found.pruned, pruned.pruned)
    assert found.zeros_loss == pytest.approx(0, abs=1e-9 * pruned.loss)


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
def test_scales_and_minima_start_from_the_sweep_and_get_no_worse(name, problem, truth):
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
def test_rows_and_inputs_of_zeros_with_minima(name, problem, truth):
    weight, inputs = problem(4, 256)
    weight[1], weight[2, 32:64], weight[3] = 0, 0.25, 2.0**-30
    inputs[:, :32] = 0
    solution = prune_weight(weight, truth.hessian_of(inputs), grid=name)
    assert solution.weight.isfinite().all()
    assert not solution.weight[1].any()
    assert (solution.weight[3] - weight[3]).abs().max() <= 2.0**-23  # of float16's smallest scale
    assert GRIDS[name].codes_of(solution.weight, solution.grid_parameters) is not None
