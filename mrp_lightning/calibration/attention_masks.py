"""The attention masks that modules are called with, in all their conventions."""

import inspect
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

OF_TORCH = ("src_key_padding_mask", "tgt_key_padding_mask")
"""What torch's encoders and decoders call the mask (batch, length) of their hidden state."""

OF_ATTENTION = ("query", "key", "value", "key_padding_mask")
"""The first arguments of torch's attention."""


def takes_mask(module: nn.Module) -> bool:
    """Whether a module can be called with the mask of its own hidden state."""
    try:
        names = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # compiled to something without a signature
        return False
    # nn.Transformer takes both of torch's, and gives each to its encoder or decoder.
    return "attention_mask" in names or sum(name in names for name in OF_TORCH) == 1


def not_padding(mask: Tensor) -> Tensor:
    """Make a mask of torch's True for tokens: it is True, or adds −∞ to scores, for padding."""
    if mask.is_floating_point():
        return mask > torch.finfo(mask.dtype).min
    return mask == 0


def is_length_first(module: nn.Module) -> bool:
    """Whether the attention in a module takes hidden states as (length, batch, columns)."""
    inside = (m for m in module.modules() if isinstance(m, nn.MultiheadAttention))
    return any(not attention.batch_first for attention in inside)


def is_mask(value: Any) -> TypeGuard[Tensor]:
    """Whether this is a mask (batch, length) of zeros and ones, and not one to add to scores."""
    if not isinstance(value, Tensor) or value.ndim != 2:
        return False
    return not value.is_floating_point() or bool(((value == 0) | (value == 1)).all())
