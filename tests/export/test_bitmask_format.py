"""The bitmask form, against a plain loop over the document's words."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrp_lightning.errors import PatternError
from mrp_sparse.formats import bitmask
from mrp_sparse.formats.bitmask import (
    BITMASK,
    count_kept,
    damage,
    pack,
    packed_bytes,
    row_offsets,
    unpack,
)
from mrp_sparse.formats.sparse24 import positive_zeros

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
SIGN = {torch.int16: 0x8000, torch.int32: 0x80000000}


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Weights of any bits, NaN payloads and denormals among them, with empty and full rows."""
    dtype = draw(st.sampled_from(list(INTEGERS)))
    size = 8 * dtype.itemsize
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 37))
    word = st.integers(1, 2**size - 1)
    kinds = [st.just(0), word, st.one_of(st.just(0), word), st.sampled_from([0, 1 << size - 1])]
    drawn = []
    for _ in range(rows):
        kind = draw(st.sampled_from(kinds))
        drawn += draw(st.lists(kind, min_size=columns, max_size=columns))
    code = {16: "H", 32: "I"}[size]
    data = bytearray(struct.pack(f"<{len(drawn)}{code}", *drawn))
    return torch.frombuffer(data, dtype=dtype).view(rows, columns)


def bits_of(tensor: Tensor) -> list[int]:
    integers = tensor.contiguous().view(INTEGERS[tensor.dtype])
    return [word & (2 ** (8 * tensor.element_size()) - 1) for word in integers.flatten().tolist()]


patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@patient
@given(weights())
def test_packing_loses_no_bit(weight):
    before = bits_of(weight)
    values, bits = pack(weight)
    assert values.dtype == weight.dtype
    assert values.ndim == 1
    assert bits.dtype == torch.uint8
    assert bits.shape == (weight.shape[0], (weight.shape[1] + 7) // 8)
    expected = bits_of(positive_zeros(weight)[0])
    assert bits_of(unpack(values, bits, weight.shape[1])) == expected
    assert bits_of(weight) == before
    assert damage(values, bits, weight.shape[1]) is None


@patient
@given(weights())
def test_a_plain_loop_reads_the_format_as_documented(weight):
    values, bits = pack(weight)
    words, stored = bits_of(weight), bits_of(values)
    sign = SIGN[INTEGERS[weight.dtype]]
    rows, columns = weight.shape
    place, offsets = 0, []
    for row in range(rows):
        offsets.append(place)
        for column in range(8 * bits.shape[1]):
            kept = int(bits[row, column // 8]) >> column % 8 & 1
            word = words[row * columns + column] if column < columns else 0
            assert kept == (word not in (0, sign))
            if kept:
                assert stored[place] == word
                place += 1
    assert place == values.numel() == count_kept(weight)
    assert row_offsets(bits).tolist() == offsets
    assert packed_bytes((rows, columns), weight.dtype, place) == values.nbytes + bits.nbytes


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
        values, bits = pack(weight)
    assert packing.num_bytes <= weight.nbytes
    with Largest() as counting:
        offsets = row_offsets(bits)
    assert counting.num_bytes <= 4 * bits.nbytes
    kept = weight != 0
    assert torch.equal(values, weight[kept])
    assert bits.numpy().tobytes() == np.packbits(kept.numpy(), 1, bitorder="little").tobytes()
    assert torch.equal(offsets, kept.sum(1).cumsum(0) - kept.sum(1))


def test_a_weight_of_no_matrix_is_refused():
    with pytest.raises(PatternError, match="3 dimensions"):
        pack(torch.zeros(2, 3, 4))
    assert BITMASK.why_not((2, 3, 4)) is not None
    assert BITMASK.why_not((2, 3)) is None


@pytest.mark.parametrize(("sparsity", "part"), [(0.5, 0.5625), (0.7, 0.3625), (0.8, 0.2625)])
def test_sixteen_bit_weights_take_their_part_and_a_sixteenth(sparsity, part):
    kept = round((1 - sparsity) * 80 * 80)
    assert packed_bytes((80, 80), torch.bfloat16, kept) / (80 * 80 * 2) == part


def test_tensors_that_were_not_packed_together_are_found():
    values, bits = pack(torch.ones(2, 11))
    assert "22 weights are marked as kept, and there are 21 values" in str(
        damage(values[1:], bits, 11)
    )
    assert "beyond its 10 columns" in str(damage(values, bits, 10))


DOCUMENT = Path(__file__).parents[2] / "mrp_sparse" / "FORMAT.md"


def test_the_documented_numpy_reader_reads():
    blocks = DOCUMENT.read_text().split("```python\n")[1:]
    code = next(block.split("```")[0] for block in blocks if "unpackbits" in block)
    scope: dict[str, Any] = {}
    exec(code, scope)
    weight = torch.randn(3, 13) * (torch.rand(3, 13) < 0.4)
    values, bits = pack(weight)
    assert torch.equal(
        torch.from_numpy(scope["unpack"](values.numpy(), bits.numpy(), 13)), weight + 0.0
    )


def test_the_documented_example_holds():
    row = [0.0, 5.0, 0.0, -1.0, 0.0, 0.0, 2.0, 0.0, 3.0]
    values, bits = pack(torch.tensor([row], dtype=torch.float16))
    text = DOCUMENT.read_text()
    assert str(row).replace(".0", "").replace("-", "−") in text
    shown = [line for line in text.splitlines() if line.startswith(("values", "bits"))]
    words = "  ".join(f"{word >> 8:02x} {word & 255:02x}" for word in bits_of16(values))
    assert any(words in line for line in shown)
    places = " ".join(f"{byte:02x}" for byte in bits.flatten().tolist())
    assert any(line.startswith("bits") and places in line for line in shown)


def bits_of16(values: Tensor) -> list[int]:
    return [word & 0xFFFF for word in values.view(torch.int16).tolist()]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_of_eight_bits_zeros_of_both_signs_are_removed_and_nan_is_kept(dtype):
    weight = torch.tensor([[0.0, -0.0, 1.5, -(2**-6), float("nan")]]).to(dtype)
    values, bits = pack(weight)
    assert bits.tolist() == [[0b11100]]
    restored = unpack(values, bits, 5).float()
    assert torch.equal(restored.nan_to_num(9.0), torch.tensor([[0.0, 0.0, 1.5, -(2**-6), 9.0]]))
