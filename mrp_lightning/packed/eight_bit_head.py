"""A head of 8 bits: what maps hidden states to logits reads half of its bytes a token."""

from typing import Any

import torch
from torch import Tensor, nn

from mrp_lightning.errors import OptionError
from mrp_lightning.upstream import multiply_int8

LARGEST = 127
COLUMNS = 16
"""Of others torch's product reads what lies behind the end of a row."""


class EightBitLinear(nn.Module):
    """y = x Wᵀ + b with W of 8 bits: each row is whole numbers from −127 to 127 times its scale.

    The numbers are the nearest for the scale by which the row's largest weight is 127. Products
    are torch's own for a CPU.

    Args:
        linear: The layer, on the CPU, in a floating dtype.

    Attributes:
        weight: The numbers, int8 (rows, columns).
        weight_scales: A scale for each row, (rows,), in the layer's dtype.
        bias: Added to each output, (rows,), or `None`.

    Raises:
        OptionError: The number of columns is no multiple of 16.
    """

    weight: Tensor
    weight_scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if linear.in_features % COLUMNS:
            raise OptionError(
                f"a head of 8 bits needs columns in a multiple of {COLUMNS}, got "
                f"{linear.in_features}"
            )
        self.in_features, self.out_features = linear.in_features, linear.out_features
        dense = linear.weight.detach()
        peaks = dense.abs().amax(1, keepdim=True).float()
        scales = torch.where(peaks > 0, peaks / LARGEST, 1.0).to(dense.dtype)
        codes = (dense.float() / scales.float()).round_().clamp_(-LARGEST, LARGEST)
        self.register_buffer("weight", codes.to(torch.int8))
        self.register_buffer("weight_scales", scales.flatten())
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., columns) to (..., rows)."""
        y = multiply_int8(x.flatten(0, -2), self.weight, self.weight_scales)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bits=8"


def round_head(model: Any) -> None:
    """Give a model of transformers a head of 8 bits, in place.

    An embedding table that is tied to the head stays as it is, and the head is a copy beside it: a
    token reads but one row of the table.

    Raises:
        OptionError: There is no head that is a linear layer on the CPU, or its columns are no
            multiple of 16.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.weight.device.type != "cpu":
        found = "none" if head is None else f"a {type(head).__name__}"
        raise OptionError(
            f"a head of 8 bits is made of a linear layer on the CPU; {type(model).__name__} has "
            f"{found}"
        )
    model.set_output_embeddings(EightBitLinear(head))
