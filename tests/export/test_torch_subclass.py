"""torch's and torchao's 2:4 tensors, on CPU kernels that stand in for the CUDA ones."""

import pytest
import torch
from torch import nn
from torch.sparse import SparseSemiStructuredTensorCUTLASS

from export.backends import apply
from export.timing import random_24
from mrp_sparse.packed_linear import Sparse24Linear

CPU = torch.device("cpu")


def layer(rows, columns):
    linear = nn.Linear(columns, rows, dtype=torch.bfloat16)
    linear.weight.data = random_24(rows, columns, torch.bfloat16, CPU)
    return Sparse24Linear.from_linear(linear)


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
@pytest.mark.parametrize("backend", ["torch", "torchao"])
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_the_layer_computes_the_same(torch_subclass_on_cpu, backend, tokens):
    if backend == "torchao":
        pytest.importorskip("torchao.sparsity", reason="needs the extra `torchao`")
    torch.manual_seed(0)
    model = nn.Sequential(layer(32, 64), layer(33, 32))  # 33 rows fit no tile
    x = torch.randn(tokens, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        assert apply(model, backend) == {"1": "33×32 is not a multiple of 32×64"}
        assert isinstance(model[0].weight, SparseSemiStructuredTensorCUTLASS)
        assert type(model[1]) is nn.Linear
        # The bias is added after the product was rounded, where the operator rounds once.
        assert (model(x) - expected).norm() < 0.01 * expected.norm()


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_memory_is_counted_by_parts_not_by_the_matrix_it_stands_for(torch_subclass_on_cpu):
    from mrp_sparse.decoding import storage_bytes

    model = nn.Sequential(layer(32, 64))
    bias_bytes = 32 * 2
    assert storage_bytes(model) - bias_bytes == 32 * 64 * 2 * 0.5625
    apply(model, "torch")
    assert model[0].weight.nbytes == 32 * 64 * 2
    assert storage_bytes(model) - bias_bytes == 32 * 64 * 2 * 0.5625


def test_the_fp8_configuration_exists_in_the_installed_torchao():
    pytest.importorskip("torchao", reason="needs the extra `torchao`")
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow
    from torchao.quantization.quantize_.workflows import Float8PackingFormat

    packing = Float8PackingFormat.SPARSE_2D_DATA_2D_METADATA
    config = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), packing_format=packing)
    assert config.packing_format is packing
