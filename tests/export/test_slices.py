"""Slices cut on the packed form equal packing the slice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrp_sparse.formats import slices
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4, GROUP
from mrp_sparse.formats.sparse24 import SPARSE24

FORMS = [BITMASK, BITMASK4, SPARSE24]


def weight(form, rows, columns, seed, kept=0.5):
    """A bfloat16 weight that the format holds, some of its rows empty."""
    random = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, columns, generator=random)
    if form is SPARSE24:
        groups = dense.view(rows, -1, 4)
        return (groups * (groups.abs() >= groups.abs().topk(2).values[..., 1:])).view(rows, columns)
    if form is BITMASK4:
        scales = 2.0 ** torch.randint(-6, -1, (rows, -(-columns // GROUP)), generator=random)
        codes = torch.randint(-8, 9, (rows, columns), generator=random)
        dense = codes * scales.repeat_interleave(GROUP, 1)[:, :columns]
    dense[torch.rand(rows, columns, generator=random) >= kept] = 0
    dense[torch.rand(rows, generator=random) < 0.2] = 0
    return dense


def same(tensors, others):
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.option)
@given(st.integers(1, 9), st.integers(1, 40), st.floats(0, 1), st.integers(0, 999), st.data())
def test_rows_are_those_of_the_dense_weight(form, rows, octets, kept, seed, data):
    dense = weight(form, rows, 8 * octets, seed, kept).bfloat16()
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    cut = slices.rows(form, form.pack(dense), begin, end)
    assert torch.equal(form.unpack(*cut, 8 * octets), dense[begin:end])
    assert form.damage(*cut, 8 * octets) is None


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.option)
@given(st.integers(1, 9), st.integers(1, 6), st.floats(0, 1), st.integers(0, 999), st.data())
def test_columns_are_packed_as_by_themselves(form, rows, units, kept, seed, data):
    size = slices.unit(form)
    extra = 8 * data.draw(st.integers(0, size // 8 - 1))
    dense = weight(form, rows, units * size + extra, seed, kept).bfloat16()
    begin = data.draw(st.integers(0, units - 1)) * size
    end = data.draw(st.sampled_from([*range(begin + size, units * size + 1, size), len(dense[0])]))
    cut = slices.columns(form, form.pack(dense), begin, end)
    assert torch.equal(form.unpack(*cut, end - begin), dense[:, begin:end])
    assert form.damage(*cut, end - begin) is None
    if form is not BITMASK4:  # a scale of fewer columns may be found smaller
        assert same(cut, form.pack(dense[:, begin:end]))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.option)
def test_columns_are_cut_on_the_device_of_the_tensors(form, second):
    dense = weight(form, 5, 256, seed=3).bfloat16()
    cut = slices.columns(form, [tensor.to(second) for tensor in form.pack(dense)], 64, 128)
    assert torch.equal(form.unpack(*(tensor.cpu() for tensor in cut), 64), dense[:, 64:128])
