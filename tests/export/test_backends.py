"""The choice of a kernel, the measured times, and what each back-end refuses."""

import contextlib
import itertools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from export import timing
from export.backends import BACKENDS, SUBCLASSES, apply, not_faster
from export.timing import random_24
from mrp_lightning.errors import FormatError, OptionError
from mrp_sparse.formats.sparse24 import broken_groups, pack, unpack
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


def test_random_weights_are_2_of_4():
    weight = random_24(16, 64, torch.bfloat16, CPU)
    assert broken_groups(weight) == 0
    assert int((weight != 0).sum()) == weight.numel() // 2


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_back_end_says_why_it_cannot_run_on_a_cpu_and_changes_nothing(backend):
    model = sparse_model()
    missing = "CUDA|torchao is not installed"
    with pytest.raises(OptionError, match=rf"--backend {backend}` cannot run here: .*({missing})"):
        apply(model, backend)
    assert all(isinstance(layer, Sparse24Linear) for layer in model)


def test_unknown_back_ends_and_targets_are_refused():
    with pytest.raises(OptionError, match="none of auto, triton, torch, torchao, torchao-fp8"):
        apply(sparse_model(), "cutlass")
    with pytest.raises(OptionError, match="none of decode, prefill, both"):
        apply(sparse_model(), "auto", "training")


@pytest.mark.parametrize(
    ("backend", "dtype", "shape", "reason"),
    [
        ("torch", torch.bfloat16, (32, 64), None),
        ("torch", torch.float32, (32, 64), "float16 and bfloat16, not float32"),
        ("torch", torch.bfloat16, (24, 64), "24×64 is not a multiple of 16×16"),
        ("torchao", torch.float16, (32, 40), "32×40 is not a multiple of 16×16"),
        ("torchao-fp8", torch.bfloat16, (32, 64), None),
        ("torchao-fp8", torch.float16, (32, 64), "from bfloat16, not float16"),
        ("torchao-fp8", torch.bfloat16, (32, 48), "32×48"),
    ],
)
def test_back_ends_refuse_layers_with_a_reason(backend, dtype, shape, reason):
    refused = SUBCLASSES[backend].refuse(nn.Linear(shape[1], shape[0], dtype=dtype))
    assert refused is None if reason is None else reason in refused


def test_a_refused_layer_becomes_dense_and_is_listed(all_kernels_usable, monkeypatch):
    from export import backends as apply_module

    monkeypatch.setattr(apply_module, "why_not_here", lambda backend, device: None)
    model = sparse_model(torch.float32)
    x = torch.randn(3, 64)
    before = model[0](x)
    dense = apply(model, "triton")
    assert set(dense) == {"0", "1"}
    assert "not float32" in dense["0"]
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(model[0](x), before)


def test_a_layer_that_is_nowhere_faster_stays_dense(all_kernels_usable, monkeypatch, table):
    from export import backends as apply_module

    monkeypatch.setattr(apply_module, "why_not_here", lambda backend, device: None)
    table(*at_few_tokens(STORED_DENSE, 1.0), *at_few_tokens("triton-gemm", 2.0))
    model = sparse_model()
    reason = "not faster on this device: 0.50× at 1 tokens, 0.50× at 8 tokens"
    assert apply(model, "auto", "decode") == {"0": reason, "1": reason}


def at_few_tokens(kernel, microseconds):
    return [row(kernel, microseconds, tokens, shape=(32, 64)) for tokens in (1, 8)]


@pytest.mark.parametrize(
    ("target", "compressed", "rows"),
    [
        ("decode", False, [row("triton-gemv", 0.5, 1, shape=(32, 64))]),
        ("decode", True, at_few_tokens("cusparselt", 0.5)),
        ("both", False, []),  # prefill was not measured
    ],
)
def test_a_layer_that_may_be_faster_stays_sparse(all_kernels_usable, target, compressed, rows):
    layer = sparse_model()[0]
    layer.compressed = torch.zeros(1) if compressed else None
    slow = [*at_few_tokens(STORED_DENSE, 1.0), *at_few_tokens("triton-gemm", 2.0)]
    assert not_faster(layer, KernelTimes({}, (*slow, *rows)), target) is None


def test_kernels_that_cannot_run_a_layer_do_not_keep_it_sparse(all_kernels_usable):
    layer = sparse_model()[0]
    rows = [*at_few_tokens(STORED_DENSE, 1.0), *at_few_tokens("cusparselt", 0.5)]
    expected = "not faster on this device: no kernel ran at 1 tokens, no kernel ran at 8 tokens"
    assert not_faster(layer, KernelTimes({}, tuple(rows)), "decode") == expected  # not compressed
    rows += at_few_tokens("triton-gemm", 4.0)
    rows += [row("triton-gemv", 0.1, 8, shape=(32, 64))]  # which takes one token, not 8
    expected = "not faster on this device: 0.25× at 1 tokens, 0.25× at 8 tokens"
    assert not_faster(layer, KernelTimes({}, tuple(rows)), "decode") == expected


@pytest.mark.parametrize("target", ["decode", "prefill", "both"])
def test_layers_are_compressed_for_prefill_alone(all_kernels_usable, monkeypatch, table, target):
    from export import backends as apply_module

    table()
    monkeypatch.setattr(apply_module, "why_not_here", lambda backend, device: None)
    monkeypatch.setattr(cusparselt, "compress", lambda weight: weight.clone())
    model = sparse_model()
    dense = model[0].dense_weight()
    assert apply(model, "auto", target) == {}
    if target == "decode":
        assert model[0].compressed is None
    else:
        assert torch.equal(model[0].compressed, dense)


