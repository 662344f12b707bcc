"""The packed forms, against plain loops over the document's words and torch's own conversion.

Slices that are cut on a packed form equal packing the slice.
"""

import math
import struct
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mrp_lightning.errors import FormatError, PatternError
from mrp_lightning.solver import grid
from mrp_lightning.solver.grid import grid_of_bits
from mrp_sparse.formats import bitmask, bitmask4, slices
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.packed_format import PackedFormat
from mrp_sparse.formats.sparse24 import (
    SPARSE24,
    broken_groups,
    pack,
    positive_zeros,
    unpack,
    why_not_packable,
)

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Draw = Callable[..., Any]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


@st.composite
def weights24(draw: Draw) -> Tensor:
    """2:4 weights whose groups have up to two non-zeros, with infinities and negative zeros."""
    values = st.sampled_from([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), 6e-8])
    rows, pairs = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups = []
    for _ in range(rows * pairs * 2):
        group = [draw(st.sampled_from([0.0, -0.0])) for _ in range(4)]
        for column in draw(st.sampled_from(list(combinations(range(4), 2)))):
            group[column] = draw(values)
        groups.append(group)
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
    return torch.tensor(groups, dtype=torch.float64).to(dtype).view(rows, 8 * pairs)


@st.composite
def weights_of_any_bits(draw: Draw) -> Tensor:
    """NaN payloads and denormals among them, with empty and full rows."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    size = 8 * dtype.itemsize
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 37))
    word = st.integers(1, 2**size - 1)
    kinds = [st.just(0), word, st.one_of(st.just(0), word), st.sampled_from([0, 1 << size - 1])]
    drawn = []
    for _ in range(rows):
        kind = draw(st.sampled_from(kinds))
        drawn += draw(st.lists(kind, min_size=columns, max_size=columns))
    data = bytearray(struct.pack(f"<{len(drawn)}{ {16: 'H', 32: 'I'}[size] }", *drawn))
    return torch.frombuffer(data, dtype=dtype).view(rows, columns)


@st.composite
def weights_of_four_bits(draw: Draw) -> Tensor:
    """Weights on grids of all scales of five bits, with empty and full rows and groups."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float16]))
    rows, columns = draw(st.integers(1, 3)), draw(st.sampled_from([1, 7, 8, 63, 64, 65, 130]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    kept = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    codes = whole(-8, 8, rows, columns) * (torch.rand(rows, columns, generator=generator) < kept)
    groups = -(-columns // 64)
    scales = torch.ldexp(whole(16, 31, rows, groups).float(), whole(-12, -6, rows, groups))
    return (codes * scales.repeat_interleave(64, 1)[:, :columns]).to(dtype)


WEIGHTS = {
    SPARSE24: weights24(),
    BITMASK: weights_of_any_bits(),
    BITMASK4: weights_of_four_bits(),
}
of_any_format = st.sampled_from(list(WEIGHTS)).flatmap(
    lambda form: st.tuples(st.just(form), WEIGHTS[form])
)


@given(of_any_format)
def test_packing_loses_no_bit(case: tuple[PackedFormat, Tensor]) -> None:
    form, weight = case
    before, (rows, columns) = weight.clone(), weight.shape
    tensors = form.pack(weight)
    found = form.unpack(*tensors, columns)
    assert found.dtype == weight.dtype
    assert torch.equal(bits(found), bits(positive_zeros(weight)[0]))
    assert torch.equal(bits(weight), bits(before))
    assert form.damage(*tensors, columns) is None
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert form.num_bytes((rows, columns), weight.dtype, tensors[0].numel()) == sum(
        tensor.nbytes for tensor in tensors
    )


@given(weights_of_four_bits())
def test_a_plain_loop_reads_four_bits_as_documented(weight):
    nibbles, places, scales = bitmask4.pack(weight)
    rows, columns = weight.shape
    place, offsets = 0, []
    for row in range(rows):
        offsets.append(place)
        for group in range(scales.shape[1]):
            taken = 0
            for column in range(64 * group, min(64 * group + 64, columns)):
                value = 0.0
                if int(places[row, column // 8]) >> column % 8 & 1:
                    nibble = int(nibbles[place + taken // 2]) >> 4 * (taken % 2) & 15
                    value = (nibble - 8 if nibble < 8 else nibble - 7) * float(scales[row, group])
                    taken += 1
                assert float(weight[row, column]) == value
            if taken % 2:
                assert int(nibbles[place + taken // 2]) >> 4 == 0
            place += (taken + 1) // 2
    assert place == nibbles.numel() == bitmask4.count_bytes(weight)
    assert bitmask4.row_offsets(places).tolist() == offsets
    assert scales.dtype == weight.dtype


@given(weights_of_four_bits(), st.integers(0, 2**20), st.booleans())
def test_codes_and_scales_are_those_of_the_grid_on_which_pruning_puts_them(weight, seed, is_off):
    """Also of weights in float64, of NaN and of infinity, and where a group fits no scale."""
    generator = torch.Generator().manual_seed(seed)
    weight = weight.double() if seed % 4 == 0 else weight
    if is_off:
        row, column = (int(torch.randint(n, (), generator=generator)) for n in weight.shape)
        weight[row, column] = (0.3, math.nan, math.inf, 2.0**14)[seed % 4]
    results = []
    for decompose in (bitmask4.decompose, partial(grid.decompose, grid_of_bits(4, 64))):
        try:
            codes, scales = decompose(weight)
            results.append((codes.dtype, scales.dtype, codes.tolist(), scales.tolist()))
        except FormatError as error:
            results.append(str(error))
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_nibbles_are_those_of_torch(dtype):
    from torch.sparse._semi_structured_conversions import (
        _calculate_meta_reordering_scatter_offsets,
        sparse_semi_structured_from_dense_cutlass,
    )

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator).view(-1, 4)
    removed = torch.rand(weight.shape, generator=generator).argsort(-1)[:, :2]
    weight = weight.scatter(1, removed, 0.0).view(64, 128).to(dtype)
    values, meta = pack(weight)
    theirs, swizzled = sparse_semi_structured_from_dense_cutlass(weight)
    assert torch.equal(values, theirs)
    words = meta.view(torch.int16)
    offsets = _calculate_meta_reordering_scatter_offsets(
        *words.shape, torch.int16, torch.device("cpu")
    )
    ours = torch.empty(words.numel(), dtype=torch.int16)
    ours.scatter_(0, offsets, words.reshape(-1))
    assert torch.equal(ours, swizzled.view(-1))


@given(st.lists(st.sampled_from([0.0, -0.0, 3.0]), min_size=1, max_size=19))
def test_broken_groups_are_counted(row):
    groups = [row[start : start + 4] for start in range(0, len(row), 4)]
    expected = sum(sum(value != 0 for value in group) > 2 for group in groups)
    assert broken_groups(torch.tensor([row, [0.0] * len(row)])) == expected


def test_weights_without_the_form_are_refused():
    weight = torch.zeros(2, 16)
    weight[1, 4:7] = 1.0
    with pytest.raises(PatternError, match="not 2:4: 1 of 8 groups"):
        pack(weight)
    for shape in [(4, 12), (4, 0), (4,), (2, 4, 8)]:
        assert why_not_packable(shape) is not None
        with pytest.raises(PatternError, match="cannot be packed"):
            pack(torch.zeros(shape))
    for form in (BITMASK, BITMASK4):
        assert form.why_not((2, 3)) is None
        assert form.why_not((2, 3, 4)) is not None
        with pytest.raises(PatternError, match="3 dimensions"):
            form.pack(torch.zeros(2, 3, 4))
    weight = torch.ones(3, 130)
    weight[1, 70] = 0.15
    with pytest.raises(FormatError, match=r"Row 1, columns 64 to 127 \(group 1\)"):
        bitmask4.pack(weight)


def test_nan_counts_as_a_weight():
    weight = torch.tensor([[float("nan"), 0, 0, float("nan"), 0, 0, 0, 0]])
    assert torch.equal(bits(unpack(*pack(weight))), bits(weight))


def test_negative_zeros_are_counted():
    weight, count = positive_zeros(torch.tensor([[-0.0, 0.0, -1.0, -0.0]]))
    assert count == 2
    assert not weight[weight == 0].signbit().any()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_of_eight_bits_zeros_of_both_signs_are_removed_and_nan_is_kept(dtype):
    weight = torch.tensor([[0.0, -0.0, 1.5, -(2**-6), float("nan")]]).to(dtype)
    values, places = bitmask.pack(weight)
    assert places.tolist() == [[0b11100]]
    restored = bitmask.unpack(values, places, 5).float()
    assert torch.equal(restored.nan_to_num(9.0), torch.tensor([[0.0, 0.0, 1.5, -(2**-6), 9.0]]))


def test_a_scale_that_its_dtype_does_not_hold_is_refused():
    """Multiples of 2⁻²⁴: the products round to the weights, and the scale 2.375·2⁻²⁴ to another."""
    weight = torch.zeros(2, 70, dtype=torch.float16)
    weight[1, 64:67] = torch.tensor([12.0, 10.0, 7.0]) * 2.0**-24
    with pytest.raises(FormatError, match=r"Row 1, columns 64 to 69 \(group 1\): expected a scale"):
        bitmask4.pack(weight)
    weight[1, 64:67] = torch.tensor([12.0, 10.0, 6.0]) * 2.0**-24  # twice 6, 5 and 3
    assert torch.equal(bitmask4.unpack(*bitmask4.pack(weight), 70), weight)


@pytest.mark.parametrize(
    ("form", "sparsity", "part", "more"),
    [
        (SPARSE24, 0.5, 9 / 16, 0),
        (BITMASK, 0.5, 0.5625, 0),
        (BITMASK, 0.7, 0.3625, 0),
        (BITMASK, 0.8, 0.2625, 0),
        # groups of an odd number of codes end in half a byte
        (BITMASK4, 0.5, 3.25 / 16, 0.002),
        (BITMASK4, 0.7, 2.45 / 16, 0.002),
    ],
)
def test_sixteen_bit_weights_take_their_part(form, sparsity, part, more):
    weight = torch.ones(64, 640, dtype=torch.bfloat16)
    every = 4 if form is SPARSE24 else 10
    weight[:, torch.arange(640) % every < every * sparsity] = 0.0
    taken = sum(tensor.nbytes for tensor in form.pack(weight)) / weight.nbytes
    assert part <= taken <= part + more


def test_tensors_that_were_not_packed_together_are_found():
    meta = torch.tensor([[0x44, 0x04, 0x40, 0xEE, 0x14]], dtype=torch.uint8)
    # 0x0 twice and 0x1, whose first column is not the smaller
    assert str(SPARSE24.damage(meta, meta, 20)).startswith("3 of 10 nibbles")
    values, places = bitmask.pack(torch.ones(2, 11))
    fewer = str(bitmask.damage(values[1:], places, 11))
    assert "22 weights are marked as kept, and there are 21 values" in fewer
    assert "beyond its 10 columns" in str(bitmask.damage(values, places, 10))
    nibbles, places, scales = bitmask4.pack(torch.ones(2, 11))
    damage = bitmask4.damage
    assert "take 12 bytes, and there are 11" in str(damage(nibbles[1:], places, scales, 11))
    assert "beyond its 10 columns" in str(damage(nibbles, places, scales, 10))
    for wrong in (float("nan"), float("inf"), 3e38):
        spoilt = scales.clone()
        spoilt[1, 0] = wrong
        assert "1 scales are not finite" in str(damage(nibbles, places, spoilt, 11))
    assert "expected uint8" in str(damage(nibbles.float(), places, scales, 11))
    assert "no floating dtype" in str(damage(nibbles, places, scales.int(), 11))


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation gave, or selected by."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [result.nbytes] if isinstance(result, Tensor) else []
        if func is torch.ops.aten.index.Tensor:
            made += [16 * int(kept.sum()) for kept in args[1]]  # row and column, of 8 bytes each
        self.num_bytes = max([self.num_bytes, *made])
        return result


def test_nothing_larger_than_the_weight_is_made(monkeypatch):
    monkeypatch.setattr(bitmask, "_WEIGHTS_AT_A_TIME", 5000)  # four rows
    weight = (torch.randn(63, 1021) * (torch.rand(63, 1021) < 0.4)).bfloat16()
    with Largest() as packing:
        values, places = bitmask.pack(weight)
    assert packing.num_bytes <= weight.nbytes
    with Largest() as counting:
        offsets = bitmask.row_offsets(places)
    assert counting.num_bytes <= 4 * places.nbytes
    kept = weight != 0
    assert torch.equal(values, weight[kept])
    assert places.numpy().tobytes() == np.packbits(kept.numpy(), 1, bitorder="little").tobytes()
    assert torch.equal(offsets, kept.sum(1).cumsum(0) - kept.sum(1))


def test_many_rows_are_packed_some_at_a_time(monkeypatch):
    weight = torch.randint(-8, 9, (23, 200), generator=torch.Generator().manual_seed(0)).float()
    expected = bitmask4.pack(weight)
    monkeypatch.setattr(bitmask4, "_WEIGHTS_AT_A_TIME", 1000)
    for some, whole in zip(bitmask4.pack(weight), expected, strict=True):
        assert torch.equal(some, whole)


DOCUMENT = (Path(__file__).parents[2] / "mrp_sparse" / "FORMAT.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("form", "word", "columns"),
    [(SPARSE24, "numpy", 16), (BITMASK, "unpackbits", 13), (BITMASK4, "bits, scales", 130)],
)
def test_the_documented_numpy_reader_reads(form, word, columns):
    blocks = DOCUMENT.split("```python\n")[1:]
    scope: dict[str, Any] = {}
    exec(next(block.split("```")[0] for block in blocks if word in block), scope)
    weight = torch.zeros(3, columns)
    weight[:, [1, 3, 4, 10, columns - 1]] = torch.randint(1, 9, (3, 5)) * 0.25
    tensors = [tensor.numpy() for tensor in form.pack(weight)]
    sizes = () if form is SPARSE24 else (columns,)
    assert torch.equal(torch.from_numpy(scope["unpack"](*tensors, *sizes)), weight)


ROW = [0.0, 5.0, 0.0, -1.0, 0.0, 0.0, 2.0, 0.0]
CODED = [0.0, 2.0, 0.0, -0.5, 0.0, 0.0, 1.5, 0.0, -4.0]


@pytest.mark.parametrize(
    ("form", "dtype", "row", "starts"),
    [
        (SPARSE24, torch.float16, ROW, ("weight", "weight_meta")),
        (BITMASK, torch.float16, [*ROW, 3.0], ("values", "bits")),
        (BITMASK4, torch.bfloat16, CODED, ("codes", "places", "scales")),
    ],
)
def test_the_documented_example_holds(form, dtype, row, starts):
    assert str(row).replace(".0", "").replace("-", "−") in DOCUMENT
    lines = [line.replace(" ", "") for line in DOCUMENT.splitlines()]
    for tensor, start in zip(form.pack(torch.tensor([row], dtype=dtype)), starts, strict=True):
        size = 2 * tensor.element_size()
        words = (word & (16**size - 1) for word in bits(tensor).flatten().tolist())
        written = "".join(f"{word:0{size}x}" for word in words)
        assert any(written in line for line in lines if line.startswith(start)), written


@pytest.mark.parametrize("columns", [64, 200, 512])
def test_the_host_waits_for_no_value_while_unpacking(columns):
    """A CUDA graph cannot capture an operator whose result's size depends on values."""
    device = "cpu" if torch.version.cuda is None else "cuda"  # fake: no GPU is needed
    stored = bitmask4.pack(torch.randint(-8, 9, (24, columns)).bfloat16())
    with FakeTensorMode():
        stored = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in stored]
        unpacked = bitmask4.unpack(*stored, columns)
    assert unpacked.shape == (24, columns)
    assert unpacked.dtype == torch.bfloat16
    assert unpacked.device.type == device


every_form = pytest.mark.parametrize("form", WEIGHTS, ids=lambda form: form.option)


def random_weight(form, rows, columns, seed, kept=0.5):
    """A bfloat16 weight that the format holds, some of its rows empty."""
    random = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, columns, generator=random)
    if form is SPARSE24:
        groups = dense.view(rows, -1, 4)
        return (groups * (groups.abs() >= groups.abs().topk(2).values[..., 1:])).view(rows, columns)
    if form is BITMASK4:
        scales = 2.0 ** torch.randint(
            -6, -1, (rows, -(-columns // bitmask4.GROUP)), generator=random
        )
        codes = torch.randint(-8, 9, (rows, columns), generator=random)
        dense = codes * scales.repeat_interleave(bitmask4.GROUP, 1)[:, :columns]
    dense[torch.rand(rows, columns, generator=random) >= kept] = 0
    dense[torch.rand(rows, generator=random) < 0.2] = 0
    return dense


def same(tensors, others):
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


@every_form
@given(st.integers(1, 9), st.integers(1, 40), st.floats(0, 1), st.integers(0, 999), st.data())
def test_rows_are_those_of_the_dense_random_weight(form, rows, octets, kept, seed, data):
    dense = random_weight(form, rows, 8 * octets, seed, kept).bfloat16()
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    cut = slices.rows(form, form.pack(dense), begin, end)
    assert torch.equal(form.unpack(*cut, 8 * octets), dense[begin:end])
    assert form.damage(*cut, 8 * octets) is None


@every_form
@given(st.integers(1, 9), st.integers(1, 6), st.floats(0, 1), st.integers(0, 999), st.data())
def test_columns_are_packed_as_by_themselves(form, rows, units, kept, seed, data):
    size = slices.unit(form)
    extra = 8 * data.draw(st.integers(0, size // 8 - 1))
    dense = random_weight(form, rows, units * size + extra, seed, kept).bfloat16()
    begin = data.draw(st.integers(0, units - 1)) * size
    end = data.draw(st.sampled_from([*range(begin + size, units * size + 1, size), len(dense[0])]))
    cut = slices.columns(form, form.pack(dense), begin, end)
    assert torch.equal(form.unpack(*cut, end - begin), dense[:, begin:end])
    assert form.damage(*cut, end - begin) is None
    if form is not BITMASK4:  # a scale of fewer columns may be found smaller
        assert same(cut, form.pack(dense[:, begin:end]))


@every_form
def test_columns_are_cut_on_the_device_of_the_tensors(form, second):
    dense = random_weight(form, 5, 256, seed=3).bfloat16()
    cut = slices.columns(form, [tensor.to(second) for tensor in form.pack(dense)], 64, 128)
    assert torch.equal(form.unpack(*(tensor.cpu() for tensor in cut), 64), dense[:, 64:128])
