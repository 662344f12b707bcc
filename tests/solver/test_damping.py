import numpy as np
import pytest
import torch

from mrp_lightning.solver.hessian import cholesky


def positive_definite(columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(columns + 8, columns, generator=generator, dtype=torch.float64)
    x *= torch.logspace(0, -2, columns, dtype=torch.float64)  # a condition number of 1e4 and more
    matrix = x.T @ x / columns + 1e-5 * torch.eye(columns, dtype=torch.float64)
    return matrix.to(dtype)


# Up to 768 columns torch does it at once; beyond, in panels of 256, the last one of the rest.
@pytest.mark.parametrize("columns", [1, 300, 768, 769, 1024, 1100])
def test_the_factor_is_that_of_numpy_in_float64(columns):
    matrix = positive_definite(columns, torch.float64)
    expected = np.linalg.cholesky(matrix.numpy())
    factor = cholesky(matrix)
    assert factor is not None
    np.testing.assert_allclose(factor.numpy(), expected, rtol=1e-9, atol=1e-9)
    assert (factor.numpy()[np.triu_indices(columns, 1)] == 0).all()


def test_float32_is_as_exact_in_panels_as_at_once():
    matrix = positive_definite(1000, torch.float32)

    def error(factor: torch.Tensor) -> float:
        return float((factor.double() @ factor.double().T - matrix).norm() / matrix.norm())

    factor = cholesky(matrix)
    assert factor is not None
    assert error(factor) <= 2 * error(torch.linalg.cholesky(matrix))


def test_the_matrix_stays_as_it_was():
    matrix = positive_definite(900, torch.float64)
    before = matrix.clone()
    cholesky(matrix)
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("columns", [40, 1000])
@pytest.mark.parametrize("place", [0, -1])
def test_what_is_not_positive_definite_has_no_factor(columns, place):
    matrix = positive_definite(columns, torch.float64)
    matrix[place, place] = -1e-3
    assert cholesky(matrix) is None
    matrix[place, place] = torch.nan
    assert cholesky(matrix) is None
