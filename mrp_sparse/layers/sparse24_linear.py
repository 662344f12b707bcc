"""A linear layer that stores two values and one nibble for every four weights."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from mrp_sparse.errors import PatternError
from mrp_sparse.formats.sparse24 import SPARSE24, why_not_packable
from mrp_sparse.layers.packed_linear import PackedLinear


class Sparse24Linear(PackedLinear):
    """y = x Wᵀ + b with W 2:4, packed as `docs/format.md` says.

    The layer holds plain tensors, so that state dicts, safetensors, `deepcopy`, `torch.compile` and
    `torch.export` treat it like any other module.

    Args:
        in_features: Columns of W, a multiple of 8.
        out_features: Rows of W.
        bias: Whether there is a b.
        dtype: Dtype of the values, the bias and the activations.
        device: Device of the tensors, which are not initialised.

    Attributes:
        weight: Kept values (out_features, in_features / 2); frozen.
        weight_meta: Columns of the kept values, uint8 (out_features, in_features / 8).
        bias: Added to each output, (out_features,), or `None`.
        compressed: W in cuSPARSELt's layout, the fastest for prefill on a CUDA device, or `None`.
            It depends on library and device and is not in the state dict. It becomes `None` after
            `load_state_dict`, after a move to another device or dtype, and when `weight` or
            `weight_meta` is assigned. After one of these is changed in place, set it to `None`.

    Raises:
        PatternError: `in_features` does not fit.
    """

    FORMAT = SPARSE24
    DERIVED = "compressed"
    weight_meta: Tensor
    compressed: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if reason := why_not_packable((out_features, in_features)):
            raise PatternError(f"Sparse24Linear: {reason}.")
        weight = torch.empty(out_features, in_features // 2, dtype=dtype, device=device)
        meta = torch.empty(out_features, in_features // 8, dtype=torch.uint8, device=device)
        super().__init__(in_features, out_features, weight, (meta,), bias)

    def _multiply(self, x: Tensor) -> Tensor:
        return torch.ops.mrp_lightning.linear24(
            x, self.weight, self.weight_meta, self.bias, self.compressed
        )

    def derive(self) -> None:
        """Forget the layout of cuSPARSELt."""
        self.compressed = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.weight.device, self.weight.dtype
        super()._apply(fn, recurse)
        if (self.weight.device, self.weight.dtype) != before:
            self.derive()
        return self

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return f"{super().extra_repr()}, 2:4"
