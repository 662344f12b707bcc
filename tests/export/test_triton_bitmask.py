"""The Triton kernels for bitmasks, in Triton's interpreter where there is no CUDA device."""

from collections import defaultdict

import pytest
import torch
from launches import counted
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton, as the extra `dev` or torch for CUDA bring it")

from mrp_sparse.formats import bitmask, bitmask4
from mrp_sparse.kernels import bitmask_dispatch, triton_bitmask
from mrp_sparse.kernels.bitmask_dispatch import multiply, multiply_coded

from .conftest import onto_grid

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(16, 64), (37, 200), (5, 7), (33, 129)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weight_of(shape: tuple[int, int], dtype: torch.dtype, coded: bool) -> Tensor:
    """A weight with rows that are full, half full and empty."""
    share = torch.linspace(0, 1, shape[0], device=DEVICE)[:, None]
    weight = torch.where(
        random(*shape, seed=1).abs().argsort(1) < share * shape[1], random(*shape), 0.0
    )
    return (onto_grid(weight.cpu()).to(DEVICE) if coded else weight).to(dtype)


def packed_of(weight: Tensor, coded: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Values or codes, bits, scales, offsets."""
    if coded:
        nibbles, bits, scales = bitmask4.pack(weight)
        return nibbles, bits, scales, bitmask4.row_offsets(bits)
    values, bits = bitmask.pack(weight)
    return values, bits, None, bitmask.row_offsets(bits)


def assert_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    truth = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert y.dtype == x.dtype
    torch.testing.assert_close(y.double(), truth, rtol=2 * torch.finfo(y.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_few_tokens_are_multiplied(shape, dtype, coded):
    weight = weight_of(shape, dtype, coded)
    for tokens, bias in ((1, None), (5, random(shape[0]).to(dtype)), (17, None)):
        x = random(tokens, shape[1], seed=2).to(dtype)
        y = triton_bitmask.product(x, *packed_of(weight, coded), bias)
        assert_product(y, x, weight, bias)


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpack_gives_the_very_bits(shape, dtype, coded):
    weight = weight_of(shape, dtype, coded)
    unpacked = triton_bitmask.unpack(*packed_of(weight, coded), shape[1])
    assert torch.equal(unpacked.view(torch.int16), (weight + 0.0).view(torch.int16))


@pytest.mark.parametrize("coded", [False, True])
def test_nothing_past_the_values_is_read_whatever_bits_and_offsets_say(coded):
    """Weights that are not there are zero; the interpreter would fail at a wrong address."""
    values, bits, scales, offsets = packed_of(weight_of((16, 64), torch.float16, coded), coded)
    wrong = offsets.clone()
    wrong[3], wrong[4] = -(2**40), 2**40
    full = torch.full_like(bits, 255)
    unpacked = triton_bitmask.unpack(values[:-1], full, scales, wrong, 64)
    assert bool(unpacked.isfinite().all())
    assert not bool(unpacked[3:5].any())


@pytest.mark.parametrize("tokens", [1, 64, 65])
def test_the_operators_run_them_by_the_number_of_tokens(tokens, monkeypatch):
    """In the interpreter the CUDA path can be followed on a CPU, but for the device."""
    used = []
    for name in ("product", "unpack"):
        kernel = getattr(triton_bitmask, name)
        monkeypatch.setattr(
            triton_bitmask,
            name,
            lambda *a, name=name, kernel=kernel: used.append(name) or kernel(*a),
        )
    x, bias = random(tokens, 64, seed=2).bfloat16(), random(16).bfloat16()
    for coded, operator in ((False, multiply), (True, multiply_coded)):
        weight = weight_of((16, 64), torch.bfloat16, coded)
        values, bits, scales, offsets = packed_of(weight, coded)
        operands = [values, bits, scales, offsets] if coded else [values, bits, offsets]
        y = operator(x.view(1, tokens, 64), *operands, bias)
        assert y.shape == (1, tokens, 16)
        assert_product(y[0], x, weight, bias)
    assert used == ["product" if tokens <= 64 else "unpack"] * 2


@pytest.mark.parametrize("coded", [False, True])
def test_an_input_of_other_columns_is_refused(coded):
    """Its rows would be read at another stride, and past the end of the bits."""
    values, bits, scales, offsets = packed_of(weight_of((16, 64), torch.bfloat16, coded), coded)
    operands = [values, bits, scales, offsets] if coded else [values, bits, offsets]
    for columns in (56, 128):
        with pytest.raises(RuntimeError, match="x must have the weight's columns"):
            (multiply_coded if coded else multiply)(random(1, columns).bfloat16(), *operands, None)


def test_other_dtypes_are_unpacked_by_torch():
    weight = weight_of((16, 64), torch.float32, False)
    values, bits, _, offsets = packed_of(weight, False)
    x = random(3, 64)
    y = multiply(x, values, bits, offsets, None)
    assert torch.equal(y, torch.nn.functional.linear(x, weight))


@pytest.mark.skipif(torch.cuda.is_available(), reason="waits are counted on the stand-in")
@pytest.mark.parametrize("coded", [False, True])
def test_the_host_waits_for_nothing_between_the_programs(second, coded, monkeypatch):
    """A CUDA graph would not record it. Programs themselves cannot wait, and are not run here."""
    launched = []
    for name in ("one_token_program", "some_tokens_program", "unpack_program"):
        program = defaultdict(lambda name=name: lambda *_, **__: launched.append(name))
        monkeypatch.setattr(triton_bitmask, name, program)
    monkeypatch.setattr(bitmask_dispatch, "triton_missing", lambda device: None)
    monkeypatch.setattr(triton_bitmask, "interpreting", lambda: False)
    packed = packed_of(weight_of((16, 64), torch.bfloat16, coded), coded)
    operands = [tensor.to(second) for tensor in packed if tensor is not None]
    bias = random(16).bfloat16().to(second)
    with counted() as launches:
        for tokens in (1, 64, 65):
            x = random(tokens, 64).bfloat16().to(second)
            launches.clear()
            (multiply_coded if coded else multiply)(x, *operands, bias)
            assert not launches["syncs"] + launches["uploads"]
    assert launched == ["one_token_program", "some_tokens_program", "unpack_program"]
