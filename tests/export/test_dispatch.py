"""The choice of a kernel, the measured times, and what each kernel refuses."""

import json
from dataclasses import replace

import pytest
import torch
from shapes import random_24, why_wrong
from torch import nn

from export.speed import captured
from mrp_lightning.errors import FormatError
from mrp_sparse.formats.sparse24 import pack
from mrp_sparse.kernels import candidates, cusparselt, dispatch
from mrp_sparse.kernels.candidates import KERNELS, Call, PackedWeight, compress
from mrp_sparse.kernels.dispatch import (
    STORED_DENSE,
    KernelTimes,
    Measurement,
    cache_path,
    choose,
    environment,
    known_times,
    multiply,
    use_times,
)
from mrp_sparse.packed_linear import Sparse24Linear

CPU = torch.device("cpu")


def row(kernel, microseconds, tokens=8, config=None, shape=(64, 32)):
    return Measurement(
        *shape, "bfloat16", tokens, kernel, config or {}, microseconds, microseconds, microseconds
    )


@pytest.fixture
def all_kernels_usable(monkeypatch):
    """As if the machine had Triton and cuSPARSELt: only the choice is tested."""
    monkeypatch.setattr(candidates, "triton_missing", lambda device: None)
    monkeypatch.setattr(cusparselt, "missing", lambda device: None)


@pytest.fixture
def table():
    """Sets the table of the CPU, and removes it afterwards."""
    yield lambda *rows: use_times(KernelTimes({}, rows), CPU)
    use_times(None, CPU)


