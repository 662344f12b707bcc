"""Products in tiles (AMX) against float64; CPUs without them emulate their instructions."""

from ctypes import CDLL, c_int64, c_void_p

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrp_sparse.formats import bitmask, bitmask4, eight_bit, sparse24
from mrp_sparse.kernels import library

from .conftest import HAS_TILES, TILES, VECTORS, keep_two_of_four, needs_vectors, onto_grid

BEST = 0
BFLOAT16, SIGNED, SIGNED_UNSIGNED, UNSIGNED_SIGNED, UNSIGNED = range(5)
"""The instructions of `multiply` in emulated_tiles.cpp."""
BYTES = {
    SIGNED: (torch.int8, torch.int8),
    SIGNED_UNSIGNED: (torch.int8, torch.uint8),
    UNSIGNED_SIGNED: (torch.uint8, torch.int8),
    UNSIGNED: (torch.uint8, torch.uint8),
}
quick = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
sides = st.integers(1, 16)
seeds = st.integers(0, 999)


# ---- The emulated instructions, by the compiler's own names of them ----


def in_tiles(tiles: CDLL, which: int, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """c (rows, columns) + a (rows, depth) times b (depth, columns), by an instruction."""
    packed = 2 if which == BFLOAT16 else 4
    turned = b.view(-1, packed, b.shape[1]).transpose(1, 2).contiguous()
    result = c.clone()
    sizes = map(c_int64, (which, len(a), len(turned), b.shape[1]))
    tiles.multiply(*sizes, *(c_void_p(t.data_ptr()) for t in (a.contiguous(), turned, result)))
    return result


@given(sides, sides, sides, st.sampled_from(list(BYTES)), seeds)
@quick
def test_instructions_of_integers_are_the_formula(tiles, rows, depth, columns, which, seed):
    random = torch.Generator().manual_seed(seed)

    def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
        kind = torch.iinfo(dtype)
        return torch.randint(kind.min, kind.max + 1, shape, generator=random).to(dtype)

    of_rows, of_columns = BYTES[which]
    a, b = drawn(of_rows, rows, 4 * depth), drawn(of_columns, 4 * depth, columns)
    c = drawn(torch.int16, rows, columns).int()
    assert torch.equal(in_tiles(tiles, which, a, b, c).long(), c + a.long() @ b.long())


@given(sides, sides, sides, seeds)
@quick
def test_the_instruction_of_bfloat16_is_the_formula(tiles, rows, depth, columns, seed):
    """Whole numbers, of which all sums are exact."""
    random = torch.Generator().manual_seed(seed)
    shapes = (rows, 2 * depth), (2 * depth, columns), (rows, columns)
    a, b, c = (torch.randint(-99, 100, shape, generator=random).float() for shape in shapes)
    assert torch.equal(in_tiles(tiles, BFLOAT16, a.bfloat16(), b.bfloat16(), c), c + a @ b)


def test_the_instruction_of_bfloat16_rounds_in_the_order_of_the_manual(tiles):
    def summed(terms: list[float], before: float, factor: float = 1.0) -> float:
        a = torch.tensor([terms]).bfloat16()
        b = torch.full((len(terms), 1), factor).bfloat16()
        return in_tiles(tiles, BFLOAT16, a, b, torch.tensor([[before]])).item()

    large, odd, least = 2.0**24, 0.0, 2.0**-126
    assert summed([large, odd, 1.0, odd, -large, odd], 0.0) == 0.0
    assert summed([odd, large, odd, 1.0, odd, -large], 0.0) == 0.0
    assert summed([large, 1.0, -large, odd], 0.0) == 1.0  # even and odd columns have their own sums
    assert summed([1.0, 1.0], large) == large + 2  # which are added before that of before
    assert summed([3.0, odd], large) == large + 4  # a tie, to even
    assert summed([1.0 + 2.0**-7, odd, -1.0, odd], 0.0, 1.0 + 2.0**-7) == pytest.approx(
        (1 + 2.0**-7) ** 2 - (1 + 2.0**-7), rel=1e-7
    )
    for denormal in (2.0**-127, -(2.0**-133)):
        assert summed([denormal, 1.0], 1.0, 2.0**100) == 1.0 + 2.0**100
    assert summed([2.0**-64, odd], 0.0, 2.0**-63) == 0.0  # a denormal product
    assert summed([odd, odd], least / 2) == 0.0  # a denormal sum before
    assert summed([2.0**-63, odd], least, -(2.0**-63)) == 0.0
    assert summed([2.0**-62, odd], least, 2.0**-63) == 3 * least
    assert summed([float("inf"), -float("inf")], 0.0) != summed([odd, odd], 0.0)


# ---- The kernels ----


def pruned(rows: int, columns: int, kept: float, random: torch.Generator) -> Tensor:
    weight = torch.randn(rows, columns, generator=random)
    weight[torch.rand(rows, columns, generator=random) >= kept] = 0.0
    return weight


def products(
    x: Tensor, weight: Tensor, bias: Tensor | None, way: int = TILES
) -> dict[str, tuple[Tensor, Tensor]]:
    """What each format's operator computes, with the weight that it stores in float64."""
    if not library.load():
        pytest.skip("needs a C++ compiler")
    operator = torch.ops.mrp_lightning_cpu
    found = {}
    values, bits = bitmask.pack(weight.bfloat16())
    offsets = bitmask.row_offsets(bits)
    product = operator.linear_bitmask(x, values, bits, offsets, bias, way)
    found["bits"] = product, weight.bfloat16().double()
    coded = onto_grid(weight).bfloat16()
    packed = bitmask4.pack(coded)
    starts = bitmask4.row_offsets(packed[1])
    product = operator.linear_bitmask4(x, *packed, starts, bias, False, way)
    found["four bits"] = product, coded.double()
    if weight.shape[1] % 8 == 0:
        some = keep_two_of_four(weight).bfloat16()
        product = operator.linear24(x, *sparse24.pack(some), bias, way)
        found["2:4"] = product, some.double()
    numbers, scales = eight_bit.pack(weight.bfloat16())
    product = operator.linear8(x, numbers, scales, bias, way)
    found["eight bits"] = product, numbers.double() * scales.double()[:, None]
    return found


def assert_rounded_sums(found: Tensor, weight: Tensor, x: Tensor, bias: Tensor | None) -> None:
    """Rounding of the result, and of each of the sums, in any order: nothing is lost."""
    exact = torch.nn.functional.linear(x.double(), weight, None if bias is None else bias.double())
    size = x.double().abs() @ weight.abs().T + (0.0 if bias is None else bias.double().abs())
    steps = -(-x.shape[1] // 32)
    sums = (steps + 16 + 4) * torch.finfo(torch.float32).eps / 2 * size
    bound = torch.finfo(torch.bfloat16).eps / 2 * (exact.abs() + sums) + sums + 2.0**-120
    assert bool(((found.double() - exact).abs() <= bound).all())


@needs_vectors
@given(
    st.integers(1, 70) | st.sampled_from([128, 200, 300]),
    st.integers(1, 140),
    st.integers(1, 1200),
    st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    seeds,
)
@quick
def test_products_of_every_format_have_the_error_of_float32(
    tiles, tokens, rows, columns, kept, seed
):
    random = torch.Generator().manual_seed(seed)
    columns -= columns % 8 if seed % 2 else 0
    columns = max(columns, 1)
    weight = pruned(rows, columns, kept, random)
    x = torch.randn(tokens, columns, generator=random).bfloat16()
    bias = torch.randn(rows, generator=random).bfloat16() if seed % 3 else None
    before = tiles.instructions()
    for product, stored in products(x, weight, bias).values():
        assert_rounded_sums(product, stored, x, bias)
    assert (tiles.instructions() == before) is HAS_TILES


@needs_vectors
@pytest.mark.parametrize("columns", [4160, 9000])
def test_wide_rows_are_multiplied_in_lower_panels(tiles, columns):
    random = torch.Generator().manual_seed(0)
    weight = pruned(97, columns, 0.5, random)
    x = torch.randn(19, columns, generator=random).bfloat16()
    for product, stored in products(x, weight, None).values():
        assert_rounded_sums(product, stored, x, None)


@needs_vectors
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("eight_bits", [False, True])
def test_each_thread_has_tiles_of_its_own(eight_bits):
    random = torch.Generator().manual_seed(0)
    weight = onto_grid(pruned(600, 512, 0.5, random)).bfloat16()
    x = torch.randn(40, 512, generator=random).bfloat16()
    packed = bitmask4.pack(weight)
    arguments = x, *packed, bitmask4.row_offsets(packed[1]), None, eight_bits, TILES
    assert library.load()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.ops.mrp_lightning_cpu.linear_bitmask4(*arguments)
        torch.set_num_threads(3)
        assert torch.equal(torch.ops.mrp_lightning_cpu.linear_bitmask4(*arguments), alone)
    finally:
        torch.set_num_threads(before)


@needs_vectors
@pytest.mark.parametrize("eight_bits", [False, True])
def test_a_refusal_in_the_midst_of_a_product_releases_them(tiles, eight_bits):
    """Of damaged nibbles, which the last row lacks. The fixture counts threads that hold tiles."""
    weight = onto_grid(torch.ones(70, 1500)).bfloat16()
    nibbles, bits, scales = bitmask4.pack(weight)
    offsets = bitmask4.row_offsets(bits)
    x = torch.ones(20, 1500).bfloat16()
    before = tiles.instructions()
    with pytest.raises(RuntimeError, match="marks more values as kept than it has"):
        torch.ops.mrp_lightning_cpu.linear_bitmask4(
            x, nibbles[:-1], bits, scales, offsets, None, eight_bits, TILES
        )
    assert (tiles.instructions() == before) is HAS_TILES


@needs_vectors
def test_denormal_numbers_are_zeros(tiles):
    """As in products by vectors: `vdpbf16ps` and `tdpbf16ps` flush them."""
    x = torch.full((16, 64), 2.0**-130).bfloat16()
    for way in (VECTORS, TILES):
        for product, _ in products(x, torch.full((16, 64), 2.0**20), None, way).values():
            assert not product.any()


@needs_vectors
@pytest.mark.parametrize("tokens", [1, 7, 8, 40])
def test_they_are_taken_from_eight_tokens_on_by_a_cpu_that_has_them(tiles, tokens):
    """The sums of both ways have other orders, and so other bits."""
    random = torch.Generator().manual_seed(0)
    weight = pruned(64, 1024, 0.5, random)
    x = torch.randn(tokens, 1024, generator=random).bfloat16()
    vectors, by_tiles = (products(x, weight, None, way) for way in (VECTORS, TILES))
    before = tiles.instructions()
    best = products(x, weight, None, BEST)
    assert tiles.instructions() == before
    expected = by_tiles if HAS_TILES and tokens >= 8 else vectors
    assert all(torch.equal(best[name][0], expected[name][0]) for name in best)
    differ = [name for name in best if not torch.equal(vectors[name][0], by_tiles[name][0])]
    assert differ or tokens < 40
