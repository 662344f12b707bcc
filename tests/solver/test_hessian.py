import math

import numpy as np
import pytest
import torch

from mrp_lightning import HessianAccumulator, prune_weight
from mrp_lightning.errors import HessianError
from mrp_lightning.solver.hessian import factor_of_inverse, inverse_from, make_symmetric
from mrp_lightning.solver.problem import output_energy


def test_it_is_twice_the_mean_outer_product(problem, truth):
    _, inputs = problem()
    accumulator = HessianAccumulator(64)
    accumulator.update(inputs[:100].reshape(4, 25, 64))
    accumulator.update(inputs[100])
    accumulator.update(inputs[101:])
    assert accumulator.num_tokens == 256
    hessian = accumulator.hessian()
    assert hessian.dtype == torch.float32
    torch.testing.assert_close(hessian.double(), truth.hessian_of(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_floating_dtype_is_summed_in_float32(problem, truth, dtype, device):
    inputs = problem()[1].to(dtype)
    accumulator = HessianAccumulator(64)
    accumulator.update(inputs.to(device))
    hessian = accumulator.hessian()
    assert hessian.dtype == torch.float32
    assert hessian.device.type == device
    expected = truth.hessian_of(inputs)
    torch.testing.assert_close(hessian.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_wide_inputs_are_summed_as_exactly(truth, dtype):
    torch.manual_seed(0)
    inputs = torch.randn(700, 1100).to(dtype)
    accumulator = HessianAccumulator(1100)
    accumulator.update(inputs[:400])
    accumulator.update(inputs[400:])
    error = accumulator.hessian().double() - truth.hessian_of(inputs)
    # Sums of 700 products in float32; factors rounded to bfloat16 are off by more than 1e-3.
    assert error.abs().max() < 3e-6


def test_merging_equals_seeing_both(problem):
    _, inputs = problem()
    whole, first, second = (HessianAccumulator(64) for _ in range(3))
    whole.update(inputs)
    first.update(inputs[:50])
    second.update(inputs[50:])
    before = second.hessian()
    empty = HessianAccumulator(64)
    empty.merge(first)
    empty.merge(second)
    empty.merge(HessianAccumulator(64))
    assert empty.num_tokens == whole.num_tokens
    torch.testing.assert_close(empty.hessian(), whole.hessian())
    first.update(inputs)
    torch.testing.assert_close(empty.hessian(), whole.hessian())  # not tied to its sources
    assert torch.equal(second.hessian(), before)
    with pytest.raises(HessianError, match="32 columns into one of 64"):
        empty.merge(HessianAccumulator(32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_is_not_finite_is_refused_and_leaves_no_trace(problem, bad):
    _, inputs = problem()
    accumulator = HessianAccumulator(64, name="model.layers.3.q_proj")
    accumulator.update(inputs)
    before = accumulator.hessian()
    spoiled = inputs.clone()
    spoiled[7, 5] = bad
    with pytest.raises(HessianError, match=r"`model.layers.3.q_proj`: 1 of 64 input features"):
        accumulator.update(spoiled)
    assert accumulator.num_tokens == 256
    assert torch.equal(accumulator.hessian(), before)


@pytest.mark.parametrize("shape", [(3, 63), (), (64, 3)])
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(HessianError, match=r"shape \(\.\.\., 64\)"):
        HessianAccumulator(64).update(torch.zeros(shape))


def test_integers_are_refused():
    with pytest.raises(HessianError, match="int64"):
        HessianAccumulator(4).update(torch.ones(3, 4, dtype=torch.int64))


def test_inputs_without_values_are_refused():
    accumulator = HessianAccumulator(4, name="fc1")
    with pytest.raises(HessianError, match="`fc1`: the inputs are on the meta device"):
        accumulator.update(torch.ones(3, 4, device="meta"))
    assert accumulator.num_tokens == 0


def test_no_tokens_is_an_error():
    accumulator = HessianAccumulator(4, name="fc1")
    accumulator.update(torch.zeros(0, 4))
    with pytest.raises(HessianError, match="layer `fc1`: no calibration tokens"):
        accumulator.hessian()


def test_modes_of_the_caller_do_not_matter(problem, truth):
    _, inputs = problem()
    accumulator = HessianAccumulator(64)
    with torch.inference_mode():
        accumulator.update(inputs[:100] + 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        accumulator.update(inputs[100:].clone().requires_grad_())
    hessian = accumulator.hessian()
    assert not hessian.requires_grad
    assert not hessian.is_inference()
    torch.testing.assert_close(hessian.double(), truth.hessian_of(inputs), rtol=1e-5, atol=1e-5)


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


def positive_definite(columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(columns + 8, columns, generator=generator, dtype=torch.float64)
    x *= torch.logspace(0, -2, columns, dtype=torch.float64)  # a condition number of 1e4 and more
    matrix = x.T @ x / columns + 1e-5 * torch.eye(columns, dtype=torch.float64)
    return matrix.to(dtype)


# Up to 768 columns torch does it at once; beyond, in panels of 256, the last one of the rest, with
# products of 1024 columns at most.
COLUMNS = [1, 300, 768, 769, 1400]


@pytest.mark.parametrize("columns", COLUMNS)
def test_the_factor_is_that_of_numpys_inverse(columns):
    matrix = positive_definite(columns, torch.float64)
    # UᵀU = A⁻¹ with U upper triangular and a positive diagonal has one solution.
    expected = np.linalg.cholesky(np.linalg.inv(matrix.numpy())).T
    factor = factor_of_inverse(matrix)
    assert factor is not None
    np.testing.assert_allclose(factor.numpy(), expected, rtol=1e-7, atol=1e-7 * expected.max())
    assert (factor.numpy()[np.tril_indices(columns, -1)] == 0).all()


@pytest.mark.parametrize("columns", COLUMNS)
def test_only_the_upper_triangle_is_read(columns):
    matrix = positive_definite(columns, torch.float64)
    upper = matrix.triu() + torch.full_like(matrix, torch.nan).tril(-1)
    assert torch.equal(factor_of_inverse(upper), factor_of_inverse(matrix))


def test_float32_is_as_exact_in_panels_as_at_once():
    matrix = positive_definite(1000, torch.float32)
    whole = torch.linalg.cholesky(matrix.flip(0, 1)).flip(0, 1)
    at_once = torch.linalg.solve_triangular(whole, torch.eye(1000), upper=True)

    def error(factor: torch.Tensor) -> float:
        product = factor.double() @ matrix.double() @ factor.double().T
        return float((product - torch.eye(1000)).norm())

    factor = factor_of_inverse(matrix.clone())
    assert factor is not None
    assert error(factor) <= 2 * error(at_once)


def test_on_a_cpu_the_factor_takes_the_memory_of_the_matrix():
    matrix = positive_definite(900, torch.float64)
    factor = factor_of_inverse(matrix)
    assert factor is not None
    assert factor.data_ptr() == matrix.data_ptr()


@pytest.mark.parametrize("columns", [40, 1000])
@pytest.mark.parametrize("place", [0, -1])
def test_what_is_not_positive_definite_has_no_factor(columns, place):
    matrix = positive_definite(columns, torch.float64)
    for value in (-1e-3, torch.nan):
        changed = matrix.clone()
        changed[place, place] = value
        assert factor_of_inverse(changed) is None


@pytest.mark.parametrize("columns", [1, 512, 700])
def test_the_inverse_is_that_of_numpy(columns):
    matrix = positive_definite(columns, torch.float64)
    expected = np.linalg.inv(matrix.numpy())
    factor = factor_of_inverse(matrix)
    assert factor is not None
    inverse = inverse_from(factor)
    assert inverse.data_ptr() == factor.data_ptr()
    np.testing.assert_allclose(inverse.numpy(), expected, rtol=1e-7, atol=1e-7 * expected.max())


@pytest.mark.parametrize("columns", [1, 512, 700])
def test_the_symmetric_part_is_made_in_place(columns):
    matrix = torch.randn(columns, columns, generator=torch.Generator().manual_seed(0))
    expected = (matrix + matrix.T) / 2
    make_symmetric(matrix)
    assert torch.equal(matrix, expected)
