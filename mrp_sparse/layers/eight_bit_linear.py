"""A linear layer of 8 bits, and embeddings that are read from it."""

from typing import Self

import torch
from torch import Tensor, nn

from mrp_sparse.errors import OptionError
from mrp_sparse.formats.eight_bit import damage, pack, unpack, why_not_rounded
from mrp_sparse.layers.frozen_linear import FrozenLinear, frozen


class EightBitLinear(FrozenLinear):
    """y = x Wᵀ + b with W of 8 bits: each row is whole numbers from −127 to 127 times its scale.

    On a CPU the numbers are multiplied as they are, and elsewhere the weight is unpacked for each
    product.

    The arguments are those of a `Sparse24Linear`; `dtype` is that of the scales.

    Attributes:
        weight: The numbers, int8 (out_features, in_features).
        weight_scales: A scale for each row, (out_features,), in the layer's dtype.

    Raises:
        OptionError: The number of columns is no multiple of 16.
    """

    weight: Tensor
    weight_scales: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if reason := why_not_rounded(in_features):
            raise OptionError(f"EightBitLinear: {reason}.")
        codes = torch.empty(out_features, in_features, dtype=torch.int8, device=device)
        scales = torch.empty(out_features, dtype=dtype, device=device)
        super().__init__(in_features, out_features, weight=codes, weight_scales=scales)
        if bias:
            self.bias = frozen(torch.empty_like(scales))

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """The layer whose numbers are nearest to the weights; see `eight_bit_format.pack`."""
        layer = cls.like(linear, "meta")
        layer.weight, layer.weight_scales = pack(linear.weight.detach())
        layer.bias = None if linear.bias is None else frozen(linear.bias.detach())
        return layer

    def dense_weight(self) -> Tensor:
        """W (out_features, in_features), in the dtype of the scales."""
        return unpack(self.weight, self.weight_scales)

    def damage(self) -> str | None:
        """The reason why the tensors were never packed together, or `None`."""
        return damage(self.weight, self.weight_scales)

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.ops.mrp_lightning.linear8(x, self.weight, self.weight_scales, self.bias)

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it, and the bits of a weight."""
        return f"{super().extra_repr()}, bits=8"


class EightBitTable(nn.Module):
    """Rows of a head of 8 bits as embeddings. The tensors are the head's: this has no state.

    Args:
        head: The head, wherever it is moved to later.
    """

    def __init__(self, head: EightBitLinear) -> None:
        super().__init__()
        self._of = (head,)  # in a tuple, so that it is no submodule of this one

    @property
    def weight(self) -> Tensor:
        """The numbers of the head, int8 (rows, columns)."""
        return self._of[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (...) to embeddings (..., columns)."""
        return unpack(self.weight[ids], self._of[0].weight_scales[ids])
