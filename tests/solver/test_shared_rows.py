"""Rows shared out over processes, against one process with the same weight and Hessian."""

import pytest
import torch
from thread_processes import together

from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.problem import dense_target
from mrp_lightning.solver.pruning import Solution, prune
from mrp_lightning.solver.recipe import NAMED, Recipe

HALF, TWO_OF_FOUR = {"sparsity": 0.5}, {"pattern": "2:4"}
CASES = [(name, HALF) for name in NAMED if name not in ("MS", "MM")]
CASES += [(name, TWO_OF_FOUR) for name in NAMED]
CASES += [("SM", HALF | {"bits": 4}), ("SM", {"bits": 3})]


def hessian(columns: int) -> torch.Tensor:
    x = torch.randn(4 * columns, columns) @ torch.randn(columns, columns)
    x[:, 3] = 0
    return 2 * x.T @ x / len(x)


def solve(weight, matrix, processes: Processes, target=None, **options) -> Solution:
    recipe = Recipe.of(block_size=16, **options)
    mine = None if target is None else target[processes.share(len(weight))]
    return prune(weight, InputHessian(matrix), recipe, target=mine, processes=processes)


@pytest.mark.parametrize(("method", "pattern"), CASES)
def test_gives_the_mask_and_the_optimum_of_one_process(method, pattern):
    torch.manual_seed(0)
    weight, matrix = torch.randn(11, 32), hessian(32)
    weight[4:7] = weight[4].round()  # ties, over the border of a share
    expected = solve(weight, matrix, ALONE, method=method, **pattern)
    for size in (3, 13):
        found = together(size, lambda p: solve(weight, matrix, p, method=method, **pattern))
        for one in found:
            assert torch.equal(one.pruned, expected.pruned)
            torch.testing.assert_close(one.weight, expected.weight, rtol=1e-3, atol=1e-3)
            assert one.loss == pytest.approx(expected.loss, rel=1e-4)
            assert torch.equal(one.weight, found[0].weight)
            assert (one.loss, one.gap, one.iterations, one.dead_inputs) == (
                *(found[0].loss, found[0].gap, found[0].iterations),
                expected.dead_inputs,
            )


def test_a_target_is_shared_out_with_the_rows():
    torch.manual_seed(0)
    weight, matrix, shift = torch.randn(10, 32), hessian(32), torch.randn(32, 32)
    target = dense_target(weight, shift, InputHessian(matrix).damped(0.01))
    expected = solve(weight, matrix, ALONE, target, method="SM", **HALF)
    for one in together(3, lambda p: solve(weight, matrix, p, target, method="SM", **HALF)):
        assert torch.equal(one.pruned, expected.pruned)
        assert one.target_loss == pytest.approx(expected.target_loss, rel=1e-4)


def test_shares_are_all_rows_once():
    for size in range(1, 9):
        for rows in range(20):
            shares = [Processes(rank, size).share(rows) for rank in range(size)]
            assert [i for share in shares for i in range(rows)[share]] == list(range(rows))
            lengths = [len(range(rows)[share]) for share in shares]
            assert max(lengths) - min(lengths) <= 1
