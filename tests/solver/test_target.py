"""The target that makes up for what pruned blocks before a layer did to its inputs."""

import pytest
import torch
from torch import Tensor

from mrp_lightning import HessianAccumulator, HessianError, Recipe
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.problem import InputShift, dense_target
from mrp_lightning.solver.pruning import LayerTask, prune, prune_together

ROWS, COLUMNS, TOKENS = 24, 32, 300


def streams() -> tuple[Tensor, Tensor, Tensor]:
    """A weight, and what the dense and the pruned model give to it."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(COLUMNS, COLUMNS, generator=generator)
    dense = torch.randn(TOKENS, COLUMNS, generator=generator) @ mix
    pruned = dense + torch.randn(TOKENS, COLUMNS, generator=generator)
    return torch.randn(ROWS, COLUMNS, generator=generator), dense, pruned


def prepared(dense: Tensor, pruned: Tensor) -> tuple[InputHessian, Tensor]:
    hessian, shift = HessianAccumulator(COLUMNS), InputShift(COLUMNS, "layer")
    for x_d, x in zip(dense.split(100), pruned.split(100), strict=True):
        hessian.update(x)
        shift.update(x_d, x)
    return InputHessian(hessian.hessian()), shift.matrix()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_half_of_the_way_to_the_damped_least_squares_solution(dtype):
    weight, dense, pruned = streams()
    weight = weight.to(dtype)
    inputs, shift = prepared(dense, pruned)
    damped = inputs.damped(0.01)
    target = dense_target(weight, shift, damped)
    assert target.dtype == torch.float32
    # min ‖W̃X̂ᵀ − WX_dᵀ‖² / tokens + λ/2·‖W̃ − W‖², as one overdetermined system.
    w, x_d, x = weight.double(), dense.double(), pruned.double()
    ridge = (damped.damping_used * TOKENS / 2) ** 0.5
    left = torch.cat([x, ridge * torch.eye(COLUMNS).double()])
    right = torch.cat([x_d @ w.T, ridge * w.T])
    solved = torch.linalg.lstsq(left, right).solution.T
    expected = (w + solved) / 2
    torch.testing.assert_close(target.double(), expected, rtol=1e-4, atol=1e-4)


def test_is_the_weight_bit_for_bit_where_nothing_changed():
    weight, dense, _ = streams()
    inputs, shift = prepared(dense, dense.clone())
    target = dense_target(weight, shift, inputs.damped(0.01))
    assert torch.equal(target, weight)
    recipe = Recipe.of(method="SM", pattern="2:4")
    plain, aimed = prune(weight, inputs, recipe), prune(weight, inputs, recipe, target=target)
    assert torch.equal(plain.weight, aimed.weight)
    assert plain.target_loss is None
    assert aimed.target_loss == aimed.loss == plain.loss


@pytest.mark.parametrize("method", ["JM", "SM"])
def test_a_pruned_weight_keeps_its_zeros_and_the_others_go_to_the_optimum_for_them(method):
    weight, dense, pruned = streams()
    zeros = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    weight = weight.masked_fill(zeros, 0)
    inputs, shift = prepared(dense, pruned)
    damped = inputs.damped(0.01)
    target = dense_target(weight, shift, damped)
    assert target[zeros].all()
    recipe = Recipe.of(method=method, sparsity=0.5, tolerance=1e-10)
    (solution,) = prune_together([LayerTask(weight, recipe, target, is_pruned=True)], inputs)
    assert torch.equal(solution.pruned, zeros)
    assert torch.equal(solution.weight == 0, zeros)
    # min ‖(w − t)X̂ᵀ‖² / tokens + λ/2·‖w − t‖² over the kept weights of each row.
    ridge = (damped.damping_used * TOKENS / 2) ** 0.5
    rows = torch.cat([pruned.double(), ridge * torch.eye(COLUMNS).double()])
    for found, aim, zero in zip(solution.weight, target.double(), zeros, strict=True):
        expected = torch.linalg.lstsq(rows[:, ~zero], (rows @ aim)[:, None]).solution[:, 0]
        torch.testing.assert_close(found[~zero].double(), expected, rtol=1e-4, atol=1e-4)


def test_quantisation_alone_rounds_the_target():
    weight, dense, pruned = streams()
    inputs, shift = prepared(dense, pruned)
    target = dense_target(weight, shift, inputs.damped(0.01))
    recipe = Recipe.of(method="JM", bits=4, group_size=16)
    found = prune(weight, inputs, recipe, target=target).weight
    assert torch.equal(found, prune(target, inputs, recipe).weight)
    assert not torch.equal(found, prune(weight, inputs, recipe).weight)


def test_weights_of_dead_inputs_stay():
    weight, dense, pruned = streams()
    pruned[:, 5] = 0
    inputs, shift = prepared(dense, pruned)
    target = dense_target(weight, shift, inputs.damped(0.01))
    assert torch.equal(target[:, 5], weight[:, 5])
    assert not torch.equal(target[:, 4], weight[:, 4])


@pytest.mark.parametrize("method", ["SM", "SS", "wanda+M", "magnitude+S"])
def test_both_losses_are_what_they_say(method):
    weight, dense, pruned = streams()
    inputs, shift = prepared(dense, pruned)
    recipe = Recipe.of(method=method, sparsity=0.5)
    target = dense_target(weight, shift, inputs.damped(0.01))
    solution = prune(weight, inputs, recipe, target=target)
    x = pruned.double()

    def loss(change: Tensor) -> float:
        return float((x @ change.double().T).square().sum(1).mean())

    assert solution.loss == pytest.approx(loss(solution.weight - weight), rel=1e-4)
    assert solution.target_loss == pytest.approx(loss(solution.weight - target), rel=1e-4)
    # What it is for: the dense outputs are met better than by pruning the weight itself.
    plain = prune(weight, inputs, recipe)
    outputs = dense.double() @ weight.double().T
    errors = [(x @ s.weight.double().T - outputs).square().sum() for s in (solution, plain)]
    assert errors[0] < errors[1]


def test_what_is_not_finite_is_refused_by_name():
    _, dense, pruned = streams()
    dense[3, 3] = float("nan")
    with pytest.raises(HessianError, match=r"`layer`: the dense model's inputs hold NaN"):
        prepared(dense, pruned)


def test_no_tokens_are_refused():
    shift = InputShift(4, "layer")
    for _ in range(2):
        with pytest.raises(HessianError, match="no calibration tokens were seen"):
            shift.matrix()
        shift.update(torch.ones(0, 4), torch.ones(0, 4))
