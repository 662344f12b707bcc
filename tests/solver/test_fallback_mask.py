"""Inputs that are copies of others, of which the paper's mask removes all."""

import warnings

import pytest
import torch

from mrp_lightning import prune_weight
from mrp_lightning.errors import NumericalWarning


def with_copies(copies, columns=64, rows=32):
    """A weight and the Hessian of inputs of which the last ones are copies of the first."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8 * columns, columns, generator=generator)
    inputs[:, columns - copies :] = inputs[:, :copies]
    weight = torch.randn(rows, columns, generator=generator)
    return weight, 2 * inputs.T @ inputs / len(inputs)


@pytest.mark.parametrize("copies", [4, 16])
@pytest.mark.parametrize(("damping", "block_size"), [(1e-3, 16), (0.01, 16), (0.01, None)])
def test_the_smallest_weights_never_lose_less_even_without_compensation(
    truth, copies, damping, block_size
):
    weight, hessian = with_copies(copies)
    simple = prune_weight(weight, hessian, sparsity=0.5, method="magnitude")
    arguments = {"sparsity": 0.5, "damping": damping, "block_size": block_size}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        solution = prune_weight(weight, hessian, **arguments)
    assert solution.loss < simple.loss
    matrix = truth.damped(hessian, damping)
    _, pruned = truth.algorithm_1(weight, matrix, block_size or 64, sparsity=0.5)
    paper = truth.loss(truth.exact_optimum(weight, matrix, pruned), weight, hessian)
    assert solution.loss <= 1.005 * paper
    if paper > simple.loss:
        assert solution.fallback_mask == "magnitude"
        assert [w.category for w in told] == [NumericalWarning]
        for stop in range(block_size or 64, 65, block_size or 64):  # as of the method's own mask
            assert int(solution.pruned[:, :stop].sum()) == 0.5 * 32 * stop
        best = truth.exact_optimum(weight, matrix, solution.pruned)
        assert truth.loss(solution.weight, weight, matrix) == pytest.approx(
            truth.loss(best, weight, matrix), rel=1e-5
        )
    else:
        assert (solution.fallback_mask, told) == (None, [])


def test_the_warning_names_losses_and_the_way_out():
    weight, hessian = with_copies(4)
    message = r"layer: SM lost .* smallest weights lose .* with compensation.*copies.*method JM"
    with pytest.warns(NumericalWarning, match=message):
        fallen = prune_weight(weight, hessian, sparsity=0.5)
    assert torch.equal(
        fallen.pruned, prune_weight(weight, hessian, sparsity=0.5, method="magnitude").pruned
    )
    joint = prune_weight(weight, hessian, sparsity=0.5, method="JM")
    assert joint.loss < fallen.loss


@pytest.mark.parametrize("method", ["SS", "S+none", "magnitude+M"])
def test_other_methods_are_what_they_are_called(method):
    weight, hessian = with_copies(4)
    assert prune_weight(weight, hessian, sparsity=0.5, method=method).fallback_mask is None
