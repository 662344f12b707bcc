"""The choice of a kernel for 2:4 weights on a GPU, and its product."""

import pytest
import torch
from shapes import random_24, why_wrong
from torch import nn

from export.speed import captured
from mrp_sparse.formats.sparse24 import pack
from mrp_sparse.kernels import dispatch
from mrp_sparse.kernels.dispatch import choose, multiply, why_not_compressed
from mrp_sparse.packed_linear import Sparse24Linear
from mrp_sparse.upstream import compress_cusparselt

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.fixture
def fresh():
    """The choice without the results of other tests, before and after."""
    caches = dispatch.triton_missing, choose
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


@pytest.fixture
def has_triton(fresh, monkeypatch):
    """As if Triton ran here: only the choice is tested."""
    monkeypatch.setattr(dispatch, "triton_missing", lambda device: None)


@pytest.mark.parametrize(
    ("tokens", "compressed", "kernel"),
    [
        (1, True, "triton-gemv"),
        (2, True, "triton-gemm"),
        (64, False, "triton-gemm"),
        (65, True, "cusparselt"),
        (65, False, "unpack-dense"),
        (0, True, "unpack-dense"),
    ],
)
def test_the_number_of_tokens_decides(has_triton, tokens, compressed, kernel):
    assert choose(tokens, (64, 32), torch.bfloat16, CPU, compressed) == kernel


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64, 32), torch.float32),
        ((64, 12), torch.bfloat16),  # half a byte of meta a row
        ((2**20, 2**12), torch.bfloat16),  # more than 32 bits address
    ],
)
def test_what_triton_does_not_take_is_unpacked(has_triton, shape, dtype):
    assert choose(4, shape, dtype, CPU) == "unpack-dense"


def test_without_a_compiler_a_warning_says_so_once_and_products_are_right(
    fresh, monkeypatch, caplog
):
    """Triton raises where a program is first launched."""
    triton_kernels = pytest.importorskip("mrp_sparse.kernels.triton_kernels")

    def launch(*_, **__):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    for program in ("gemv_program", "gemm_program", "unpack_program"):
        monkeypatch.setattr(triton_kernels, program, {(1, 1): launch, (3,): launch})
    weight = random_24(24, 64, torch.bfloat16, CPU)
    for tokens in (1, 5, 5, 100):
        x = torch.randn(tokens, 64).bfloat16()
        assert torch.equal(multiply(x, *pack(weight), None), nn.functional.linear(x, weight))
        assert choose(tokens, (24, 64), torch.bfloat16, CPU) == "unpack-dense"
    (record,) = caplog.records
    assert "RuntimeError: Failed to find C compiler" in record.message
    assert "needs a C compiler (gcc or clang) and Python's headers" in record.message


def test_the_kernel_that_was_chosen_computes_the_layer():
    torch.manual_seed(0)
    weight = random_24(24, 32, torch.float32, CPU)
    x, bias = torch.randn(5, 3, 32), torch.randn(24)
    torch.testing.assert_close(multiply(x, *pack(weight), bias), x @ weight.T + bias)
    with pytest.raises(ValueError, match=r"input is torch\.float64 and the packed weight"):
        multiply(x.double(), *pack(weight), bias)


def test_cusparselt_says_what_it_refuses():
    assert "runs on CUDA devices, not on 'cpu'" in why_not_compressed((32, 64), BF16, CPU)
    assert "multiples of 16, not 24×64" in why_not_compressed((24, 64), torch.float16, CPU)
    assert "not float32" in why_not_compressed((32, 64), torch.float32, CPU)


def test_the_installed_torch_has_the_private_functions_of_cusparselt():
    # The meta kernel checks operands and gives the shape: tokens first, contiguous.
    x = torch.empty(5, 32, dtype=torch.bfloat16, device="meta")
    compressed = torch.empty(48, 18, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(48, dtype=torch.bfloat16, device="meta")
    y = dispatch._by_cusparselt(x, compressed, bias)
    assert y.shape == (5, 48)
    assert y.is_contiguous()


def sparse_model(dtype=torch.bfloat16, shape=(32, 64)):
    layers = []
    for _ in range(2):
        linear = nn.Linear(shape[1], shape[0], dtype=dtype)
        linear.weight.data = random_24(*shape, dtype, CPU)
        layers.append(Sparse24Linear.from_linear(linear))
    return nn.Sequential(*layers)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, 16, 100])
@pytest.mark.parametrize("compressed", [False, True])
def test_products_are_as_exact_as_a_dense_one(compressed, tokens, dtype):
    device = torch.device("cuda")
    torch.manual_seed(0)
    weight = random_24(208, 512, dtype, device)
    x, bias = torch.randn(tokens, 512, dtype=dtype, device=device), weight[:, 0].clone()
    layout = compress_cusparselt(weight) if compressed else None
    truth = x.double() @ weight.double().T + bias.double()
    allowed = 1.5 * (nn.functional.linear(x, weight, bias).double() - truth).norm()
    y = multiply(x, *pack(weight), bias, layout)
    assert (y.double() - truth).norm() <= allowed
    assert y.shape == (tokens, 208)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 11008), (50272, 2048)])
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
def test_the_operator_is_as_exact_as_a_dense_product_on_shapes_of_real_models(shape, tokens):
    torch.manual_seed(0)
    weight = random_24(*shape, torch.bfloat16, torch.device("cuda"))
    values, meta = pack(weight)
    compressed = compress_cusparselt(weight)
    x = torch.randn(tokens, shape[1], dtype=torch.bfloat16, device="cuda")
    y = torch.ops.mrp_lightning.linear24(x, values, meta, None, compressed)
    assert why_wrong(y, x, weight) is None
    # An input whose rows are not one after the other.
    wide = torch.randn(tokens, 2 * shape[1], dtype=torch.bfloat16, device="cuda")
    part = wide[:, : shape[1]]
    y = torch.ops.mrp_lightning.linear24(part, values, meta, None, compressed)
    assert why_wrong(y, part, weight) is None


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 128])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_operator_is_captured_and_compiled(tokens, mode):
    model = sparse_model(shape=(256, 256)).cuda()
    for layer in model:
        layer.compress()
    x = torch.randn(tokens, 256, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        expected = model(x)
        y = torch.empty_like(expected)
        graph = captured([lambda: y.copy_(model(x))])
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
        compiled = torch.compile(model, mode=mode, fullgraph=True)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected, rtol=2e-2, atol=2e-2)
