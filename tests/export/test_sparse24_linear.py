"""The layer of 2:4 alone: the columns that it takes, and its second form for cuSPARSELt."""

import copy

import pytest
import torch
from torch import nn

from export import Sparse24Linear
from mrp_lightning.errors import PatternError

from .conftest import keep_two_of_four


@pytest.fixture(params=[True, False], ids=["bias", "no bias"])
def linear(request: pytest.FixtureRequest) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(32, 24, bias=request.param)
    linear.weight.data = keep_two_of_four(linear.weight.data)
    return linear.requires_grad_(False)


def test_a_layer_that_does_not_fit_is_refused():
    with pytest.raises(PatternError, match="in_features 12 is not a multiple of 8"):
        Sparse24Linear(12, 4)
    with pytest.raises(PatternError, match="not 2:4"):
        Sparse24Linear.from_linear(nn.Linear(16, 4))


@pytest.fixture
def compressed(linear: nn.Linear) -> Sparse24Linear:
    """With a tensor that stands for cuSPARSELt's layout: only its fate is tested."""
    layer = Sparse24Linear.from_linear(linear)
    layer.compressed = torch.randn(24, 18)
    return layer


def test_the_compressed_weight_is_copied_and_moved_along_but_not_stored(compressed):
    again = copy.deepcopy(compressed)
    assert torch.equal(again.compressed, compressed.compressed)
    assert again.compressed is not compressed.compressed
    assert compressed.to("cpu").compressed is not None
    assert not any("compressed" in name for name in compressed.state_dict())
    assert dict(compressed.named_buffers()).keys() == {"weight_meta", "compressed"}


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
