"""The mask J against all masks of small problems, and against a simpler mask of larger ones."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mrp_lightning import prune_weight

COLUMNS = 12
HALF = torch.tensor(list(itertools.combinations(range(COLUMNS), COLUMNS // 2)))
GROUPS = torch.tensor(
    [
        [4 * group + member for group, pair in enumerate(pairs) for member in pair]
        for pairs in itertools.product(itertools.combinations(range(4), 2), repeat=COLUMNS // 4)
    ]
)


def lowest_loss(row, matrix, candidates):
    """The least of ½ w_P [(H⁻¹)_PP]⁻¹ w_Pᵀ over all candidates P, (candidates, removed)."""
    corners = torch.linalg.inv(matrix)[candidates[:, :, None], candidates[:, None, :]]
    removed = row.double()[candidates]
    solved = torch.linalg.solve(corners, removed.unsqueeze(2)).squeeze(2)
    return float((removed * solved).sum(1).min()) / 2


@pytest.mark.parametrize(("correlated", "most"), [(False, 1.05), (True, 1.15)])
@pytest.mark.parametrize(
    ("arguments", "candidates"), [({"pattern": "2:4"}, GROUPS), ({"sparsity": 0.5}, HALF)]
)
def test_it_is_near_the_best_of_all_masks(problem, truth, arguments, candidates, correlated, most):
    ratios = []
    for seed in range(12):
        weight, inputs = problem(rows=1, columns=COLUMNS, seed=seed)
        if not correlated:
            inputs = torch.randn(200, COLUMNS, generator=torch.Generator().manual_seed(seed))
        hessian = truth.hessian_of(inputs)
        matrix = truth.damped(hessian)
        solution = prune_weight(weight, hessian, method="JM", **arguments)
        found = truth.loss(solution.weight, weight, matrix)
        ratios.append(found / lowest_loss(weight[0], matrix, candidates))
    assert min(ratios) >= 1 - 1e-6
    assert sum(ratios) / len(ratios) <= most


@pytest.mark.parametrize("arguments", [{"pattern": "2:4"}, {"sparsity": 0.5}, {"sparsity": 0.7}])
def test_it_beats_the_exact_optimum_of_the_magnitude_mask(problem, truth, arguments):
    ratios = []
    for seed in range(2):
        weight, inputs = problem(rows=32, columns=96, seed=seed)
        hessian = truth.hessian_of(inputs).float()
        matrix = truth.damped(hessian)
        losses = {
            method: truth.loss(
                prune_weight(weight, hessian, method=method, **arguments).weight, weight, matrix
            )
            for method in ("JM", "magnitude+M", "SM")
        }
        ratios.append(losses["JM"] / losses["magnitude+M"])
        assert losses["JM"] < losses["SM"]
    assert sum(ratios) / len(ratios) <= 0.95


def test_the_scale_of_inputs_and_of_outputs_does_not_matter(problem, truth):
    # Mask and relative losses are those of the problem with a unit diagonal, but for the damping.
    weight, inputs = problem(rows=8, columns=32)
    scale = torch.exp2(torch.arange(32) % 5 - 2.0)
    plain = prune_weight(weight, truth.hessian_of(inputs), sparsity=0.5, method="JM", damping=0)
    scaled = prune_weight(
        weight / scale * 64, truth.hessian_of(inputs * scale), sparsity=0.5, method="JM", damping=0
    )
    assert torch.equal(plain.pruned, scaled.pruned)
    torch.testing.assert_close(scaled.weight * scale / 64, plain.weight, rtol=1e-3, atol=1e-4)


def test_its_memory_is_that_of_two_float64_matrices():
    columns = 1024  # more than the solver factorises in one piece
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3 * columns, columns, generator=generator)
    weight = torch.randn(8, columns, generator=generator)
    hessian = inputs.T @ inputs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        prune_weight(weight, hessian, pattern="2:4", method="JM")
    events = profiled.profiler.kineto_results.events()
    sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    held = itertools.accumulate(size for _, size in sorted(sizes))
    assert max(held) < 2 * columns * columns * 8
