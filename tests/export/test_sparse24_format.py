"""The packed form, against brute force and against torch's own 2:4 conversion."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrp_lightning.errors import PatternError
from mrp_sparse.formats.sparse24 import (
    broken_groups,
    invalid_nibbles,
    pack,
    positive_zeros,
    unpack,
    why_not_packable,
)

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
VALUES = [0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), 6e-8]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """2:4 weights whose groups have up to two non-zeros, with infinities and negative zeros."""
    rows, pairs = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    groups = []
    for _ in range(rows * pairs * 2):
        group = [draw(st.sampled_from([0.0, -0.0])) for _ in range(4)]
        for column in draw(st.sampled_from(list(combinations(range(4), 2)))):
            group[column] = draw(st.sampled_from(VALUES))
        groups.append(group)
    dtype = draw(st.sampled_from(DTYPES))
    return torch.tensor(groups, dtype=torch.float64).to(dtype).view(rows, 8 * pairs)


patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Drawing a weight value by value takes long where other work runs on the same machine."""


@patient
@given(weights())
def test_packing_loses_no_bit(weight):
    before = weight.clone()
    values, meta = pack(weight)
    rows, columns = weight.shape
    assert values.shape == (rows, columns // 2)
    assert values.dtype == weight.dtype
    assert meta.shape == (rows, columns // 8)
    assert meta.dtype == torch.uint8
    assert values.is_contiguous()
    assert meta.is_contiguous()
    canonical, _ = positive_zeros(weight)
    assert torch.equal(bits(unpack(values, meta)), bits(canonical))
    assert torch.equal(bits(weight), bits(before))
    assert not invalid_nibbles(meta)


@patient
@given(weights())
def test_a_plain_loop_reads_the_format_as_documented(weight):
    values, meta = pack(weight)
    read = torch.zeros_like(weight)
    for row in range(weight.shape[0]):
        for group in range(weight.shape[1] // 4):
            nibble = int(meta[row, group // 2]) >> 4 * (group % 2) & 15
            first, second = nibble & 3, nibble >> 2
            assert first < second
            read[row, 4 * group + first] = values[row, 2 * group]
            read[row, 4 * group + second] = values[row, 2 * group + 1]
    assert torch.equal(bits(read), bits(positive_zeros(weight)[0]))


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


def test_a_weight_that_is_not_2_of_4_is_refused():
    weight = torch.zeros(2, 16)
    weight[1, 4:7] = 1.0
    with pytest.raises(PatternError, match="not 2:4: 1 of 8 groups"):
        pack(weight)


@pytest.mark.parametrize("shape", [(4, 12), (4, 0), (4,), (2, 4, 8)])
def test_a_shape_without_packed_form_is_refused(shape):
    assert why_not_packable(shape) is not None
    with pytest.raises(PatternError, match="cannot be packed"):
        pack(torch.zeros(shape))


def test_nan_counts_as_a_weight():
    weight = torch.tensor([[float("nan"), 0, 0, float("nan"), 0, 0, 0, 0]])
    assert torch.equal(bits(unpack(*pack(weight))), bits(weight))


def test_negative_zeros_are_counted():
    weight, count = positive_zeros(torch.tensor([[-0.0, 0.0, -1.0, -0.0]]))
    assert count == 2
    assert not weight[weight == 0].signbit().any()


def test_sixteen_bit_weights_take_nine_sixteenths():
    values, meta = pack(torch.zeros(32, 64, dtype=torch.bfloat16))
    assert (values.nbytes + meta.nbytes) / (32 * 64 * 2) == 0.5625


def test_nibbles_that_name_no_pair_are_found():
    meta = torch.tensor([[0x44, 0x04, 0x40, 0xEE, 0x14]], dtype=torch.uint8)
    assert invalid_nibbles(meta) == 3  # 0x0 twice and 0x1, whose first column is not the smaller


DOCUMENT = Path(__file__).parents[2] / "mrp_sparse" / "FORMAT.md"


def test_the_documented_example_holds():
    row = [0.0, 5.0, 0.0, -1.0, 0.0, 0.0, 2.0, 0.0]
    values, meta = pack(torch.tensor([row], dtype=torch.float16))
    text = DOCUMENT.read_text()
    assert str(row).replace(".0", "").replace("-", "−") in text
    shown = {line.split()[0]: line for line in text.splitlines() if line.startswith("weight")}
    words = " ".join(f"{word & 0xFFFF:04x}" for word in bits(values).flatten().tolist())
    assert words in shown["weight"].replace("  ", "|").replace(" ", "").replace("|", " ")
    assert f" {meta.item():02x} " in shown["weight_meta"]


def test_the_documented_numpy_reader_reads():
    blocks = DOCUMENT.read_text().split("```python\n")[1:]
    code = next(block.split("```")[0] for block in blocks if "numpy" in block)
    scope: dict[str, Any] = {}
    exec(code, scope)
    weight = torch.zeros(3, 16)
    weight[:, [1, 3, 4, 10, 15]] = torch.randn(3, 5)
    values, meta = pack(weight)
    assert torch.equal(torch.from_numpy(scope["unpack"](values.numpy(), meta.numpy())), weight)
