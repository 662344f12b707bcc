"""`torch.compile(model, fullgraph=True)` of packed models on CUDA tensors without data.

A CUDA build of torch traces them without a GPU; a CPU build traces the same on the CPU.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mrp_sparse.packed_linear import Bitmask4Linear, BitmaskLinear, Sparse24Linear

DEVICE = "cpu" if torch.version.cuda is None else "cuda"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def model() -> PreTrainedModel:
    """A LLaMA of one block, whose layers are 2:4, bitmasks, and bitmasks of four bits in turn."""
    config = AutoConfig.for_model("llama", vocab_size=256, **SIZES, **HEADS)
    with torch.device(DEVICE):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    linear = [(n, m) for n, m in made.model.named_modules() if isinstance(m, nn.Linear)]
    kinds = itertools.cycle([(Sparse24Linear, 0), (BitmaskLinear, 2), (Bitmask4Linear, 4)])
    for (name, module), (kind, part) in zip(linear, kinds, strict=False):
        count = module.weight.numel() // part if part else 0
        made.model.set_submodule(name, kind.like(module, DEVICE, count=count))
    return made.eval()


@pytest.fixture
def graphs() -> Iterator[list[GraphModule]]:
    """The graphs that dynamo traces: they run as they are, and nothing is compiled."""
    yield []
    torch.compiler.reset()


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_whole_model_is_one_graph(dynamic, graphs):
    def backend(graph: GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    batches = (2, 3, 5) if dynamic else (2,)
    with FakeTensorMode(allow_non_fake_inputs=True):
        compiled = torch.compile(model(), backend=backend, fullgraph=True, dynamic=dynamic)
        for batch in batches:
            ids = torch.zeros(batch, 9, dtype=torch.int64, device=DEVICE)
            logits = compiled(ids, use_cache=False).logits
            assert logits.shape == (batch, 9, 256)
            assert logits.device.type == DEVICE
    assert len(graphs) == 1
    operators = [str(n.target) for n in graphs[0].graph.nodes if "mrp_lightning" in str(n.target)]
    assert len(operators) == 7
    assert len({*operators}) == 3
