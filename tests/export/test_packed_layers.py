"""What all packed layers keep to, against a dense `nn.Linear`."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import export
from export import Bitmask4Linear, BitmaskLinear, Sparse24Linear
from mrp_lightning.errors import FormatError, OptionError, PatternError, TargetError

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


@pytest.fixture
def linear(kind: tuple[Any, int, Prune], request: pytest.FixtureRequest) -> nn.Linear:
    _, columns, prune = kind
    linear = nn.Linear(columns, 24, bias=getattr(request, "param", True)).requires_grad_(False)
    linear.weight.data = prune(linear.weight.data)
    return linear


with_and_without_bias = pytest.mark.parametrize(
    "linear", [True, False], indirect=True, ids=["bias", "no bias"]
)


@pytest.fixture
def layer(kind: tuple[Any, int, Prune], linear: nn.Linear) -> Any:
    return kind[0].from_linear(linear)


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


@with_and_without_bias
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_computes_what_the_dense_layer_computes(dtype, kind, linear):
    linear = linear.to(dtype)
    layer = kind[0].from_linear(linear)
    for shape in ((), (1,), (3, 5), (40,), (0,), (2, 0)):
        x = torch.randn(*shape, linear.in_features).to(dtype)
        found = layer(x)
        assert_as_exact(found, linear, x)
        if kind[0] is Sparse24Linear:  # which a CPU multiplies dense
            assert torch.equal(found, linear(x))


OPERATORS: dict[Any, tuple[Any, tuple[str, ...]]] = {
    Sparse24Linear: (torch.ops.mrp_lightning.linear24, ("weight", "weight_meta", "bias")),
    BitmaskLinear: (
        torch.ops.mrp_lightning.linear_bitmask,
        ("weight", "weight_bits", "offsets", "bias"),
    ),
    Bitmask4Linear: (
        torch.ops.mrp_lightning.linear_bitmask4,
        ("weight", "weight_bits", "weight_scales", "offsets", "bias", "eight_bit_activations"),
    ),
}


def test_the_operator_follows_the_rules_of_torch(layer, linear):
    operator, names = OPERATORS[type(layer)]
    x = torch.randn(2, 3, linear.in_features, requires_grad=True)
    torch.library.opcheck(operator, (x, *(getattr(layer, name) for name in names)))
    layer.bias = None
    arguments = (x[0, 0].detach(), *(getattr(layer, name) for name in names))
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@with_and_without_bias
def test_copies_and_state_dicts_keep_it(kind, layer, linear):
    x = torch.randn(4, linear.in_features)
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert not {"offsets", "compressed"} & layer.state_dict().keys()
    sizes, bias = (linear.in_features, 24, layer.weight.numel()), linear.bias is not None
    other = kind[0](*sizes, bias=bias)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = kind[0](*sizes, bias=bias, device="meta")
    other.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(other(x), expected)


def test_a_change_of_dtype_leaves_the_places_alone(layer, linear):
    half = copy.deepcopy(layer).half()
    assert half.dtype == torch.float16
    assert torch.equal(half.places, layer.places)
    x = torch.randn(4, linear.in_features).half()
    assert_as_exact(half(x), linear.half(), x)


def test_an_input_of_another_dtype_is_refused(layer, linear):
    with pytest.raises((RuntimeError, ValueError)):
        layer(torch.randn(2, linear.in_features).half())


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


def test_it_compiles_into_one_graph_for_any_number_of_tokens(layer, linear):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 3, 40):
        x = torch.randn(tokens, linear.in_features)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.float64])
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


@with_and_without_bias
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


@with_and_without_bias
def test_gradients_reach_the_input_and_the_bias(layer, linear):
    if layer.bias is not None:
        layer.bias.requires_grad_()
        linear.bias.requires_grad_()
    for shape in ((), (1,), (2, 3), (0,)):
        x = torch.randn(*shape, linear.in_features, requires_grad=True)
        y = torch.randn(*shape, 24)
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


def test_a_layer_that_does_not_fit_is_refused():
    with pytest.raises(PatternError, match="in_features 12 is not a multiple of 8"):
        Sparse24Linear(12, 4)
    with pytest.raises(PatternError, match="not 2:4"):
        Sparse24Linear.from_linear(nn.Linear(16, 4))


def test_from_linear_refuses_what_it_would_change_or_cannot_read(kind):
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(TargetError, match="or transformers' `Conv1D`; got a Doubled"):
        kind[0].from_linear(Doubled(64, 8))
    for options in ({"device": "meta"}, {"dtype": torch.complex64}):
        with pytest.raises(TargetError, match="needs a weight with data in "):
            kind[0].from_linear(nn.Linear(64, 8, **options))


of_24 = pytest.mark.parametrize("kind", KINDS[:1], indirect=True, ids=["2:4"])


@pytest.fixture
def compressed(layer: Sparse24Linear) -> Sparse24Linear:
    """A layer with a tensor that stands for cuSPARSELt's layout: only its fate is tested."""
    layer.compressed = torch.randn(24, 18)
    return layer


@of_24
def test_the_compressed_weight_is_copied_and_moved_along_but_not_stored(compressed):
    again = copy.deepcopy(compressed)
    assert torch.equal(again.compressed, compressed.compressed)
    assert again.compressed is not compressed.compressed
    assert compressed.to("cpu").compressed is not None
    assert not any("compressed" in name for name in compressed.state_dict())
    assert dict(compressed.named_buffers()).keys() == {"weight_meta", "compressed"}


@of_24
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.half(),
        lambda layer: layer.to("meta"),
        lambda layer: layer.load_state_dict(layer.state_dict()),
        lambda layer: layer.load_state_dict(layer.state_dict(), assign=True),
        lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight + 1, requires_grad=False)),
        lambda layer: setattr(layer, "weight_meta", layer.weight_meta.clone()),
        lambda layer: nn.Sequential(layer).half(),
        lambda layer: nn.Sequential(layer).load_state_dict(nn.Sequential(layer).state_dict()),
    ],
    ids=["half", "device", "load", "assign load", "weight", "meta", "inner half", "inner load"],
)
def test_a_weight_that_changes_loses_its_compressed_form(change, compressed):
    change(compressed)
    assert compressed.compressed is None


@of_24
def test_the_operator_gets_the_compressed_weight(compressed, linear):
    """On a CPU it has no use for it, compiled or exported or not."""
    x = torch.randn(3, 32)
    arguments = (x, compressed.weight, compressed.weight_meta, compressed.bias)
    torch.library.opcheck(torch.ops.mrp_lightning.linear24, (*arguments, compressed.compressed))
    assert torch.equal(compressed(x), linear(x))
    torch._dynamo.reset()
    compiled = torch.compile(compressed, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x))
    exported = torch.export.export(compressed, (x,))
    assert torch.equal(exported.module()(x), linear(x))
    (call,) = [node for node in exported.graph.nodes if "linear24" in str(node.target)]
    assert len(call.args) == 5
