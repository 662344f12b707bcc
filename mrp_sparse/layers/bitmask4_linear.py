"""A linear layer that stores one bit a weight, and four for those that are not zero."""

import torch
from torch import Tensor

from mrp_sparse.formats.bitmask import bytes_of
from mrp_sparse.formats.bitmask4 import BITMASK4, GROUP, num_groups, row_offsets
from mrp_sparse.layers.packed_linear import PackedLinear


class Bitmask4Linear(PackedLinear):
    """y = x Wᵀ + b with W of any pattern of zeros and four bits, packed as `docs/format.md` says.

    Products are those of the values in the layer's dtype, unless `eight_bit_activations` is set.
    The layer holds plain tensors, so that state dicts, safetensors, `deepcopy`, `torch.compile` and
    `torch.export` treat it like any other module.

    Args:
        in_features: Columns of W.
        out_features: Rows of W.
        num_bytes: Number of bytes of the codes of all weights that are not zero.
        bias: Whether there is a b.
        dtype: Dtype of the scales, the bias and the activations.
        device: Device of the tensors, which are not initialised.

    Attributes:
        weight: Codes, uint8 (num_bytes,), two in a byte, group after group of 64 columns; frozen.
        weight_bits: Their places, uint8 (out_features, ceil(in_features / 8)), lowest bit first.
        weight_scales: A scale for each group, (out_features, ceil(in_features / 64)); frozen.
        bias: Added to each output, (out_features,), or `None`.
        offsets: Where the codes of each row begin, int64 (out_features,). They are counted from
            `weight_bits` when these are assigned or loaded, and are not in the state dict; `None`
            while the bits have no data. After the bits are changed in place, call `derive()`.
        eight_bit_activations: Whether up to 8 tokens of bfloat16 are rounded on a CPU to 8 bits,
            with a scale for each 64 columns, before they are multiplied: faster, and less exact
            (off by default; `python -m export.generate --activations 8` tells the error).
    """

    FORMAT = BITMASK4
    DERIVED = "offsets"
    weight_bits: Tensor
    weight_scales: Tensor
    offsets: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_bytes: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        weight = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        bits = torch.empty(out_features, bytes_of(in_features), dtype=torch.uint8, device=device)
        groups = num_groups(in_features)
        scales = torch.empty(out_features, groups, dtype=dtype, device=device)
        super().__init__(in_features, out_features, weight, (bits, scales), bias)
        self.eight_bit_activations = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the scales and the activations."""
        return self.weight_scales.dtype

    def _multiply(self, x: Tensor) -> Tensor:
        # Bits that accelerate brings from the disk are there during the forward alone.
        offsets = row_offsets(self.weight_bits) if self.offsets is None else self.offsets
        return torch.ops.mrp_lightning.linear_bitmask4(
            x,
            self.weight,
            self.weight_bits,
            self.weight_scales,
            offsets,
            self.bias,
            self.eight_bit_activations,
        )

    def derive(self) -> None:
        """Count where the rows begin."""
        self.offsets = None if self.weight_bits.is_meta else row_offsets(self.weight_bits)

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it, and the bits that a weight takes, with its place."""
        size = max(self.in_features * self.out_features, 1)
        stored = sum(t.nbytes for t in (self.weight, self.weight_bits, self.weight_scales))
        return f"{super().extra_repr()}, bits={8 * stored / size:.2f}, group_size={GROUP}"
