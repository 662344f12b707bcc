"""Solution 𝔖: the column sweep against a textbook rewrite and against the original's results."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from mrp_lightning import HessianAccumulator, prune_weight

REFERENCE = json.loads((Path(__file__).parent / "reference" / "sparsegpt.json").read_text())


@pytest.mark.parametrize("block_size", [24, None])
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("SS", {"sparsity": 0.5}),
        ("SS", {"sparsity": 0.73}),
        ("SS", {"pattern": "2:4"}),
        ("SS", {"pattern": "1:4"}),
        ("MS", {"pattern": "2:4"}),
        ("MS", {"pattern": "3:4"}),
    ],
)
def test_it_is_sparsegpt(problem, truth, method, arguments, block_size):
    weight, inputs = problem(rows=16, columns=88, dtype=torch.float64)
    hessian = truth.hessian_of(inputs)
    given = dict(arguments)
    if "pattern" in given:
        given["pattern"] = tuple(map(int, given["pattern"].split(":")))
    expected, pruned = truth.sparsegpt(
        weight, truth.damped(hessian), block_size or 88, mask=method[0], **given
    )
    solution = prune_weight(weight, hessian, method=method, block_size=block_size, **arguments)
    assert torch.equal(solution.pruned, pruned)
    torch.testing.assert_close(solution.weight, expected, rtol=1e-8, atol=1e-10)


def test_panels_within_a_wide_block_change_nothing(problem, truth):
    weight, inputs = problem(rows=4, columns=300, dtype=torch.float64)
    hessian = truth.hessian_of(inputs)
    for block_size in (7, 300, 1000):
        expected, pruned = truth.sparsegpt(
            weight, truth.damped(hessian), min(block_size, 300), sparsity=0.6
        )
        solution = prune_weight(weight, hessian, sparsity=0.6, method="SS", block_size=block_size)
        assert torch.equal(solution.pruned, pruned)
        torch.testing.assert_close(solution.weight, expected, rtol=1e-8, atol=1e-10)


def test_a_fixed_mask_is_swept_too(problem, truth):
    weight, inputs = problem(rows=6, columns=32, dtype=torch.float64)
    hessian = truth.hessian_of(inputs)
    solution = prune_weight(weight, hessian, pattern="2:4", method="wanda+S")
    matrix = truth.damped(hessian)
    expected = weight.clone()
    for j in range(32):
        inverse = torch.linalg.inv(matrix[j:, j:])
        removed = torch.where(solution.pruned[:, j], expected[:, j], 0.0)
        expected[:, j:] -= removed[:, None] * inverse[0] / inverse[0, 0]
    expected[solution.pruned] = 0
    torch.testing.assert_close(solution.weight, expected, rtol=1e-8, atol=1e-10)
    wanda = prune_weight(weight, hessian, pattern="2:4", method="wanda")
    assert torch.equal(solution.pruned, wanda.pruned)


@pytest.fixture(scope="module")
def reference_problem():
    """The problem that the original code was given; see reference/make.py."""
    path = Path(__file__).parent / "reference" / "make.py"
    weight, inputs = runpy.run_path(str(path))["problem"]()
    assert weight.flatten()[:4].tolist() == pytest.approx(REFERENCE["weight_head"])
    assert inputs.flatten()[:4].tolist() == pytest.approx(REFERENCE["inputs_head"], rel=1e-4)
    accumulator = HessianAccumulator(128)
    accumulator.update(inputs)
    return weight, accumulator.hessian()


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: case["name"])
def test_it_reproduces_the_original_code(case, reference_problem):
    weight, hessian = reference_problem
    arguments = {key: case[key] for key in ("sparsity", "pattern") if case[key] is not None}
    solution = prune_weight(
        weight, hessian, method="SS", block_size=case["block_size"], **arguments
    )
    bits = f"{int(case['removed_bits'], 16):0{weight.numel()}b}"
    expected = torch.tensor([bit == "1" for bit in bits]).view_as(weight)
    assert int(expected.sum()) == case["num_removed"]
    assert torch.equal(solution.pruned, expected)
    assert solution.loss == pytest.approx(case["loss"], rel=1e-4)
