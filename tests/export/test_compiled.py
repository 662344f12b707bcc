"""The compiled CPU kernels, with and without AVX-512, against float64."""

import ctypes
import os
import time
from pathlib import Path

import pytest
import torch
import warm
from torch import Tensor

from mrp_sparse.formats import bitmask, bitmask4, eight_bit, sparse24
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.sparse24 import SPARSE24
from mrp_sparse.kernels import library

from .conftest import (
    IN_TILES,
    PORTABLE,
    TILES,
    VECTORS,
    keep_two_of_four,
    needs_vectors,
    onto_grid,
)

ROOT = Path(__file__).parents[2]
COLUMNS = [1, 8, 31, 32, 33, 64, 100, 127, 128, 129, 136, 160, 250, 384, 1000]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if not library.load():
        pytest.skip("needs a C++ compiler")


@pytest.fixture(
    params=[
        pytest.param(VECTORS, marks=needs_vectors, id="vectors"),
        pytest.param(PORTABLE, id="portable"),
        IN_TILES,
    ]
)
def way(request: pytest.FixtureRequest) -> int:
    if request.param == TILES:
        request.getfixturevalue("tiles")
    return request.param


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_exact(found: Tensor, weight: Tensor, x: Tensor, bias: Tensor | None) -> None:
    """Rounding of the result and of the sums, and nothing else."""
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    size = x.double().abs() @ weight.double().abs().T
    sums = 4 * torch.finfo(torch.float32).eps * size
    bound = torch.finfo(x.dtype).eps * exact.abs() + sums + 1e-30
    assert found.dtype == x.dtype
    assert bool(((found.double() - exact).abs() <= bound).all())


