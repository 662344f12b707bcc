"""Layers and models with random weights, packed and dense, for the timings of this folder.

Weights and the places of zeros are random, since speed does not depend on their values.
"""

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from export import BitmaskLinear, Sparse24Linear
from export.loading import storage_bytes
from mrp_sparse.packed_linear import PackedLinear

SMOLLM2: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9},
    **{"num_key_value_heads": 3, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"vocab_size": 49152, "tie_word_embeddings": True},
}
MODELS = {"SmolLM2-135M": SMOLLM2}
"""The configurations of models by name."""
SPARSITIES = {"50%": 0.5, "2:4": None, "70%": 0.7, "80%": 0.8}
GROUP = 64


class Copies(nn.Module):
    """More copies of a layer than any cache holds, to be multiplied one after the other."""

    def __init__(self, layer: nn.Module, num_bytes: int) -> None:
        super().__init__()
        count = max(2, -(-num_bytes // storage_bytes(layer)))
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(count))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Multiply with one copy after the other."""
        return [layer(x) for layer in self.layers]


class FourBit(nn.Module):
    """A layer with weights of 4 bits, and a scale and a zero for each `GROUP` of columns."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, rows = linear.in_features, linear.out_features
        weight = torch.randint(16, (rows, self.in_features), dtype=torch.int32)
        tiled = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight, 1)
        self.weight = nn.Parameter(tiled, requires_grad=False)
        scales = torch.rand(self.in_features // GROUP, rows, 2) * self.in_features**-0.5
        self.register_buffer("scales", scales.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        """Multiply tokens (..., columns)."""
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        y = multiply(x.reshape(-1, self.in_features), self.weight, GROUP, self.scales)
        return y.view(*x.shape[:-1], -1)


def pruned(rows: int, columns: int, sparsity: float | None) -> Tensor:
    """Return random weights in bfloat16 with a sparsity, or 2:4 for `None`."""
    weight = torch.empty(rows, columns, dtype=torch.bfloat16).uniform_(-1, 1)
    if sparsity is None:
        pairs = list(itertools.combinations(range(4), 2))
        of_four = torch.tensor([[place in pair for place in range(4)] for pair in pairs])
        kept = of_four[torch.randint(len(pairs), (rows, columns // 4))].view(rows, columns)
    else:
        kept = torch.rand(rows, columns) >= sparsity
    return weight * kept


def packed(linear: nn.Linear, name: str) -> PackedLinear:
    """Return the layer with weights of a key of `SPARSITIES`, packed."""
    with torch.no_grad():
        weight = pruned(linear.out_features, linear.in_features, SPARSITIES[name])
        linear.weight.copy_(weight * linear.in_features**-0.5)
    kind = Sparse24Linear if name == "2:4" else BitmaskLinear
    return kind.from_linear(linear)


def model_of(name: str) -> Any:
    """Return a key of `MODELS` with random weights, or what a directory holds, in bfloat16."""
    if name in MODELS:
        settings = dict(MODELS[name])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        with no_init_weights():  # a normal distribution takes half a minute
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.data.uniform_(-0.02, 0.02)
        return model.eval()
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()


def bytes_of_step(model: Any) -> int:
    """Return the bytes of weights that one token reads: only one row of separate embeddings."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return storage_bytes(model) - (0 if head.weight is table.weight else storage_bytes(table))


def table(title: str, header: Sequence[str], rows: Iterator[list[str]], write: Any) -> None:
    """Write a table row by row, as they come."""
    write(f"\n### {title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}\n")
    for row in rows:
        write(f"| {' | '.join(row)} |\n")
