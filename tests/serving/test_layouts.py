"""Packed tensors of layers as vLLM splits and fuses them, which arrive in any order."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm", reason="needs vLLM: `make vllm`")

from launches import counted
from served import four_bits, removed, two_of_four
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader import weight_utils
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from mrp_ground.errors import FormatError
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.sparse24 import SPARSE24
from mrp_sparse.vllm.configuration import CONFIGS
from mrp_sparse.vllm.linear import PackedMethod, mark

PRUNINGS = {BITMASK: removed, BITMASK4: four_bits, SPARSE24: two_of_four}
COLUMNS = 256
forms = pytest.mark.parametrize("form", PRUNINGS, ids=lambda form: form.option)


def weight(form, rows):
    return PRUNINGS[form](torch.randn(rows, COLUMNS)).bfloat16()


def layer(kind, **attributes):
    """A layer of vLLM without a group of workers, as one of them sees it."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.__dict__ |= {"prefix": "layer", **attributes}
    return made


def read(form, made, sizes, columns, output_size, stored):
    """Let a layer read weights by shard, their tensors shuffled; return its dense weight and y."""
    method = PackedMethod(form)
    method.create_weights(made, columns, sizes, COLUMNS, output_size, torch.bfloat16)
    named = [(shard, zip(form.names, form.pack(w), strict=True)) for shard, w in stored]
    pairs = [(shard, *pair) for shard, tensors in named for pair in tensors]
    random.Random(0).shuffle(pairs)
    for shard, name, tensor in pairs:
        mark(tensor)
        param = getattr(made, name)
        param.weight_loader(param, tensor, *(() if shard is None else (shard,)))
    method.process_weights_after_loading(made)
    x = torch.randn(3, columns).bfloat16()
    return form.unpack(*(getattr(made, name) for name in form.names), columns), x, method


@forms
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_queries_keys_and_values_of_each_worker(form, workers, fused):
    q, k, v = (weight(form, rows) for rows in (64, 16, 16))
    copies = max(1, workers // 2)  # of two heads of keys and values, 8 rows each
    high, low = 64 // workers, 16 // min(workers, 2)
    stored = [(None, torch.cat([q, k, v]))] if fused else [("q", q), ("k", k), ("v", v)]
    for rank in range(workers):
        made = layer(QKVParallelLinear, tp_rank=rank, tp_size=workers, num_kv_head_replicas=copies)
        all_rows = 64 + 2 * low * workers
        dense, x, method = read(form, made, [high, low, low], COLUMNS, all_rows, stored)
        at = rank // copies * low
        expected = torch.cat([q[rank * high :][:high], k[at : at + low], v[at : at + low]])
        assert torch.equal(dense, expected)
        assert torch.allclose(method.apply(made, x), x @ expected.T, atol=0.3, rtol=0.02)


@forms
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_columns_of_each_worker(form, workers):
    whole, columns = weight(form, 48), COLUMNS // workers
    for rank in range(workers):
        made = layer(RowParallelLinear, tp_rank=rank, tp_size=workers)
        dense, *_ = read(form, made, [48], columns, 48, [(None, whole)])
        assert torch.equal(dense, whole[:, rank * columns :][:, :columns])


@forms
def test_a_packed_head_ends_with_rows_of_zeros(form):
    whole = weight(form, 50)
    for begin, end in ((0, 32), (32, 50)):
        shard = SimpleNamespace(org_vocab_start_index=begin, org_vocab_end_index=end)
        made = layer(ParallelLMHead, tp_rank=0, tp_size=2, org_vocab_size=50, shard_indices=shard)
        dense, *_ = read(form, made, [32], COLUMNS, 64, [(None, whole)])
        assert torch.equal(dense[: end - begin], whole[begin:end])
        assert not dense[end - begin :].any()


def test_columns_that_do_not_fit_name_the_next_step():
    made = layer(RowParallelLinear, tp_rank=0, tp_size=8)
    with pytest.raises(FormatError, match=r"32 of its 256 columns.* Choose another `tensor_par"):
        PackedMethod(BITMASK4).create_weights(made, 32, [48], COLUMNS, 48, torch.bfloat16)


def test_a_copy_of_what_was_read_is_refused():
    made = layer(RowParallelLinear, tp_rank=0, tp_size=1)
    PackedMethod(BITMASK).create_weights(made, COLUMNS, [48], COLUMNS, 48, torch.bfloat16)
    for name, tensor in zip(BITMASK.names, BITMASK.pack(weight(BITMASK, 48)), strict=True):
        mark(tensor)
        rearranged = tensor.flip(0) if name == "weight" else tensor
        getattr(made, name).weight_loader(getattr(made, name), rearranged)
    with pytest.raises(FormatError, match="weight is not as in the file"):
        PackedMethod(BITMASK).process_weights_after_loading(made)


@forms
def test_apply_on_a_device_lets_the_host_wait_for_nothing(form, second):
    """A CUDA graph would not record it. Other devices unpack by torch, a GPU by Triton."""
    whole = weight(form, 48)
    made = layer(RowParallelLinear, tp_rank=0, tp_size=1)
    _, x, method = read(form, made, [48], COLUMNS, 48, [(None, whole)])
    made.to(second)
    x_there = x.to(second)
    with counted() as launches:
        y = method.apply(made, x_there)
    assert launches["kernels"] > 0
    assert not launches["syncs"] + launches["uploads"]
    assert torch.allclose(y.cpu(), x @ whole.T, atol=0.3, rtol=0.02)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True)])
def test_gpus_that_triton_does_not_support_are_refused(config, capability, runs, monkeypatch):
    quantized = SimpleNamespace(quantization="packed", dtype=torch.bfloat16, model="a/b")
    quantized.hf_config = quantized.revision = None
    monkeypatch.setattr(weight_utils, "get_quant_config", lambda *_: config())
    monkeypatch.setattr(
        type(current_platform), "get_device_capability", lambda *_: DeviceCapability(*capability)
    )
    expected = nullcontext() if runs else pytest.raises(ValueError, match="Minimum capability: 80")
    with expected:
        assert VllmConfig.get_quantization_config(quantized, None).form is config.form
