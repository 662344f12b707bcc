"""What all packed layers keep to, against a dense `nn.Linear`."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import export
from export import Bitmask4Linear, BitmaskLinear, Sparse24Linear
from mrp_lightning.errors import FormatError, OptionError

from .conftest import keep_two_of_four, onto_grid

Prune = Callable[[Tensor], Tensor]


def keep_some(weight: Tensor) -> Tensor:
    kept = torch.rand(weight.shape) < 0.4
    kept[len(weight) // 2] = False
    return weight * kept


def keep_some_of_four_bits(weight: Tensor) -> Tensor:
    return onto_grid(keep_some(weight))


KINDS = [
    (Sparse24Linear, 32, keep_two_of_four),
    (BitmaskLinear, 37, keep_some),
    (Bitmask4Linear, 69, keep_some_of_four_bits),
]


@pytest.fixture(params=KINDS, ids=["2:4", "bitmask", "bitmask4"])
def kind(request: pytest.FixtureRequest) -> tuple[Any, int, Prune]:
    torch.manual_seed(0)
    return request.param


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def linear(kind: tuple[Any, int, Prune], request: pytest.FixtureRequest) -> nn.Linear:
    _, columns, prune = kind
    linear = nn.Linear(columns, 24, bias=request.param).requires_grad_(False)
    linear.weight.data = prune(linear.weight.data)
    return linear


@pytest.fixture
def layer(kind: tuple[Any, int, Prune], linear: nn.Linear) -> Any:
    return kind[0].from_linear(linear)


def test_inputs_need_not_be_contiguous(layer, linear):
    x = torch.randn(5, 3, linear.in_features).transpose(0, 1)
    assert torch.allclose(layer(x), linear(x), atol=1e-6)


def test_an_input_of_another_width_is_refused(layer, linear):
    columns = linear.in_features
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    for width in {*range(columns - 5, columns + 12), 2 * columns, 1, 0} - {columns}:
        for shape in ((width,), (2, width), (0, width)):
            with pytest.raises(RuntimeError, match=f"expected {columns} columns.*got"):
                layer(torch.ones(shape))
    for width in (columns - 1, columns + 1):
        with pytest.raises(RuntimeError):
            compiled(torch.ones(2, width))
    assert torch.equal(compiled(torch.ones(2, columns)), layer(torch.ones(2, columns)))
    with pytest.raises(RuntimeError, match=f"expected {columns} columns"):
        torch.export.export(layer, (torch.ones(2, columns + 1),))


def test_an_exported_layer_refuses_an_input_of_another_width(layer, linear):
    some = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    exported = torch.export.export(
        layer, (torch.ones(2, linear.in_features),), dynamic_shapes=(some,)
    )
    with pytest.raises((RuntimeError, AssertionError)):
        exported.module()(torch.ones(2, linear.in_features + 1))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_into_one_graph_for_any_number_of_tokens(backend, layer, linear):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (2, 3, 40):
        x = torch.randn(tokens, linear.in_features)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
def test_autocast_does_what_it_does_to_a_dense_layer(autocast, given, stored, layer, linear):
    layer, linear = layer.to(stored), linear.to(stored)
    x = torch.randn(20, linear.in_features).to(given).requires_grad_()
    with torch.autocast("cpu", autocast):
        if (given == torch.float64) != (stored == torch.float64):
            for refuses in (linear, layer):
                with pytest.raises(RuntimeError):
                    refuses(x)
            return
        expected, found = linear(x), layer(x)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    (wanted,) = torch.autograd.grad(expected.sum(), x)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient.dtype == x.dtype
    assert torch.allclose(gradient, wanted, rtol=0.02, atol=0.02)


def test_autocast_reaches_a_layer_after_another_one(layer, linear):
    """As in training with bf16-mixed: eager, in one compiled graph, and exported."""
    columns = linear.in_features
    first = nn.Linear(columns, columns)
    x = torch.randn(3, columns)

    class Network(nn.Module):
        def __init__(self, second: nn.Module) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.second(self.first(x))

    network = Network(layer)
    found = network(x)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found, Network(linear)(x), rtol=0.02, atol=0.02)
    torch._dynamo.reset()
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(network, fullgraph=True, backend=backend)
        assert torch.equal(compiled(x), found)
    assert torch.equal(torch.export.export(network, (x,)).module()(x), found)
    outside = torch.compile(nn.Sequential(first, layer), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(outside(x), found)
    assert outside(x).dtype == torch.float32


def test_it_exports(layer, linear):
    tokens = torch.export.Dim("tokens", min=2, max=64)
    given = (torch.randn(4, linear.in_features),)
    exported = torch.export.export(layer, given, dynamic_shapes=({0: tokens},))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    x = torch.randn(9, linear.in_features)
    assert torch.equal(torch.export.load(file).module()(x), layer(x))


def test_it_goes_back_to_a_dense_layer(layer, linear):
    dense = layer.to_linear()
    assert torch.equal(dense.weight, linear.weight + 0.0)
    x = torch.randn(4, linear.in_features)
    assert torch.equal(dense(x), linear(x))


def test_conv1d_is_packed_along_its_inputs(kind):
    packed, columns, prune = kind
    conv = Conv1D(24, columns)
    conv.weight.data = prune(conv.weight.data.T).T.contiguous()
    layer = packed.from_linear(conv)
    assert (layer.in_features, layer.out_features) == (columns, 24)
    x = torch.randn(2, 3, columns)
    assert torch.allclose(layer(x), conv(x), atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)])
def test_gradients_reach_the_input_and_the_bias(shape, layer, linear):
    x = torch.randn(*shape, linear.in_features, requires_grad=True)
    y = torch.randn(*shape, 24)
    if layer.bias is not None:
        layer.bias.requires_grad_()
        linear.bias.requires_grad_()
    (layer(x) * y).sum().backward()
    found, x.grad = x.grad, None
    (linear(x) * y).sum().backward()
    assert torch.allclose(found, x.grad, atol=1e-6)
    if layer.bias is not None:
        assert torch.allclose(layer.bias.grad, linear.bias.grad, atol=1e-6)


def test_training_the_packed_weight_is_refused(layer, linear):
    trained = layer.weight if layer.weight.is_floating_point() else layer.weight_scales
    trained.requires_grad_()
    with pytest.raises(NotImplementedError, match="cannot be trained.*dequantize"):
        layer(torch.randn(2, linear.in_features)).sum().backward()


@pytest.mark.parametrize("kind", [Sparse24Linear, BitmaskLinear, Bitmask4Linear])
def test_tensors_that_do_not_belong_together_make_no_layer(kind):
    weight = torch.zeros(8, 64)
    weight[:, ::4] = 1.0
    tensors = kind.FORMAT.pack(weight)
    assert torch.equal(kind.from_packed(tensors, 64).dense_weight(), weight)
    values, places, *rest = tensors
    for wrong in (
        tensors[:1],
        [*tensors, values],
        [values, places[:4], *rest],
        [values, places.int(), *rest],
        [values, torch.tensor(1, dtype=torch.uint8), *rest],
    ):
        with pytest.raises(FormatError, match=f"{kind.__name__}.from_packed"):
            kind.from_packed(wrong, 64)
    with pytest.raises(OptionError, match="`columns` must be"):
        kind.from_packed(tensors, "64")
    with pytest.raises(FormatError, match="got list, list"):
        kind.from_packed([tensor.tolist() for tensor in tensors], 64)


def test_what_pack_did_not_give_is_not_unpacked():
    weight = torch.zeros(8, 64)
    weight[:, ::4] = 1.0
    values, meta = export.pack(weight)
    assert torch.equal(export.unpack(values, meta), weight)
    for wrong in ((values, meta[:4]), (values[0], meta[0]), (values, meta.int()), (meta, values)):
        with pytest.raises(FormatError, match="the two tensors that `pack` gave"):
            export.unpack(*wrong)
    with pytest.raises(FormatError, match="`meta` is damaged"):
        export.unpack(values, torch.zeros_like(meta))
    with pytest.raises(OptionError, match="`values` must be"):
        export.unpack(values.tolist(), meta)
