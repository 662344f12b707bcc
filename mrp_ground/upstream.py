"""Names that transformers keeps to itself, without importing it."""

from typing import Any

from torch import nn


def is_conv1d(module: nn.Module) -> bool:
    """Return whether the module is the `Conv1D` of GPT-2, by name: transformers is not imported."""
    return any(
        (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
        for kind in type(module).__mro__
    )


def attention_of(config: Any) -> str | None:
    """Return the name of a model's attention implementation, such as `sdpa`.

    Seen in transformers 5.23, which has a public setter, but no getter. Replacement: a
    `get_attn_implementation` beside the `get_experts_implementation` of models.
    """
    name: str | None = config._attn_implementation
    return name
