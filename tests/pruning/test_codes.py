"""Weights that stay on their grid while they are tuned, against all values of their group."""

import pytest
import torch

from mrp_lightning.pruning.block_tuner import Codes
from mrp_sparse.formats.grid import grid_of_bits


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_nearest_is_the_nearest_of_all_values(bits):
    generator = torch.Generator().manual_seed(bits)
    grid = grid_of_bits(bits, 8, zero_has_a_code=True)
    lowest, highest = -grid.codebook[0], grid.codebook[-1]
    codes = torch.randint(-lowest, highest + 1, (5, 20), generator=generator)
    codes[:, ::8], codes[:, 1::8] = -lowest, 1  # so that no larger scale would do
    signs = torch.tensor([1, -1, 1, -1, 1])[:, None]
    scales = grid.round_scales(torch.rand(5, 3, generator=generator) + 0.5)
    spread = scales.repeat_interleave(8, 1)[:, :20]
    found = Codes.of((codes * signs * spread).bfloat16(), grid)
    values = 3 * grid.largest * torch.randn(5, 20, generator=generator) * spread / 2
    nearest = found.nearest(values)
    for row in range(5):
        allowed = signs[row] * torch.arange(-lowest, highest + 1)
        for column in range(20):
            points = allowed * spread[row, column]
            best = (points - values[row, column]).abs().min()
            assert (nearest[row, column] - values[row, column]).abs() <= best * (1 + 1e-6)
            assert nearest[row, column] in points


def test_values_on_the_grid_stay():
    codes = torch.randint(-8, 8, (4, 64), generator=torch.Generator().manual_seed(0))
    weight = codes * torch.tensor([0.5, 0.75, 1.0, 1.25])[:, None]
    found = Codes.of(weight, grid_of_bits(4, 16, zero_has_a_code=True))
    assert torch.equal(found.nearest(weight), weight)
