"""The codes and scales of a weight that lies on a grid, and what is nearest to other values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mrp_sparse.formats.grid import Grid


@dataclass(frozen=True, eq=False)
class Codes:
    """The scales of a weight on a grid, and the codes that it may have.

    Attributes:
        scales: (rows, columns), the same in each group.
        lowest: The lowest code, (rows, columns) or one number.
        highest: The highest code.
    """

    scales: Tensor
    lowest: Tensor
    highest: Tensor

    @classmethod
    def of(cls, weight: Tensor, grid: Grid) -> "Codes":
        """Find them. Zero is one of 2^bits codes, as in quantisation alone.

        A group that has the code of one end never gets that of the other.

        Args:
            weight: The weight, (rows, columns), which lies on the grid.
            grid: The grid.

        Raises:
            FormatError: The weight does not lie on the grid.
        """
        codes, scales = grid.decompose(weight)
        columns = weight.shape[1]
        highest = torch.full_like(scales, grid.largest)
        lowest = -highest
        if grid.bits < 8:
            reaches = grid.grouped(codes).amax(2) == grid.largest
            lowest, highest = lowest + reaches.float(), highest - (~reaches).float()

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(grid.group_size, 1)[:, :columns]

        return cls(spread(scales), spread(lowest), spread(highest))

    def nearest(self, weight: Tensor) -> Tensor:
        """The values of the grid that are nearest to a weight (rows, columns)."""
        codes = (weight / self.scales).round_()
        return codes.clamp_(self.lowest, self.highest).mul_(self.scales)
