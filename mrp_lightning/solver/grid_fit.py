"""Find the codes and scales of weights that lie on a grid."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mrp_lightning.errors import FormatError
from mrp_lightning.solver.grid import Grid, GridParameters, row_ranges


def decompose(
    grid: Grid, weight: Tensor, known: GridParameters | None = None
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a weight that lies on a grid.

    Each weight is code·scale, rounded to the weight's dtype. Of several possible scales that of the
    smallest codes is taken, for grids with a name that of the largest. A group of zeros has the
    scale 1, or 0 if no code is zero.

    Args:
        grid: The grid.
        weight: (rows, columns), floating point; with `steps`, in whole units (see `Grid.divides`).
        known: The parameters with which the weight was made, if they are known. They are used if
            they give its values; see `Grid.codes_of`.

    Returns:
        The codes, int8 (rows, columns), and the scales, float32 (rows, groups).

    Raises:
        FormatError: Some group of a row has no such scale, or the grid has minima or units and they
            are not `known`; the message names the first group.
    """
    codes, scales, fits = fit_groups(grid, weight, known)
    if not bool(fits.all()):
        row, group = (~fits).nonzero()[0].tolist()
        start = group * grid.group_size
        stop = min(start + grid.group_size, weight.shape[1])
        of_type = "" if grid.name is None else f" of the type {grid.name}"
        raise FormatError(
            f"Row {row}, columns {start} to {stop - 1} (group {group}): no scale makes these "
            f"weights codes{of_type} from {grid.codebook[0]} to {grid.codebook[-1]}, as "
            f"{grid.bits} bits with groups of {grid.group_size} need. The weight was changed after "
            "it was put on its grid, or is on another one: give its `bits` and `group_size`, or "
            "its `grid`."
        )
    return codes, scales


def fit_groups(
    grid: Grid, weight: Tensor, known: GridParameters | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales as `decompose` does, and the groups that lie on the grid.

    Returns:
        The codes, int8 (rows, columns), the scales, float32 (rows, groups), and bool
        (rows, groups), True for the groups whose codes and scales give the weight exactly. Codes
        and scales of the others mean nothing. Values alone do not determine minima and units, so
        that no group of a grid with these fits without `known` parameters.
    """
    rows, columns = weight.shape
    scales = torch.ones(rows, grid.groups(columns), device=weight.device)
    fits = torch.ones(scales.shape, dtype=torch.bool, device=weight.device)
    if known is not None and (known_codes := grid.codes_of(weight, known)) is not None:
        return known_codes, known.scales.to(scales), fits
    codes = torch.zeros(rows, columns, dtype=torch.int8, device=weight.device)
    if grid.needs_parameters:
        return codes, scales, ~fits
    for some in row_ranges(rows, columns):
        share = weight[some].detach()
        values = grid.grouped(share.to(torch.promote_types(weight.dtype, torch.float32)))
        peaks = values.gather(2, values.abs().argmax(2, keepdim=True))[..., 0]
        chosen, factors, fits[some] = _fit_scales(grid, values, peaks, weight.dtype)
        codes[some] = chosen.flatten(1)[:, :columns].to(torch.int8)
        scales[some] = factors.float()
    return codes, scales, fits


def _fit_scales(
    grid: Grid, values: Tensor, peaks: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Fit groups whose scales are stored as they are.

    Args:
        grid: The grid, without `steps`.
        values: The weights, (rows, groups, group_size), in at least float32.
        peaks: The largest weight of each group, with its sign, (rows, groups).
        dtype: The dtype to which code·scale is rounded.

    Returns:
        The codes (rows, groups, group_size), the scales (rows, groups), and bool (rows, groups),
        True for the groups that fit.
    """
    if not grid.signed:
        peaks = peaks.abs()
    zero = peaks == 0
    codes, waiting = torch.zeros_like(values), ~zero  # NaN waits, too, and never fits
    # Without a code for zero, a group of zeros has the scale zero.
    scales = torch.ones_like(peaks) if grid.holds_zero else (~zero).to(peaks.dtype)
    # 1. The largest weight gives the candidates: each code leaves few scales for it.
    # 2. Whether a candidate gives the largest weight is a test of one number per group; only the
    #    groups that pass are rounded in full.
    # 3. Solved groups take no other candidate: the order of these decides between several.
    for code, scale in _candidates(grid, peaks, dtype):
        possible = waiting & ((code * scale).to(dtype) == peaks)
        chosen, factors = values[possible], scale[possible][:, None]
        if not len(chosen):
            continue
        targets, chosen = chosen, grid.nearest(chosen / factors)
        fitting = ((chosen * factors).to(dtype) == targets).all(1)
        solved = possible.masked_scatter(possible, fitting)
        codes[solved], scales[solved] = chosen[fitting], factors[fitting, 0]
        waiting &= ~solved
        if not bool(waiting.any()):
            break
    return codes, scales, ~waiting


def _candidates(grid: Grid, peaks: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """Yield codes of the largest weights of groups, and scales that may give these weights."""
    # A weight in `dtype` bounds its scale to within half a unit in the last place. That is one
    # scale if products are exact, and else some neighbours.
    odd_parts = [code // (code & -code) for code in grid.codebook if code]
    products = grid.scales.significant + max(map(abs, odd_parts)).bit_length()
    span = 0 if products <= _significant_bits(dtype) else _span(grid, dtype)
    # Packed formats store the smallest codes; solvers choose scales that reach the largest.
    codes = sorted(grid.codebook, key=abs, reverse=grid.name is not None)
    for code in codes:
        if code == 0 or (code < 0 and not grid.signed):
            continue
        centre = grid.round_scales(peaks / code)
        for steps in _nearest_first(span):
            yield code, grid.scales.shift(centre.abs(), steps).copysign(centre)


def _span(grid: Grid, dtype: torch.dtype) -> int:
    """Return the number of neighbours of a scale, on each side, that rounding leaves possible."""
    return 1 + (1 << max(0, grid.scales.significant - _significant_bits(dtype)))


def _nearest_first(span: int) -> list[int]:
    """Return the whole numbers from −span to span, the nearest to zero first."""
    return sorted(range(-span, span + 1), key=abs)


def _significant_bits(dtype: torch.dtype) -> int:
    return 1 - int(math.log2(torch.finfo(dtype).eps))
