"""The bitmask layer and its operator, against a dense `nn.Linear` in float64."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from export import BitmaskLinear


def pruned_linear(columns: int, rows: int, bias: bool, kept: float = 0.4) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(columns, rows, bias=bias).requires_grad_(False)
    linear.weight *= torch.rand(rows, columns) < kept
    linear.weight[rows // 2] = 0.0
    return linear


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def linear(request: pytest.FixtureRequest) -> nn.Linear:
    return pruned_linear(37, 24, request.param)


def assert_as_exact(found: Tensor, linear: nn.Linear, x: Tensor) -> None:
    """The error against float64 is at most that of rounding the result and of float32 sums."""
    assert found.shape == (*x.shape[:-1], linear.out_features)
    assert found.dtype == x.dtype
    assert found.is_contiguous()
    bias = None if linear.bias is None else linear.bias.double()
    exact = nn.functional.linear(x.double(), linear.weight.double(), bias)
    scale = (x.double().abs() @ linear.weight.double().abs().T).max() if x.numel() else 1.0
    rounding = torch.finfo(x.dtype).eps
    bound = rounding * exact.abs() + 4 * torch.finfo(torch.float32).eps * scale
    assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("shape", [(37,), (1, 37), (3, 5, 37), (40, 37), (0, 37), (2, 0, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_computes_what_the_dense_layer_computes(shape, dtype, linear):
    linear = linear.to(dtype)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_as_exact(BitmaskLinear.from_linear(linear)(x), linear, x)


def test_the_operator_follows_the_rules_of_torch(linear):
    layer = BitmaskLinear.from_linear(linear)
    for x in (torch.randn(3, 37), torch.randn(2, 3, 37, requires_grad=True)):
        torch.library.opcheck(
            torch.ops.mrp_lightning.linear_bitmask,
            (x, layer.weight, layer.weight_bits, layer.offsets, layer.bias),
        )


def test_copies_and_state_dicts_keep_it(linear):
    layer = BitmaskLinear.from_linear(linear)
    x = torch.randn(4, 37)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert "offsets" not in layer.state_dict()
    other = BitmaskLinear(37, 24, layer.weight.numel(), bias=linear.bias is not None)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = BitmaskLinear(37, 24, layer.weight.numel(), linear.bias is not None, device="meta")
    assert other.offsets is None
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(other(x), expected)


def test_a_change_of_dtype_leaves_the_bits_alone(linear):
    layer = BitmaskLinear.from_linear(linear)
    half = copy.deepcopy(layer).half()
    assert half.weight.dtype == torch.float16
    assert torch.equal(half.weight_bits, layer.weight_bits)
    assert torch.equal(half.offsets, layer.offsets)
    x = torch.randn(4, 37).half()
    assert_as_exact(half(x), linear.half(), x)


def test_an_input_of_another_dtype_is_refused(linear):
    with pytest.raises(RuntimeError):
        BitmaskLinear.from_linear(linear)(torch.randn(2, 37).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 20])
def test_the_operator_refuses_an_input_too_narrow_for_the_bits(tokens, dtype):
    layer = BitmaskLinear.from_linear(nn.Linear(37, 4, dtype=dtype))
    packed = layer.weight, layer.weight_bits, layer.offsets, layer.bias
    for width in (32, 33, 36):
        with pytest.raises(RuntimeError, match="columns"):
            torch.ops.mrp_lightning.linear_bitmask(torch.ones(tokens, width, dtype=dtype), *packed)
    fewer = layer.weight[:-1], *packed[1:]
    with pytest.raises(RuntimeError, match="kept"):
        torch.ops.mrp_lightning.linear_bitmask(torch.ones(tokens, 37, dtype=dtype), *fewer)
