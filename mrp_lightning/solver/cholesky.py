"""Cholesky's factorisation of a large matrix."""

import torch
from torch import Tensor

from mrp_lightning.solver.ranges import split_range

_PANEL = 256
"""Columns that are factorised at a time on a CPU."""


def cholesky(matrix: Tensor) -> Tensor | None:
    """The lower triangular L with LLᵀ = A.

    On a CPU panel by panel: torch clears the upper half of its factor element by element against
    the order in memory, which takes longer than the factorisation itself where columns are many.

    Args:
        matrix: A, (columns, columns), symmetric.

    Returns:
        L, (columns, columns); `None` where A is not positive definite in its precision.
    """
    columns = len(matrix)
    if matrix.device.type != "cpu" or columns <= 3 * _PANEL:
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor if int(info) == 0 else None
    # Column after column, as torch's own factor lies and LAPACK takes it. The part right of and
    # below the panels so far holds what is left of A once they are taken off.
    factor = matrix.clone().T
    for start, stop in split_range(0, columns, _PANEL):
        panel, rest = slice(start, stop), slice(stop, columns)
        corner, info = torch.linalg.cholesky_ex(factor[panel, panel])
        if int(info) != 0:
            return None
        below = torch.linalg.solve_triangular(corner, factor[rest, panel].T, upper=False)
        factor[panel, panel], factor[panel, rest] = corner, 0
        factor[rest, panel] = below.T
        factor[rest, rest].addmm_(below.T, below, alpha=-1)
    return factor