def call(tokens, dtype=torch.bfloat16, shape=(64, 32), compressed=False):
    return Call(tokens, *shape, dtype, CPU, compressed)


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
def test_without_measurements_the_number_of_tokens_decides(
    all_kernels_usable, table, tokens, compressed, kernel
):
    table()
    assert choose(call(tokens, compressed=compressed))[0] == kernel


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine without a C compiler: Triton raises where a program is first launched."""
    triton_kernels = pytest.importorskip("mrp_sparse.kernels.triton_kernels")

    def launch(*_, **__):
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

    for program in ("gemv_program", "gemm_program", "unpack_program"):
        monkeypatch.setattr(triton_kernels, program, {(1, 1): launch, (3,): launch})
    caches = candidates.triton_missing, choose
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def test_without_a_compiler_a_warning_says_so_once_and_products_are_right(no_compiler, caplog):
    weight = random_24(24, 64, torch.bfloat16, CPU)
    for tokens in (1, 5, 5, 100):
        x = torch.randn(tokens, 64).bfloat16()
        assert torch.equal(multiply(x, *pack(weight), None), nn.functional.linear(x, weight))
        assert choose(call(tokens))[0] == "unpack-dense"
    (record,) = caplog.records
    assert "RuntimeError: Failed to find C compiler" in record.message
    assert "needs a C compiler (gcc or clang) and Python's headers" in record.message


def test_the_fastest_measured_kernel_runs_with_its_configuration(all_kernels_usable, table):
    table(
        row("cusparselt", 2.0, config={"alg_id": 3, "split_k": 2, "split_k_mode": 1}),
        row("triton-gemm", 3.0, config={"tokens": 64}),
        row(STORED_DENSE, 1.0),
    )
    assert choose(call(8, compressed=True)) == (
        "cusparselt",
        {"alg_id": 3, "split_k": 2, "split_k_mode": 1},
    )
    # A weight that was not compressed for cuSPARSELt gets the next best.
    assert choose(call(8)) == ("triton-gemm", {"tokens": 64})


def test_float32_has_no_sparse_kernel_and_is_multiplied_dense(all_kernels_usable, table):
    table()
    assert choose(call(1, torch.float32, compressed=True))[0] == "unpack-dense"


@pytest.mark.parametrize(
    ("tokens", "found"), [(1, 1), (2, None), (5, 8), (11, 8), (12, 16), (32, 16), (33, None)]
)
def test_a_table_speaks_for_numbers_of_tokens_near_the_measured_ones(tokens, found):
    measured = KernelTimes({}, (row("a", 1.0, 1), row("b", 1.0, 8), row("c", 1.0, 16)))
    rows = measured.at(call(tokens))
    assert (rows[0].tokens if rows else None) == found


def test_a_table_does_not_speak_for_other_shapes_or_dtypes():
    measured = KernelTimes({}, (row("a", 1.0),))
    assert measured.at(call(8))
    assert not measured.at(call(8, shape=(32, 64)))
    assert not measured.at(call(8, torch.float16))


def test_newer_measurements_replace_those_of_the_same_problem():
    old = KernelTimes({"device": "x"}, (row("a", 1.0, 8), row("b", 2.0, 8), row("a", 1.0, 16)))
    new = old.merged([row("b", 3.0, 8)])
    assert new.measurements == (row("a", 1.0, 16), row("b", 3.0, 8))
    assert new.environment == {"device": "x"}


def test_a_table_survives_the_disk(tmp_path):
    path = tmp_path / "new" / "table.json"
    saved = KernelTimes({"device": "x"}, (row("triton-gemv", 1.5, 1, {"rows": 8}),))
    saved.save(path)
    assert KernelTimes.load(path) == saved
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]


@pytest.mark.parametrize("content", ["{", "{}", '{"version": 99}', "[]"])
def test_a_spoilt_table_is_named(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(FormatError, match=r"table\.json .*[Mm]easure again|measure again"):
        KernelTimes.load(path)


@pytest.mark.parametrize("name", ["out_features", "in_features", "tokens", "microseconds"])
@pytest.mark.parametrize("value", ["1", 0, None])
def test_a_row_without_a_number_is_refused(tmp_path, name, value):
    path = tmp_path / "table.json"
    KernelTimes({}, (replace(row("a", 1.0), **{name: value}),)).save(path)
    with pytest.raises(FormatError, match="measure again"):
        KernelTimes.load(path)


def test_the_table_of_this_environment_is_read_from_the_cache(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = environment(CPU)
    path = cache_path(here)
    assert path.is_relative_to(tmp_path)
    assert cache_path({**here, "torch": "other"}) != path
    try:
        KernelTimes(here, (row("a", 1.0),)).save(path)
        use_times(None, CPU)
        assert known_times(CPU).measurements == (row("a", 1.0),)
        path.write_text(json.dumps({"version": 0}))
        use_times(None, CPU)
        assert known_times(CPU).measurements == ()
        assert "Until then kernels are chosen by number of tokens" in caplog.text
    finally:
        use_times(None, CPU)


def test_a_device_without_index_is_the_current_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    mine = KernelTimes({"device": "x"})
    use_times(mine, torch.device("cuda"))
    try:
        assert known_times(torch.device("cuda", 3)) is mine
    finally:
        dispatch._times.pop("cuda:3")


def test_the_kernel_that_was_chosen_computes_the_layer(table):
    table()
    torch.manual_seed(0)
    weight = random_24(24, 32, torch.float32, CPU)
    x, bias = torch.randn(5, 3, 32), torch.randn(24)
    torch.testing.assert_close(multiply(x, *pack(weight), bias), x @ weight.T + bias)
    with pytest.raises(ValueError, match=r"input is torch\.float64 and the packed weight"):
        multiply(x.double(), *pack(weight), bias)


def test_cusparselt_says_what_it_refuses():
    assert "runs on CUDA devices, not on 'cpu'" in cusparselt.missing(CPU)
    assert cusparselt.refuse(32, 64, torch.bfloat16) is None
    assert "multiples of 16, not 24×64" in cusparselt.refuse(24, 64, torch.float16)
    assert "not float32" in cusparselt.refuse(32, 64, torch.float32)


def test_the_installed_torch_has_the_private_functions_of_cusparselt():
    arguments = {a.name for a in torch.ops.aten._cslt_sparse_mm.default._schema.arguments}
    assert {"alg_id", "split_k", "split_k_mode", "transpose_result", "bias"} <= arguments
    # The meta kernel checks operands and gives the shape: tokens first, contiguous.
    x = torch.empty(5, 32, dtype=torch.bfloat16, device="meta")
    compressed = torch.empty(48, 18, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(48, dtype=torch.bfloat16, device="meta")
    y = cusparselt.matmul(x, compressed, bias, alg_id=1, split_k=2, split_k_mode=0)
    assert y.shape == (5, 48)
    assert y.is_contiguous()


def test_kernels_refuse_calls_with_a_reason():
    assert KERNELS["triton-gemv"].refuse(call(2)) == (
        "the matrix-vector kernel takes one token, not 2"
    )
    assert KERNELS["triton-gemm"].refuse(call(0)) == "there are no tokens"
    assert "at most 256 tokens, not 257" in KERNELS["triton-gemm"].refuse(call(257))
    assert KERNELS["cusparselt"].refuse(call(4)) is not None
    assert KERNELS["unpack-dense"].refuse(call(4)) is None


def test_triton_kernels_refuse_dtypes_and_sizes(all_kernels_usable):
    refuse = KERNELS["triton-gemm"].refuse
    assert refuse(call(4)) is None
    assert "float16 and bfloat16, not float32" in refuse(call(4, torch.float32))
    assert "multiple of 8" in refuse(call(4, shape=(64, 12)))
    assert "at most" in refuse(call(4, shape=(2**20, 2**12)))


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
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_as_exact_as_a_dense_product(name, tokens, dtype):
    device = torch.device("cuda")
    problem = Call(tokens, 208, 512, dtype, device, compressed=True)
    if reason := KERNELS[name].refuse(problem):
        pytest.skip(reason)
    torch.manual_seed(0)
    weight = random_24(208, 512, dtype, device)
    x, bias = torch.randn(tokens, 512, dtype=dtype, device=device), weight[:, 0].clone()
    packed = PackedWeight(*pack(weight))
    if name == "cusparselt":
        packed = packed._replace(compressed=compress(*packed[:2]))
    truth = x.double() @ weight.double().T + bias.double()
    allowed = 1.5 * (nn.functional.linear(x, weight, bias).double() - truth).norm()
    y = KERNELS[name].multiply(x, packed, bias)
    assert (y.double() - truth).norm() <= allowed
    assert y.shape == (tokens, 208)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1024, 4096), (4096, 11008), (50272, 2048)])
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
def test_the_operator_is_as_exact_as_a_dense_product_on_shapes_of_real_models(shape, tokens):
    torch.manual_seed(0)
    weight = random_24(*shape, torch.bfloat16, torch.device("cuda"))
    values, meta = pack(weight)
    compressed = compress(values, meta)
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
