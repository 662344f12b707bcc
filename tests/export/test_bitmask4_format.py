"""The form of four bits, against a plain loop over the document's words."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from mrp_lightning.errors import FormatError, PatternError
from mrp_lightning.solver.grid import grid_of_bits
from mrp_sparse.formats import bitmask4
from mrp_sparse.formats.bitmask4 import (
    BITMASK4,
    count_bytes,
    damage,
    pack,
    packed_bytes,
    row_offsets,
    unpack,
)

DOCUMENT = Path(__file__).parents[2] / "mrp_sparse" / "FORMAT.md"


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
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


patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@patient
@given(weights(), st.integers(0, 2**20), st.booleans())
def test_codes_and_scales_are_those_of_the_grid_on_which_pruning_puts_them(weight, seed, is_off):
    """Also of weights in float64, of NaN and of infinity, and where a group fits no scale."""
    generator = torch.Generator().manual_seed(seed)
    weight = weight.double() if seed % 4 == 0 else weight
    if is_off:
        row, column = (int(torch.randint(n, (), generator=generator)) for n in weight.shape)
        weight[row, column] = (0.3, math.nan, math.inf, 2.0**14)[seed % 4]
    results = []
    for decompose in (bitmask4.decompose, grid_of_bits(4, 64).decompose):
        try:
            codes, scales = decompose(weight)
            results.append((codes.dtype, scales.dtype, codes.tolist(), scales.tolist()))
        except FormatError as error:
            results.append(str(error))
    assert results[0] == results[1]


@patient
@given(weights())
def test_a_plain_loop_reads_the_format_as_documented(weight):
    nibbles, bits, scales = pack(weight)
    rows, columns = weight.shape
    place, offsets = 0, []
    for row in range(rows):
        offsets.append(place)
        for group in range(scales.shape[1]):
            taken = 0
            for column in range(64 * group, min(64 * group + 64, columns)):
                value = 0.0
                if int(bits[row, column // 8]) >> column % 8 & 1:
                    nibble = int(nibbles[place + taken // 2]) >> 4 * (taken % 2) & 15
                    value = (nibble - 8 if nibble < 8 else nibble - 7) * float(scales[row, group])
                    taken += 1
                assert float(weight[row, column]) == value
            if taken % 2:
                assert int(nibbles[place + taken // 2]) >> 4 == 0
            place += (taken + 1) // 2
    assert place == nibbles.numel() == count_bytes(weight)
    assert row_offsets(bits).tolist() == offsets
    assert scales.dtype == weight.dtype
    stored = nibbles.nbytes + bits.nbytes + scales.nbytes
    assert packed_bytes((rows, columns), weight.dtype, place) == stored


@patient
@given(weights())
def test_packing_loses_no_bit(weight):
    tensors = pack(weight)
    found = unpack(*tensors, weight.shape[1])
    assert found.dtype == weight.dtype
    assert torch.equal(found, weight)
    assert not bool((found.signbit() & (found == 0)).any())
    assert damage(*tensors, weight.shape[1]) is None


def test_many_rows_are_packed_some_at_a_time(monkeypatch):
    weight = torch.randint(-8, 9, (23, 200), generator=torch.Generator().manual_seed(0)).float()
    expected = pack(weight)
    monkeypatch.setattr(bitmask4, "_WEIGHTS_AT_A_TIME", 1000)
    for some, whole in zip(pack(weight), expected, strict=True):
        assert torch.equal(some, whole)


def test_a_weight_of_no_matrix_or_no_grid_is_refused():
    with pytest.raises(PatternError, match="3 dimensions"):
        pack(torch.zeros(2, 3, 4))
    assert BITMASK4.why_not((2, 3)) is None
    weight = torch.ones(3, 130)
    weight[1, 70] = 0.15
    with pytest.raises(FormatError, match=r"Row 1, columns 64 to 127 \(group 1\)"):
        pack(weight)


def test_a_scale_that_its_dtype_does_not_hold_is_refused():
    """Multiples of 2⁻²⁴: the products round to the weights, and the scale 2.375·2⁻²⁴ to another."""
    weight = torch.zeros(2, 70, dtype=torch.float16)
    weight[1, 64:67] = torch.tensor([12.0, 10.0, 7.0]) * 2.0**-24
    with pytest.raises(FormatError, match=r"Row 1, columns 64 to 69 \(group 1\): expected a scale"):
        pack(weight)
    weight[1, 64:67] = torch.tensor([12.0, 10.0, 6.0]) * 2.0**-24  # twice 6, 5 and 3
    assert torch.equal(unpack(*pack(weight), 70), weight)


@pytest.mark.parametrize(("sparsity", "bits"), [(0.5, 3.25), (0.7, 2.45)])
def test_half_of_the_weights_take_three_and_a_quarter_bits(sparsity, bits):
    rows, columns = 64, 640
    weight = torch.ones(rows, columns)
    weight[:, torch.arange(columns) % 10 < 10 * sparsity] = 0.0
    tensors = pack(weight.bfloat16())
    taken = 8 * sum(tensor.nbytes for tensor in tensors) / weight.numel()
    assert bits <= taken <= bits + 0.03  # groups of an odd number of codes end in half a byte


def test_tensors_that_were_not_packed_together_are_found():
    nibbles, bits, scales = pack(torch.ones(2, 11))
    assert "take 12 bytes, and there are 11" in str(damage(nibbles[1:], bits, scales, 11))
    assert "beyond its 10 columns" in str(damage(nibbles, bits, scales, 10))
    for wrong in (float("nan"), float("inf"), 3e38):
        spoilt = scales.clone()
        spoilt[1, 0] = wrong
        assert "1 scales are not finite" in str(damage(nibbles, bits, spoilt, 11))
    assert "expected uint8" in str(damage(nibbles.float(), bits, scales, 11))
    assert "no floating dtype" in str(damage(nibbles, bits, scales.int(), 11))


def test_the_documented_numpy_reader_reads():
    blocks = DOCUMENT.read_text().split("```python\n")[1:]
    code = next(block.split("```")[0] for block in blocks if "nibbles, bits, scales" in block)
    scope: dict[str, Any] = {}
    exec(code, scope)
    weight = torch.randint(-8, 9, (3, 130), generator=torch.Generator().manual_seed(0)) * 0.25
    tensors = [tensor.numpy() for tensor in pack(weight)]
    assert torch.equal(torch.from_numpy(scope["unpack"](*tensors, 130)), weight)


def test_the_documented_example_holds():
    row = [0.0, 2.0, 0.0, -0.5, 0.0, 0.0, 1.5, 0.0, -4.0]
    nibbles, bits, scales = pack(torch.tensor([row], dtype=torch.bfloat16))
    text = DOCUMENT.read_text()
    assert str(row).replace(".0", "").replace("-", "−") in text
    shown = text.splitlines()
    for name, tensor in (("codes", nibbles), ("places", bits)):
        written = " ".join(f"{byte:02x}" for byte in tensor.flatten().tolist())
        assert any(line.startswith(name) and written in line for line in shown), (name, written)
    word = int(scales.view(torch.int16)[0, 0])
    assert any(line.startswith("scales") and f"{word:04x}" in line for line in shown)


@pytest.mark.parametrize("columns", [64, 200, 512])
def test_the_host_waits_for_no_value_while_unpacking(columns):
    """A CUDA graph cannot capture an operator whose result's size depends on values."""
    device = "cpu" if torch.version.cuda is None else "cuda"  # fake: no GPU is needed
    stored = pack(torch.randint(-8, 9, (24, columns)).bfloat16())
    with FakeTensorMode():
        stored = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in stored]
        unpacked = unpack(*stored, columns)
    assert unpacked.shape == (24, columns)
    assert unpacked.dtype == torch.bfloat16
    assert unpacked.device.type == device
