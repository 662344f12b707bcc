"""The Triton kernels: in Triton's interpreter on a CPU, compiled where there is a CUDA device."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shapes import random_24

pytest.importorskip("triton", reason="needs Triton, as the extra `dev` or torch for CUDA bring it")

from mrp_sparse.formats.sparse24 import pack
from mrp_sparse.kernels import triton_kernels
from mrp_sparse.kernels.dispatch import choose, multiply

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(16, 64), (70, 520), (33, 8), (64, 1024), (24, 1096), (24, 2056)]
DTYPES = [torch.bfloat16, torch.float16]


def problem(tokens, out_features, in_features, dtype):
    torch.manual_seed(0)
    weight = random_24(out_features, in_features, dtype, DEVICE)
    # Groups with fewer than two non-zeros, and none.
    weight[0, :4] = 0
    weight[1, :3] = 0
    x = torch.randn(tokens, in_features, dtype=dtype, device=DEVICE)
    bias = torch.randn(out_features, dtype=dtype, device=DEVICE)
    return x, weight, bias


def assert_equal_up_to_rounding(y, x, weight, bias):
    truth = x.double() @ weight.double().T
    if bias is not None:
        truth += bias.double()
    torch.testing.assert_close(y.double(), truth, rtol=2 * torch.finfo(y.dtype).eps, atol=1e-4)


@pytest.mark.parametrize(("number", "shape"), list(enumerate(SHAPES)), ids=str)
def test_the_kernels_multiply_and_unpack(number, shape):
    dtype, tokens = DTYPES[number % 2], (1, 5, 17)[number % 3]
    x, weight, bias = problem(tokens, *shape, dtype)
    bias = bias if number % 4 else None
    packed = pack(weight)
    for some, kernel in ((x[:1], triton_kernels.gemv), (x, triton_kernels.gemm)):
        y = kernel(some, *packed, bias)
        assert y.dtype == dtype
        assert_equal_up_to_rounding(y, some, weight, bias)
    weight[2, 0], weight[2, 1] = float("inf"), float("-inf")
    weight[2, 2:4] = 0
    unpacked = triton_kernels.unpack(*pack(weight))
    assert torch.equal(unpacked.view(torch.int16), weight.view(torch.int16))


def test_the_kernels_compile_for_devices_that_are_not_here():
    command = [sys.executable, "lab/benchmarks/kernel_code.py", "--json", "--capability"]
    root = Path(__file__).parents[2]
    made = subprocess.run(
        [*command, "80", "90"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(made.stdout)
    assert found.keys() == {"80", "90"}
    for codes in found.values():
        assert {code["kernel"] for code in codes} == {"triton-gemv", "triton-gemm"}
        # Shared memory for a program of sm_86, 89 and 120, the least of all.
        assert not [code for code in codes if code["stack"] or code["shared"] > 99 * 2**10]
        barriers = {code["kernel"]: code["barriers"] for code in codes}
        assert not barriers["triton-gemv"]
        # An H200 has time for 16 while a kept weight arrives: lab/results/export.md.
        assert all(5 < code["instructions"] < 16 for code in codes)


@pytest.mark.parametrize("seed", range(8))
def test_any_shape_and_number_of_tokens_gives_the_product(seed):
    # Any number of rows and whole bytes of meta a row, with groups of zero to two weights. Drawn
    # without Hypothesis, which may be missing where there is a GPU.
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, columns, dtype = draw.randint(1, 70), 8 * draw.randint(1, 40), draw.choice(DTYPES)
    weight = random_24(rows, columns, dtype, DEVICE)
    weight *= torch.rand_like(weight, dtype=torch.float32) < draw.random()
    x = torch.randn(draw.randint(1, 16), columns, device=DEVICE).to(dtype)
    bias = draw.choice([None, torch.randn(rows, device=DEVICE).to(dtype)])
    packed = pack(weight)
    assert_equal_up_to_rounding(triton_kernels.gemm(x, *packed, bias), x, weight, bias)
    assert_equal_up_to_rounding(triton_kernels.gemv(x[:1], *packed, bias), x[:1], weight, bias)
    unpacked = triton_kernels.unpack(*packed)
    assert torch.equal(unpacked.view(torch.int16), (weight + 0.0).view(torch.int16))


def test_inputs_may_lie_anywhere_in_memory():
    x, weight, bias = problem(4, 16, 64, torch.bfloat16)
    shifted = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(4, 64)
    transposed = x.T.contiguous().T
    for strange in (shifted, transposed):
        y = triton_kernels.gemm(strange, *pack(weight), bias)
        assert_equal_up_to_rounding(y, x, weight, bias)
    y = triton_kernels.gemv(shifted[1:2], *pack(weight), bias)
    assert_equal_up_to_rounding(y, x[1:2], weight, bias)


def test_the_operator_runs_the_kernel_it_chose():
    """In the interpreter the CUDA path can be followed on a CPU, but for the device."""
    assert choose(1, (16, 64), torch.bfloat16, DEVICE) == "triton-gemv"
    for tokens in (1, 3, 65):
        x, weight, bias = problem(tokens, 16, 64, torch.bfloat16)
        y = multiply(x, *pack(weight), bias)
        assert_equal_up_to_rounding(y, x, weight, bias)
