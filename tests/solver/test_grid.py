"""The grid of few bits, against brute force in whole numbers and fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrp_lightning import prune_weight
from mrp_lightning.errors import FormatError, OptionError, PatternError
from mrp_lightning.solver.grid import GRIDS, GridParameters, decompose, fit_groups, grid_of_bits


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


NAMES = sorted(GRIDS)
STORED = sorted(name for name, g in GRIDS.items() if g.steps is None and not g.minimum)
"""Grids whose scales are stored as they are, and which values determine."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def product(codes, scales, grid):
    return codes.float() * grid.spread(scales, codes.shape[1])


@pytest.mark.parametrize("name", NAMES)
def test_nearest_is_the_nearest_of_all_codes(name):
    ratios = torch.linspace(-150, 150, 4001, dtype=torch.float64)
    codes = torch.tensor(GRIDS[name].codebook, dtype=torch.float64)
    best = (codes[:, None] - ratios).abs().min(0).values
    nearest = GRIDS[name].nearest_(ratios.clone())
    assert torch.isin(nearest, codes).all()
    assert torch.equal((nearest - ratios).abs(), best)


@pytest.mark.parametrize("name", STORED)
def test_scales_are_those_of_the_type(name):
    scales = torch.rand(500, generator=torch.Generator().manual_seed(0)).mul(30).sub(24).exp2()
    rounded = GRIDS[name].round_scales(-scales)
    if name.startswith("mxfp4"):
        assert torch.equal(torch.frexp(rounded).mantissa.abs(), torch.full_like(scales, 0.5))
    else:
        dtype = torch.bfloat16 if name.startswith("int") else torch.float16
        assert torch.equal(rounded, (-scales).to(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_weight_is_read_back(name, dtype, problem, truth):
    grid = GRIDS[name]
    weight, inputs = problem(24, 256 if name.endswith("_k") else 128)
    weight = (weight * 0.02).to(dtype)
    weight[3, : grid.group_size] = 0
    solution = prune_weight(weight, truth.hessian_of(inputs), grid=name)
    parameters = solution.grid_parameters
    if name not in STORED:  # values alone do not determine it
        assert not fit_groups(grid, solution.weight)[2].any()
        codes, scales = decompose(grid, solution.weight, parameters)
    else:
        codes, scales = decompose(grid, solution.weight)
        parameters = GridParameters(scales)
    stored = grid.grouped(codes.float())[scales != 0]
    assert torch.isin(stored, torch.tensor(grid.codebook)).all()
    assert torch.equal(grid.values(codes, parameters).to(dtype), solution.weight)
    units = grid.units(scales)
    if units is None:
        units, scales = torch.ones(()), scales[scales != 0]
        assert torch.equal(grid.round_scales(scales), scales)
    else:
        assert torch.equal(units.half().float(), units)
        assert torch.isin(scales / units, torch.arange(grid.steps[0], grid.steps[1] + 1)).all()


@given(st.sampled_from(STORED), st.sampled_from(DTYPES), st.integers(0, 2**20))
def test_any_codes_and_scales_are_read_back(name, dtype, seed):
    """Also scales that no search would choose, and those below float16's normal numbers."""
    grid, generator = GRIDS[name], torch.Generator().manual_seed(seed)
    picked = torch.randint(len(grid.codebook), (6, 2 * grid.group_size), generator=generator)
    codes = torch.tensor(grid.codebook)[picked]
    sizes = torch.rand(6, 2, generator=generator).mul(14).sub(18).exp2()
    signs = torch.randint(2, (6, 2), generator=generator) * 2 - 1
    weight = product(codes, grid.round_scales(sizes * signs), grid).to(dtype)
    assert torch.equal(product(*decompose(grid, weight), grid).to(dtype), weight)


@pytest.mark.parametrize("name", ["q4_0", "iq4_nl"])
def test_other_weights_are_refused_and_counted(name):
    grid = GRIDS[name]
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    weight[2, 32:] = torch.tensor(grid.codebook).repeat(2) * 0.5
    fits = fit_groups(grid, weight)[2]
    assert fits.tolist() == [[False, False], [False, False], [False, True], [False, False]]
    with pytest.raises(FormatError, match=f"Row 0, columns 0 to 31 .*{name}"):
        decompose(grid, weight)


def test_finer_types_lose_less_and_uneven_codes_fit_normal_weights_better(problem, truth):
    weight, inputs = problem(64, 256)
    hessian = truth.hessian_of(inputs)
    losses = {name: prune_weight(weight, hessian, grid=name).loss for name in NAMES}
    assert losses["q8_0"] < losses["q5_0"] < losses["iq4_nl"] < losses["q4_0"] < losses["mxfp4"]
    assert losses["mxfp4"] < losses["q3_k"]
    assert losses["q8_0"] < losses["q5_1"] < losses["q5_k"] < 0.9 * losses["q5_0"]
    assert losses["q4_1"] < losses["q4_k"] < 0.9 * losses["q4_0"]
    assert losses["q4_1"] < 0.95 * losses["iq4_nl"]
    assert losses["q3_k"] < 0.9 * prune_weight(weight, hessian, bits=3, group_size=32).loss
    # Scales of eleven significant bits fit better than those of five.
    assert losses["q4_0"] < prune_weight(weight, hessian, bits=4, group_size=32).loss


@pytest.mark.parametrize("setting", [{"pattern": "2:4"}, {"sparsity": 0.5}], ids=str)
def test_removed_weights_have_a_code_of_an_engine(setting, problem, truth):
    weight, inputs = problem(32, 128)
    weight, hessian = weight.bfloat16(), truth.hessian_of(inputs)
    options = {**setting, "bits": 4, "group_size": 32}
    free = prune_weight(weight, hessian, **options)
    coded = prune_weight(weight, hessian, **setting, grid="q4_0")
    assert torch.equal(coded.pruned, free.pruned)
    assert not coded.weight[coded.pruned].any()
    assert fit_groups(GRIDS["q4_0"], coded.weight)[2].all()
    assert not fit_groups(GRIDS["q4_0"], free.weight)[2].all()
    assert fit_groups(GRIDS["q5_0"], free.weight)[2].all()
    assert free.grid_loss < 1.3 * coded.grid_loss  # the type has one code less, finer scales


def test_grids_of_bits_fit_the_types_of_engines(problem, truth):
    weight, inputs = problem(32, 128)
    hessian = truth.hessian_of(inputs)
    for bits, names in {3: ["q4_0", "int4-g64"], 4: ["q4_0", "int4-g64"], 8: ["q8_0"]}.items():
        quantised = prune_weight(weight.bfloat16(), hessian, bits=bits).weight
        assert fit_groups(grid_of_bits(bits), quantised)[2].all()
        for name in names:
            assert fit_groups(GRIDS[name], quantised)[2].all(), (bits, name)


def test_arguments_that_contradict_a_grid_are_refused(problem, truth):
    weight, inputs = problem(4, 48)
    hessian = truth.hessian_of(inputs)
    with pytest.raises(OptionError, match="`grid` must be one of .*iq4_nl.*; got 'q2_k'"):
        prune_weight(weight, hessian, grid="q2_k")
    with pytest.raises(OptionError, match="`bits` 8 and `group_size` 16"):
        prune_weight(weight, hessian, grid="q4_0", bits=8, group_size=16)
    with pytest.raises(OptionError, match="no code for zero"):
        prune_weight(weight, hessian, grid="iq4_nl", sparsity=0.5)
    for name in ("q4_1", "q4_k", "q5_1", "q5_k"):
        with pytest.raises(OptionError, match="no code for zero.*q4_0.*leave out `sparsity`"):
            prune_weight(weight, hessian, grid=name, pattern="2:4")
    with pytest.raises(PatternError, match="48 columns do not split into groups of 32"):
        prune_weight(weight, hessian, grid="iq4_nl")
    with pytest.raises(PatternError, match="48 columns do not split into groups of 256"):
        prune_weight(weight, hessian, grid="q3_k")
    stated = prune_weight(weight[:, :32], hessian[:32, :32], grid="q4_0", bits=4, group_size=32)
    plain = prune_weight(weight[:, :32], hessian[:32, :32], grid="q4_0")
    assert torch.equal(stated.weight, plain.weight)
