"""Models of published shapes with random 2:4 weights, for measurements without a checkpoint."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from export.speed.timing import random_24
from mrp_sparse.formats.sparse24 import why_not_packable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_OF_ALL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 16384,
}
_LLAMA = {"model_type": "llama", **_OF_ALL}
_OPT = {"model_type": "opt", "word_embed_proj_dim": 4096, **_OF_ALL}
SHAPES: dict[str, dict[str, Any]] = {
    "llama2-7b": {**_LLAMA, "vocab_size": 32000, "intermediate_size": 11008},
    "llama3-8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
    },
    "opt-6.7b": {**_OPT, "vocab_size": 50272, "ffn_dim": 16384},
}
"""Shapes of published models; room for positions is larger, so that long prompts can be timed."""


@torch.no_grad()
def random_model(shape: str, dtype: torch.dtype, device: torch.device) -> "PreTrainedModel":
    """A model of a published shape with random weights, 2:4 in all linear layers but the head."""
    from transformers import AutoConfig, AutoModelForCausalLM  # the shapes alone need none

    options = dict(SHAPES[shape])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for layer in prunable(model).values():
        layer.weight.copy_(random_24(layer.out_features, layer.in_features, dtype, device))
    return model


def prunable(model: "PreTrainedModel") -> dict[str, nn.Linear]:
    """The linear layers that have a packed form, without the output head."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and why_not_packable(module.weight.shape) is None
    }
