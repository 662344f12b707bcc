"""A linear layer that stores its weight packed 2:4."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from export.packed import operator  # noqa: F401  (registers torch.ops.mrp_lightning.linear24)
from export.packed.format import pack, unpack, why_not_packable
from mrp_lightning.errors import PatternError
from mrp_lightning.targets.layers import is_conv1d, layers_of


def is_packable(module: nn.Module) -> bool:
    """Whether this is a linear layer with one matrix: no convolution, no stacked experts."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


class Sparse24Linear(nn.Module):
    """y = x Wᵀ + b with W packed as `docs/format.md` says.

    It holds plain tensors, so that state dicts, safetensors, `deepcopy`, `torch.compile` and
    `torch.export` treat it as any other module.

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
        compressed: W in cuSPARSELt's layout, which prefill on a CUDA device is fastest with, or
            `None`. It depends on library and device, is no part of the state dict, and is gone
            after `load_state_dict`, after the layer moved to another device or dtype, and when
            `weight` or `weight_meta` is assigned. Whoever writes into one of these in place must
            set it to `None`.

    Raises:
        PatternError: `in_features` does not fit.
    """

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
        super().__init__()
        if reason := why_not_packable((out_features, in_features)):
            raise PatternError(f"Sparse24Linear: {reason}.")
        self.in_features, self.out_features = in_features, out_features
        self.compressed = None

        def frozen(*shape: int) -> nn.Parameter:
            empty = torch.empty(*shape, dtype=dtype, device=device)
            return nn.Parameter(empty, requires_grad=False)

        self.weight = frozen(out_features, in_features // 2)
        meta = torch.empty(out_features, in_features // 8, dtype=torch.uint8, device=device)
        self.register_buffer("weight_meta", meta)
        self.bias = frozen(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features)."""
        return torch.ops.mrp_lightning.linear24(
            x, self.weight, self.weight_meta, self.bias, self.compressed
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "compressed":
            # A non-persistent buffer stays out of state dicts. While there is none it must not be
            # registered as such: accelerate moves every one of them, `None` too.
            self.register_buffer(name, value, persistent=value is None)
            return
        super().__setattr__(name, value)
        if name in ("weight", "weight_meta"):
            self.compressed = None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.compressed = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.weight.device, self.weight.dtype
        super()._apply(fn, recurse)
        if (self.weight.device, self.weight.dtype) != before:
            self.compressed = None
        return self

    @classmethod
    def like(cls, linear: nn.Module, device: torch.device | str | None = None) -> Self:
        """An uninitialised layer of the shape of an `nn.Linear` or of transformers' `Conv1D`."""
        (dense,) = layers_of("", linear)
        weight = dense.weight
        rows, columns = weight.shape
        has_bias = getattr(linear, "bias", None) is not None
        return cls(columns, rows, has_bias, weight.dtype, device or weight.device)

    @classmethod
    def from_linear(cls, linear: nn.Module) -> Self:
        """Pack a pruned `nn.Linear`, or transformers' `Conv1D`.

        Raises:
            PatternError: Its weight is not 2:4, or has a shape that does not fit.
        """
        (dense,) = layers_of("", linear)
        values, meta = pack(dense.weight)
        layer = cls.like(linear, "meta")
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.weight_meta = meta
        if isinstance(linear.bias, Tensor):
            layer.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
        return layer

    @classmethod
    def from_packed(cls, values: Tensor, meta: Tensor) -> Self:
        """A layer without bias on what `pack` gave."""
        rows, half = values.shape
        layer = cls(2 * half, rows, bias=False, dtype=values.dtype, device="meta")
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.weight_meta = meta
        return layer

    def dense_weight(self) -> Tensor:
        """W (out_features, in_features), with its zeros."""
        return unpack(self.weight.detach(), self.weight_meta)

    def to_linear(self) -> nn.Linear:
        """The same layer with its zeros stored."""
        linear = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, device="meta"
        )
        linear.weight = nn.Parameter(self.dense_weight())
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach())
        return linear

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, 2:4"
        )
