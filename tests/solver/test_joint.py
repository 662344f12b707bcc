"""The mask J against all masks of small problems, and against a simpler mask of larger ones."""

import itertools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mrp_lightning import prune_weight
from mrp_lightning.solver import masks
from mrp_lightning.solver.hessian import DampedHessian, InputHessian, factor_of_inverse

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


@pytest.fixture
def nearly_copies(truth):
    """A weight and a Hessian for which float32 does not suffice: two inputs are nearly copies."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs = (torch.randn(n, 96, generator=generator) for n in (32, 400))
    inputs[:, 1] = inputs[:, 0] + 5e-3 * torch.randn(400, generator=generator)
    hessian = truth.hessian_of(inputs).float()
    assert not InputHessian(hessian).damped(1e-7).float32_suffices
    return weight, hessian


def joint(weight, hessian):
    return prune_weight(weight, hessian, sparsity=0.5, method="JM", damping=1e-7)


def test_float32_finds_as_good_a_mask_where_the_penalty_is_above_its_errors(
    nearly_copies, monkeypatch
):
    precisions = []

    def factor(matrix):
        precisions.append(matrix.dtype)
        return factor_of_inverse(matrix)

    monkeypatch.setattr(masks, "factor_of_inverse", factor)
    narrow = joint(*nearly_copies)
    assert {*precisions} == {torch.float32}
    monkeypatch.setattr(DampedHessian, "float32_suffices_with", lambda self, shift: False)
    wide = joint(*nearly_copies)
    assert {*precisions} == {torch.float32, torch.float64}
    # Many masks are nearly as good as each other, and rounding decides which of them is found.
    assert narrow.loss == pytest.approx(wide.loss, rel=0.02)


def test_a_factorisation_that_fails_in_float32_is_one_of_float64(nearly_copies, monkeypatch):
    expected = joint(*nearly_copies)
    monkeypatch.setattr(
        masks,
        "factor_of_inverse",
        lambda matrix: None if matrix.dtype == torch.float32 else factor_of_inverse(matrix),
    )
    assert joint(*nearly_copies).loss == pytest.approx(expected.loss, rel=0.02)
