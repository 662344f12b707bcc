"""The grid of few bits, against brute force in whole numbers and fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.solver.grid import decompose, grid_of_bits


def significant_bits(value):
    """The number of binary digits from the first to the last that is not zero."""
    if value == 0:
        return 0
    numerator = Fraction(value).numerator
    while numerator % 2 == 0:
        numerator //= 2
    return abs(numerator).bit_length()


def valid_scales(bits, values):
    """All scales of the grid on which these values lie, by trying every code for the largest."""
    largest, digits = {3: (4, 5), 4: (8, 5), 8: (127, 1)}[bits]
    values = [Fraction(v) for v in values]
    peak = max(abs(v) for v in values)
    tried = [peak / q for q in range(1, largest + 1)]
    exact = [
        s
        for s in tried
        if s.denominator & (s.denominator - 1) == 0 and significant_bits(s) <= digits
    ]
    return [s for s in exact if all((v / s).denominator == 1 for v in values)]


@st.composite
def weights_on_a_grid(draw):
    """A grid, codes and scales, of which a group may be all zeros and the last one short."""
    bits = draw(st.sampled_from([3, 4, 8]))
    grid = grid_of_bits(bits, draw(st.sampled_from([1, 3, 8, 64])))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    most = draw(st.integers(0, grid.largest))
    codes = torch.randint(-most, most + 1, (rows, columns), generator=generator)
    steps = 16 if bits < 8 else 1
    mantissas = torch.randint(steps, 2 * steps, (rows, grid.groups(columns)), generator=generator)
    exponents = torch.randint(-40, 20, mantissas.shape, generator=generator)
    return grid, codes, torch.ldexp(mantissas.float(), exponents)


@given(weights_on_a_grid())
def test_a_weight_on_the_grid_is_told_apart_exactly(drawn):
    grid, codes, scales = drawn
    columns = codes.shape[1]
    spread = scales.repeat_interleave(grid.group_size, 1)[:, :columns]
    weight = (codes * spread.double()).to(torch.bfloat16)
    assert torch.equal(weight.double(), codes * spread.double())  # bfloat16 holds all products
    found, factors = decompose(grid, weight)
    assert (found.dtype, factors.dtype) == (torch.int8, torch.float32)
    assert (found.shape, factors.shape) == (codes.shape, scales.shape)
    assert int(found.abs().max()) <= grid.largest
    factor = factors.repeat_interleave(grid.group_size, 1)[:, :columns]
    assert torch.equal(found * factor.double(), weight.double())
    for row in range(len(codes)):
        for group in range(factors.shape[1]):
            start = group * grid.group_size
            values = weight[row, start : start + grid.group_size].tolist()
            if any(values):
                assert factors[row, group] == float(max(valid_scales(grid.bits, values)))
            else:
                assert factors[row, group] == 1


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_random_values_are_on_the_grid_only_where_brute_force_finds_a_scale(bits):
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randint(-12, 13, (100, 3), generator=generator).to(torch.bfloat16)
    weight[0] = torch.tensor([1.0, 255, 254])  # eight significant bits
    outcomes = set()
    for row in weight:
        try:
            decompose(grid_of_bits(bits, 3), row[None])
            found = True
        except FormatError:
            found = False
        assert found == (not row.any() or bool(valid_scales(bits, row.tolist())))
        outcomes.add(found)
    assert outcomes == {True, False}


def test_the_error_names_row_and_group():
    weight = torch.ones(3, 10)
    weight[2, 9] = 1.001
    with pytest.raises(FormatError, match=r"Row 2, columns 8 to 9 \(group 2\)"):
        decompose(grid_of_bits(4, 4), weight)
    weight[2, 9] = torch.nan
    with pytest.raises(FormatError, match="Row 2"):
        decompose(grid_of_bits(4, 4), weight)
    weight[2, 9] = torch.inf
    with pytest.raises(FormatError, match="Row 2"):
        decompose(grid_of_bits(4, 4), weight)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_scales_are_rounded_to_the_nearest(bits):
    scales = torch.rand(200, generator=torch.Generator().manual_seed(0)).mul(40).exp2() * 2.0**-20
    digits = 1 if bits == 8 else 5
    for given_scale, found in zip(scales, grid_of_bits(bits).round_scales(scales), strict=True):
        assert significant_bits(found.item()) <= digits
        power = 2.0 ** (torch.frexp(given_scale).exponent.item() - digits)
        assert abs(found.item() - given_scale.item()) <= power / 2


def test_options_are_checked():
    assert grid_of_bits(np.int64(4), np.int64(64)) == grid_of_bits(4, 64)
    for bits in (2, 5, 16, 4.5, 4.0, True, "4", []):
        with pytest.raises(OptionError, match="`bits` must be 3, 4 or 8"):
            grid_of_bits(bits)
    for group in (0, -64, 1.5, None, True):
        with pytest.raises(OptionError, match="`group_size`"):
            grid_of_bits(4, group)
