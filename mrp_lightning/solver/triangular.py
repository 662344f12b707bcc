"""The triangular factor of an inverse, and the inverse from it, in little time and memory."""

import torch
from torch import Tensor

from mrp_lightning.solver.arithmetic import split_range

_PANEL = 256
"""Columns that are factorised at a time on a CPU."""
_STRIP = 1024
"""Rows or columns of one product, which begins at the diagonal: what is zero beyond is left out."""
_MIRRORED = 512
"""Rows of a symmetric matrix that are computed at a time, from the diagonal on."""


def factor_of_inverse(matrix: Tensor) -> Tensor | None:
    """Return the upper triangular U with UᵀU = A⁻¹, or `None` if A is not positive definite.

    A = RRᵀ with R upper triangular, and U = R⁻¹: neither A⁻¹ is formed nor factorised again. Of A,
    (n, n), only the upper triangle is read. On a CPU, for n > 768, A is overwritten and U takes its
    memory.
    """
    columns = len(matrix)
    if matrix.device.type != "cpu" or columns <= 3 * _PANEL:
        # R is the lower Cholesky factor of A turned around, turned back.
        lower, info = torch.linalg.cholesky_ex(matrix.flip(0, 1))
        if int(info) != 0:
            return None
        identity = torch.eye(columns, dtype=matrix.dtype, device=matrix.device)
        return torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    # From the last panel to the first. The part above and left of the panel holds the remaining
    # Schur complement of A, the columns above later panels hold R, and all to the right of and
    # below the panel is a part of U. A Schur complement of A is positive definite if A is, so that
    # a corner that fails refuses A.
    for start, stop in reversed(list(split_range(0, columns, _PANEL))):
        panel = slice(start, stop)
        corner = factor_of_inverse(matrix[panel, panel])  # U_pp = R_pp⁻¹
        if corner is None:
            return None
        # R_<p = A_<p R_pp⁻ᵀ, and A_<< − R_<p R_<pᵀ is what remains.
        above = matrix[:start, panel] @ corner.T
        matrix[:start, panel] = above
        for first, last in split_range(0, start, _STRIP):
            rest = matrix[first:last, first:start]
            rest.addmm_(above[first:last], above[first:].T, alpha=-1)
        # U_p> = −U_pp R_p> U_>>, with U_>> upper triangular.
        right = corner @ matrix[panel, stop:]
        for first, last in split_range(stop, columns, _STRIP):
            product = right[:, : last - stop] @ matrix[stop:last, first:last]
            matrix[panel, first:last] = product.neg_()
        matrix[panel, panel], matrix[panel, :start] = corner, 0
    return matrix


def inverse_from(factor: Tensor) -> Tensor:
    """Return UᵀU for an upper triangular U (n, n), in the memory of U."""
    # [UᵀU]_ij sums over k ≤ min(i, j): row panels from the diagonal on take a sixth of the
    # multiplications of the whole product. No panel reads rows of U below its own, and so the last
    # one is the first to be replaced.
    for start, stop in reversed(list(split_range(0, len(factor), _MIRRORED))):
        panel = factor[:stop, start:stop].T @ factor[:stop, start:]
        factor[start:stop, start:] = panel
        factor[start:, start:stop] = panel.T
    return factor


def make_symmetric(matrix: Tensor) -> None:
    """Set A (n, n) to (A + Aᵀ) / 2, in place."""
    for start, stop in split_range(0, len(matrix), _MIRRORED):
        mean = (matrix[start:stop, start:] + matrix[start:, start:stop].T).mul_(0.5)
        matrix[start:stop, start:] = mean
        matrix[start:, start:stop] = mean.T
