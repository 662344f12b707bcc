import numpy as np
import pytest
import torch

from mrp_lightning.solver.hessian import factor_of_inverse, inverse_from, make_symmetric


def positive_definite(columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(columns + 8, columns, generator=generator, dtype=torch.float64)
    x *= torch.logspace(0, -2, columns, dtype=torch.float64)  # a condition number of 1e4 and more
    matrix = x.T @ x / columns + 1e-5 * torch.eye(columns, dtype=torch.float64)
    return matrix.to(dtype)


# Up to 768 columns torch does it at once; beyond, in panels of 256, the last one of the rest, with
# products of 1024 columns at most.
COLUMNS = [1, 300, 768, 769, 1024, 1100, 2100]


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