@pytest.fixture
def without_a_clock(monkeypatch):
    """Kernels run once where they would be captured and timed: the contest itself is tested."""
    durations = itertools.count(1.0)

    def graphed(calls):
        for run in calls:
            run()
        microseconds = next(durations)
        return lambda: microseconds

    monkeypatch.setattr(timing, "graphed", graphed)
    monkeypatch.setattr(timing, "copies", lambda size: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def contest(tokens=(1, 8, 16)):
    found = list(timing.measure(64, 32, torch.bfloat16, CPU, tokens, repeats=2))
    return [m for measured, _ in found for m in measured], [
        f for _, failed in found for f in failed
    ]


def kernel(run, refuse=lambda call: None, configs=({},)):
    return candidates.Kernel(run, refuse, configs)


def dense_product(x, weight, bias, **config):
    return nn.functional.linear(x, unpack(weight.values, weight.meta), bias)


def test_kernels_that_are_refused_that_fail_or_that_are_wrong_lose_nothing_else(
    without_a_clock, monkeypatch
):
    def broken(x, weight, bias, **config):
        raise RuntimeError("CUDA error: no kernel image\nand more")

    def inexact(x, weight, bias, **config):
        return 1.1 * dense_product(x, weight, bias)

    kernels = {
        "refused": kernel(dense_product, lambda call: "too small"),
        "broken": kernel(broken, configs=({"rows": 1}, {"rows": 2})),
        "wrong": kernel(inexact),
        "misshapen": kernel(lambda x, *_: x),
        "good": kernel(dense_product),
    }
    monkeypatch.setattr(timing, "KERNELS", kernels)
    measured, failures = contest(tokens=(1, 8))
    assert [(m.kernel, m.tokens) for m in measured] == [
        (STORED_DENSE, 1),
        ("good", 1),
        (STORED_DENSE, 8),
        ("good", 8),
    ]
    reasons = {f.kernel: f.reason for f in failures if f.tokens == 8}
    assert reasons.keys() == {"refused", "broken", "wrong", "misshapen"}
    assert reasons["refused"] == "too small"
    assert reasons["broken"].endswith("RuntimeError: CUDA error: no kernel image")
    assert "2 configurations failed" in reasons["broken"]
    assert "wrong result: its relative error is 1.0e-01" in reasons["wrong"]
    assert "wrong result: its shape is (8, 32), not (8, 64)" in reasons["misshapen"]


def test_a_search_for_a_configuration_holds_for_similar_numbers_of_tokens(
    without_a_clock, monkeypatch
):
    tried = []

    def run(x, weight, bias, rows):
        tried.append((x.shape[0], rows))
        return dense_product(x, weight, bias)

    configs = ({"rows": 8}, {"rows": 4})
    monkeypatch.setattr(timing, "KERNELS", {"mine": kernel(run, configs=configs)})
    measured, _ = contest(tokens=(1, 16, 64))
    assert {rows for tokens, rows in tried if tokens == 1} == {8, 4}
    assert {rows for tokens, rows in tried if tokens == 16} == {8}
    assert {rows for tokens, rows in tried if tokens == 64} == {8, 4}
    assert all(m.config == {"rows": 8} for m in measured if m.kernel == "mine")


def test_running_out_of_memory_ends_one_number_of_tokens(without_a_clock, monkeypatch):
    graphed = timing.graphed

    def limited(calls):
        if calls[0].args[0].shape[0] == 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return graphed(calls)

    monkeypatch.setattr(timing, "graphed", limited)
    monkeypatch.setattr(timing, "KERNELS", {"good": kernel(dense_product)})
    measured, failures = contest(tokens=(1, 8, 16))
    assert {m.tokens for m in measured} == {1, 16}
    assert [(f.tokens, f.kernel, f.reason) for f in failures] == [
        (8, STORED_DENSE, "OutOfMemoryError: CUDA out of memory")
    ]


def test_a_configuration_that_a_card_has_no_memory_for_is_skipped(
    without_a_clock, monkeypatch, caplog
):
    errors = pytest.importorskip("triton.runtime.errors")

    def large(x, weight, bias, *, columns):
        if columns > 128:
            raise errors.OutOfResources(102400, 101376, "shared memory")
        return dense_product(x, weight, bias)

    configs = ({"columns": 256}, {"columns": 128})
    monkeypatch.setattr(timing, "KERNELS", {"large": kernel(large, configs=configs)})
    measured, failures = contest(tokens=(8,))
    assert failures == []
    assert [m.config for m in measured if m.kernel == "large"] == [{"columns": 128}]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


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
    assert timing.why_wrong(y, x, weight) is None
    # An input whose rows are not one after the other.
    wide = torch.randn(tokens, 2 * shape[1], dtype=torch.bfloat16, device="cuda")
    part = wide[:, : shape[1]]
    y = torch.ops.mrp_lightning.linear24(part, values, meta, None, compressed)
    assert timing.why_wrong(y, part, weight) is None


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 128])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_operator_is_captured_and_compiled(tokens, mode):
    from export.timing import captured

    model = sparse_model(shape=(256, 256)).cuda()
    for layer in model:
        layer.compressed = compress(layer.weight, layer.weight_meta)
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


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_back_ends_compute_the_layer(backend):
    model = sparse_model(shape=(64, 64)).cuda()
    x = torch.randn(16, 64, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        expected = model(x)
        try:
            dense = apply(model, backend)
        except OptionError as error:
            pytest.skip(str(error))
        assert not dense
        error = (model(x) - expected).norm() / expected.norm()
    assert error < (0.1 if backend == "torchao-fp8" else 0.01)
