"""Distances that sketches tell against those of the tensors themselves."""

from contextlib import contextmanager

import pytest
import torch

from mrp_lightning.calibration.walk_choice import DIRECTIONS, relative_error, sketch


def distance(a, b):
    return float((sketch(a).projection - sketch(b).projection).norm())


def perturbations():
    generator = torch.Generator().manual_seed(0)
    shape = (3, 1500, 24)  # more rows than are projected at a time
    everywhere = torch.randn(shape, generator=generator)
    one_row = torch.zeros(shape)
    one_row[1, 700] = everywhere[0, 0]
    one_column = torch.zeros(shape)
    one_column[..., 5] = everywhere[..., 5]
    alike = everywhere[..., :1].expand(shape)
    return {"everywhere": everywhere, "row": one_row, "column": one_column, "alike": alike}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("where", ["everywhere", "row", "column", "alike"])
def test_distances_are_those_of_the_tensors(where, dtype):
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(3, 1500, 24, generator=generator).to(dtype)
    b = a + perturbations()[where].to(dtype)
    true = float((b.double() - a.double()).norm())
    # A row is told exactly; where all columns differ alike, to three times 1/√(2·DIRECTIONS).
    bound = 1e-4 if where == "row" else 3 / (2 * DIRECTIONS) ** 0.5
    assert distance(a, b) == pytest.approx(true, rel=bound)


def test_equal_tensors_have_equal_sketches():
    a = torch.randn(40, 6)
    a[0], a[1, 0], a[2, 1], a[3, 2] = torch.nan, torch.inf, -torch.inf, 1e20
    assert distance(a, a.clone()) == 0.0
    assert distance(a, a.nan_to_num(0.0, torch.inf, -torch.inf)) == 0.0
    other = a.clone()
    other[1, 0] = 1.0
    assert distance(a, other) == pytest.approx(1e30)


@pytest.mark.parametrize("shape", [(), (5,), (0, 5), (2, 3, 4, 5)])
def test_tensors_of_any_shape(shape):
    made = sketch(torch.ones(shape))
    assert made.shape == shape
    assert made.projection.isfinite().all()


@contextmanager
def half_by_default():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("context", [torch.autocast("cpu", torch.bfloat16), half_by_default()])
def test_the_precision_of_the_forward_does_not_round_it(context):
    a = torch.randn(50, 8)
    expected = sketch(a).projection
    with context:
        assert torch.equal(sketch(a).projection, expected)


def test_errors_are_relative_to_what_the_block_adds():
    given = torch.randn(200, 16)
    update, mistake = 1e-2 * torch.randn(200, 16), 1e-3 * torch.randn(200, 16)
    expected = given + update
    error = relative_error(sketch(expected + mistake), sketch(expected), sketch(given))
    assert error == pytest.approx(0.1, rel=0.3)
    other_shape = sketch(given[:, :4])
    assert relative_error(sketch(expected), sketch(expected), other_shape) == 0.0
    assert relative_error(other_shape, sketch(expected), sketch(given)) == float("inf")