def pruned(rows: int, columns: int, kept: float, seed: int = 0) -> Tensor:
    """A weight of which a part of each row is kept, and nothing of one row."""
    weight = random(rows, columns, seed=seed)
    weight = torch.where(random(rows, columns).abs().argsort(1) < kept * columns, weight, 0.0)
    weight[rows // 2] = 0.0
    return weight


def of_four_bits(rows: int, columns: int, kept: float, seed: int = 0) -> Tensor:
    return onto_grid(pruned(rows, columns, kept, seed))


CASES = [(form, kept) for form in (BITMASK, BITMASK4) for kept in (0.0, 0.1, 0.5, 1.0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("form", "kept"), [(SPARSE24, 1.0), *CASES])
def test_any_pattern_of_any_width(form, kept, dtype, way):
    for number, columns in enumerate(COLUMNS):
        tokens, rows = (1, 2, 3, 5, 8, 13)[number % 6], (1, 7, 40)[number % 3]
        columns += -columns % 8 if form is SPARSE24 else 0
        weight = pruned(rows, columns, kept, number)
        weight = {SPARSE24: keep_two_of_four, BITMASK4: onto_grid}.get(form, torch.clone)(weight)
        weight = weight.to(dtype)
        packed = form.pack(weight)
        if form is not SPARSE24:
            packed = (*packed, form.row_offsets(packed[1]))
        x = random(tokens, columns, seed=1).to(dtype)
        bias = random(rows).to(dtype) if number % 2 else None
        options = (bias, False, way) if form is BITMASK4 else (bias, way)
        found = getattr(torch.ops.mrp_lightning_cpu, form.operator)(x, *packed, *options)
        assert_exact(found, weight, x, bias)


def test_four_bits_of_many_tokens_are_a_dense_product_bit_by_bit():
    """Without AVX-512; with it, see `test_the_results_of_a_token_do_not_depend_on_the_others`."""
    weight, x = of_four_bits(24, 200, 0.5).bfloat16(), random(17, 200, seed=1).bfloat16()
    packed = bitmask4.pack(weight)
    offsets = bitmask4.row_offsets(packed[1])
    multiply = torch.ops.mrp_lightning_cpu.linear_bitmask4
    found = multiply(x, *packed, offsets, None, False, PORTABLE)
    assert torch.equal(found, torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("eight_bits", [False, True])
def test_damaged_tensors_of_four_bits_are_refused(tokens, eight_bits, way):
    nibbles, bits, scales = bitmask4.pack(of_four_bits(7, 100, 0.5).bfloat16())
    offsets = bitmask4.row_offsets(bits)
    x = torch.ones(tokens, 100).bfloat16()

    def refused(match: str, *packed: Tensor, given: Tensor = x) -> None:
        with pytest.raises(RuntimeError, match=match):
            torch.ops.mrp_lightning_cpu.linear_bitmask4(given, *packed, None, eight_bits, way)

    refused("more values as kept", nibbles[:-1], bits, scales, offsets)
    refused("do not fit its values", nibbles, bits, scales, offsets + nibbles.numel() + 1)
    refused("do not fit its values", nibbles, bits, scales, offsets - 1)
    refused("Scales of shape", nibbles, bits, scales[:, :1], offsets)
    refused("must be uint8", nibbles.int(), bits, scales, offsets)
    refused("cast one of them", nibbles, bits, scales.float(), offsets)
    refused("Bits of shape", nibbles, bits, scales, offsets, given=x[:, :90])
    marked = bits.clone()
    marked[0, -1] = 255
    refused("more columns than the input", nibbles, marked, scales, offsets)


def test_what_is_not_finite_spreads_through_four_bits(way):
    weight = of_four_bits(5, 130, 0.5).bfloat16()
    packed = bitmask4.pack(weight)
    offsets = bitmask4.row_offsets(packed[1])
    for wrong in (float("inf"), float("nan")):
        x = torch.ones(2, 130).bfloat16()
        x[1, 70] = wrong
        for eight_bits in (False, True):
            found = torch.ops.mrp_lightning_cpu.linear_bitmask4(
                x, *packed, offsets, None, eight_bits, way
            )
            assert bool(found[0].isfinite().all())
            assert not bool(found[1].isfinite().any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_eight_bits_of_any_width(dtype, way):
    for number, columns in enumerate(COLUMNS):
        tokens, rows = (1, 2, 3, 5, 8, 13)[number % 6], (1, 7, 40)[number % 3]
        codes, scales = eight_bit.pack(random(rows, columns, seed=number).to(dtype))
        x = random(tokens, columns, seed=1).to(dtype)
        bias = random(rows).to(dtype) if number % 2 else None
        found = torch.ops.mrp_lightning_cpu.linear8(x, codes, scales, bias, way)
        assert found.shape == (tokens, rows)
        exact = codes.double() * scales.double()[:, None]
        expected = x.double() @ exact.T + (0 if bias is None else bias.double())
        # Where torch or a dense product takes over, weights are rounded to the dtype before.
        step = 4 * torch.finfo(dtype).eps
        allowed = step * (expected.abs() + x.double().abs() @ exact.abs().T) + 1e-12
        assert bool(((found.double() - expected).abs() <= allowed).all())


# Without AVX-512 a weight whose columns are no multiple of 16 is rounded to bfloat16 itself.
@pytest.mark.parametrize("columns", [1024, pytest.param(1000, marks=needs_vectors)])
def test_few_tokens_of_eight_bits_are_rounded_once(columns):
    codes, scales = eight_bit.pack(random(40, columns).bfloat16())
    x = random(3, columns, seed=1).bfloat16()
    found = torch.ops.mrp_lightning.linear8(x, codes, scales, None)
    expected = x.double() @ (codes.double() * scales.double()[:, None]).T
    assert bool(((found.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-4).all())


def test_tensors_that_are_no_eight_bits_are_refused():
    codes, scales = eight_bit.pack(random(8, 64).bfloat16())
    x = torch.ones(1, 64).bfloat16()

    def refused(match: str, *packed: Tensor, given: Tensor = x) -> None:
        with pytest.raises(RuntimeError, match=match):
            torch.ops.mrp_lightning.linear8(given, *packed, None)

    refused("with a scale for each row", codes, scales[:-1])
    refused("must be int8", codes.int(), scales)
    refused("cast one of them", codes, scales.float())
    refused("columns", codes, scales, given=x[:, :48])


@pytest.mark.parametrize("rows", [24, 4100])
def test_many_tokens_are_a_dense_product_bit_by_bit(rows):
    """Without AVX-512: of 4,100 rows as many at once as fit into 4 MiB."""
    weight = keep_two_of_four(random(rows, 1024)).bfloat16()
    x, bias = random(17, 1024, seed=1).bfloat16(), random(rows, seed=2).bfloat16()
    values, bits = bitmask.pack(weight)
    offsets = bitmask.row_offsets(bits)
    expected = torch.nn.functional.linear(x, weight, bias)
    multiply = torch.ops.mrp_lightning_cpu
    found = multiply.linear_bitmask(x, values, bits, offsets, bias, PORTABLE)
    assert torch.equal(found, expected)
    packed = sparse24.pack(weight)
    assert torch.equal(multiply.linear24(x, *packed, bias, PORTABLE), expected)


@needs_vectors
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    ("columns", "way"),
    [(200, VECTORS), (2056, VECTORS), (9000, VECTORS), (200, TILES), (1096, TILES)],
)
def test_the_results_of_a_token_do_not_depend_on_the_others(way, columns):
    """From 1 to 1,000 tokens, in tiles of all sizes. Bits and nibbles give the same sums."""
    weight = keep_two_of_four(of_four_bits(41, columns, 1.0)).bfloat16()
    x, bias = random(1000, columns, seed=1).bfloat16(), random(41, seed=2).bfloat16()
    values, bits = bitmask.pack(weight)
    offsets = bitmask.row_offsets(bits)
    multiply = torch.ops.mrp_lightning_cpu
    packed = bitmask4.pack(weight)
    starts = bitmask4.row_offsets(packed[1])
    for run in (
        lambda some: multiply.linear_bitmask(some, values, bits, offsets, bias, way),
        lambda some: multiply.linear_bitmask4(some, *packed, starts, bias, False, way),
    ):
        every = run(x)
        assert_exact(every, weight, x, bias)
        for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 64, 513):
            assert torch.equal(run(x[-tokens:]), every[-tokens:])
    by_bits = multiply.linear_bitmask(x, values, bits, offsets, bias, way)
    assert torch.equal(multiply.linear24(x, *sparse24.pack(weight), bias, way), by_bits)


def test_what_is_not_finite_spreads_as_in_a_dense_product(way):
    weight = torch.zeros(3, 40)
    weight[0, 3], weight[1, 35] = float("inf"), float("nan")
    x = torch.ones(2, 40)
    x[1, 39] = float("inf")  # times a weight that was removed
    values, bits = bitmask.pack(weight.bfloat16())
    offsets = bitmask.row_offsets(bits)
    found = torch.ops.mrp_lightning_cpu.linear_bitmask(
        x.bfloat16(), values, bits, offsets, None, way
    )
    assert str(found.tolist()) == "[[inf, nan, 0.0], [nan, nan, nan]]"


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_past_the_values_is_read_whatever_the_bits_say(dtype, tokens, way):
    values, bits = bitmask.pack(torch.ones(2, 300, dtype=dtype))
    offsets = bitmask.row_offsets(bits)
    x = torch.ones(tokens, 300, dtype=dtype)

    def multiply(values: Tensor, offsets: Tensor) -> Tensor:
        return torch.ops.mrp_lightning_cpu.linear_bitmask(x, values, bits, offsets, None, way)

    assert multiply(values, offsets).unique().tolist() == [300.0]
    with pytest.raises(RuntimeError, match="marks more values as kept than it has"):
        multiply(values[:-1], offsets)
    for wrong in (-1, 601):
        with pytest.raises(RuntimeError, match="offsets of a packed weight do not fit"):
            multiply(values, torch.tensor([0, wrong]))


def test_operands_that_do_not_fit_are_refused():
    values, bits = bitmask.pack(torch.ones(2, 20))
    offsets, x = bitmask.row_offsets(bits), torch.ones(1, 20)
    multiply = torch.ops.mrp_lightning.linear_bitmask
    assert multiply(x, values, bits, offsets, None).tolist() == [[20.0, 20.0]]
    for arguments, said in [
        ((x.half(), values, bits, offsets, None), "cast one of them"),
        ((torch.ones(1, 25), values, bits, offsets, None), "25 columns of the input"),
        ((x, values, bits, offsets[:1], None), "int64 for each of 2 rows"),
        ((x, values, bits.char(), offsets, None), "uint8"),
        ((x, values, bits, offsets, torch.ones(3)), "bias must have a value for each of 2 rows"),
    ]:
        with pytest.raises(RuntimeError, match=said):
            multiply(*arguments)


@pytest.mark.parametrize("tokens", [1, 9])
def test_threads_share_the_rows(tokens):
    weight = keep_two_of_four(random(600, 512)).bfloat16()
    x = random(tokens, 512, seed=1).bfloat16()
    values, bits = bitmask.pack(weight)
    arguments = x, values, bits, bitmask.row_offsets(bits), None
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.ops.mrp_lightning.linear_bitmask(*arguments)
        torch.set_num_threads(3)
        assert torch.equal(torch.ops.mrp_lightning.linear_bitmask(*arguments), alone)
    finally:
        torch.set_num_threads(before)


def answering(number: int) -> str:
    exported = 'extern "C" __attribute__((visibility("default")))'
    return f"{exported} int answer() {{ return {number}; }}\n"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """Another folder of kernels, with a source that is compiled at once."""
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "operators.cpp").write_text(answering(41))
    return tmp_path


def test_a_library_of_older_sources_is_built_anew(elsewhere):
    first = library.build()
    assert ctypes.CDLL(first).answer() == 41
    (elsewhere / "cpu" / "operators.cpp").write_text(answering(42))
    assert not library.path().exists()
    second = library.build()
    assert ctypes.CDLL(second).answer() == 42
    assert {path.name for path in elsewhere.iterdir()} == {"cpu", second.name}
    made = second.stat().st_mtime_ns
    assert library.build().stat().st_mtime_ns == made


def test_a_build_whose_process_was_killed_leaves_nothing_for_ever(elsewhere):
    for name, age in (("killed", 3600), ("running", 10)):
        (elsewhere / f".building-{name}").mkdir()
        (elsewhere / f".building-{name}" / "half.so").touch()
        os.utime(elsewhere / f".building-{name}", 2 * (time.time() - age,))
    library.build()
    assert [path.name for path in elsewhere.glob(".building-*")] == [".building-running"]


def test_a_library_without_sources_is_that_of_a_wheel(elsewhere):
    built = library.build()
    (elsewhere / "cpu" / "operators.cpp").unlink()
    assert library.path() == library.build() == built
    built.unlink()
    with pytest.raises(library.BuildError, match="neither the library nor its sources"):
        library.path()


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "no compiler 'no-such-compiler': install one of C++, such as g++"),
        ("g++", "error: "),
    ],
)
def test_without_a_library_weights_are_unpacked_and_one_warning_says_why(
    compiler, reason, elsewhere
):
    (elsewhere / "cpu" / "operators.cpp").write_text("this is no C++\n")
    code = (
        "import torch, export, pathlib, logging; logging.basicConfig();"
        "from mrp_sparse.kernels import library;"
        f"library.FOLDER = pathlib.Path({str(elsewhere)!r});"
        "linear = torch.nn.Linear(40, 8).requires_grad_(False);"
        "layers = [export.BitmaskLinear.from_linear(linear) for _ in range(2)];"
        "x = torch.ones(3, 40);"
        "assert all(torch.equal(layer(x), linear(x)) for layer in layers)"
    )
    ended = warm.run(["-c", code], {"CXX": compiler}, ROOT)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("are unpacked for every product") == 1
    assert reason in ended.stderr
    assert ("such as g++" in ended.stderr) == (compiler != "g++")
    assert [path.name for path in elsewhere.iterdir()] == ["cpu"]


def test_without_a_library_layers_follow_the_same_rules(tmp_path):
    tests = "autocast_reaches or another_width or too_narrow or reach_the_input or the_formula"
    code = (
        "import pathlib, sys, pytest; from mrp_sparse.kernels import library;"
        f"library.FOLDER = pathlib.Path({str(tmp_path)!r});"
        "files = [f'tests/export/test_{name}.py' for name in ('packed_layers', 'integers')];"
        f"sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *files, '-k', {tests!r}]))"
    )
    ended = warm.run(["-c", code], cwd=ROOT)
    assert ended.returncode == 0, ended.stdout
