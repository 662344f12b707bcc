"""A linear layer that stores one bit a weight, and the weights that are not zero."""

import torch
from torch import Tensor

from mrp_sparse.formats.bitmask import BITMASK, bytes_of, row_offsets
from mrp_sparse.layers.packed_linear import PackedLinear


class BitmaskLinear(PackedLinear):
    """y = x Wᵀ + b with W of any pattern of zeros, packed as `docs/format.md` says.

    The layer holds plain tensors, so that state dicts, safetensors, `deepcopy`, `torch.compile` and
    `torch.export` treat it like any other module.

    Args:
        in_features: Columns of W.
        out_features: Rows of W.
        num_kept: Number of weights that are not zero.
        bias: Whether there is a b.
        dtype: Dtype of the values, the bias and the activations.
        device: Device of the tensors, which are not initialised.

    Attributes:
        weight: Kept values (num_kept,), row after row in the order of their columns; frozen.
        weight_bits: Their places, uint8 (out_features, ceil(in_features / 8)), lowest bit first.
        bias: Added to each output, (out_features,), or `None`.
        offsets: Where the values of each row begin, int64 (out_features,). They are counted from
            `weight_bits` when these are assigned or loaded, and are not in the state dict; `None`
            while the bits have no data. After the bits are changed in place, call `derive()`.
    """

    FORMAT = BITMASK
    DERIVED = "offsets"
    weight_bits: Tensor
    offsets: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_kept: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        weight = torch.empty(num_kept, dtype=dtype, device=device)
        bits = torch.empty(out_features, bytes_of(in_features), dtype=torch.uint8, device=device)
        super().__init__(in_features, out_features, weight, (bits,), bias)

    def _multiply(self, x: Tensor) -> Tensor:
        # Bits that accelerate brings from the disk are there during the forward alone.
        offsets = row_offsets(self.weight_bits) if self.offsets is None else self.offsets
        return torch.ops.mrp_lightning.linear_bitmask(
            x, self.weight, self.weight_bits, offsets, self.bias
        )

    def derive(self) -> None:
        """Count where the rows begin."""
        self.offsets = None if self.weight_bits.is_meta else row_offsets(self.weight_bits)

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it, and the part of the weights that is kept."""
        size = self.in_features * self.out_features
        return f"{super().extra_repr()}, kept={self.weight.numel() / max(size, 1):.1%}"
