"""A linear layer that is not trained, and whose weight is stored in another form."""

from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

Dense = TypeVar("Dense", bound=nn.Module)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether the module is the `Conv1D` of GPT-2, by name: transformers is not imported."""
    return any(
        (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
        for kind in type(module).__mro__
    )


def weight_matrix(linear: Any) -> Tensor:
    """Return the weight (rows, columns) of an `nn.Linear` or a `Conv1D`, as a view."""
    weight: Tensor = linear.weight.detach()
    return weight.T if is_conv1d(linear) else weight


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


class FrozenLinear(nn.Module):
    """y = x Wᵀ + b with W in some tensors, `weight` among them."""

    def __init__(self, in_features: int, out_features: int, **tensors: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.bias: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features).

        Raises:
            RuntimeError: The input has another number of columns; `nn.Linear` raises the same.
        """
        if x.shape[-1] != self.in_features:
            raise RuntimeError(
                f"{type(self).__name__}: expected {self.in_features} columns, its `in_features`, "
                f"got an input of shape {tuple(x.shape)}."
            )
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ + b."""
        raise NotImplementedError

    def dense_weight(self) -> Tensor:
        """W (out_features, in_features), with its zeros."""
        raise NotImplementedError

    @classmethod
    def like(
        cls, linear: nn.Module, device: torch.device | str | None = None, **sizes: int
    ) -> Self:
        """An uninitialised layer of the shape of an `nn.Linear` or of transformers' `Conv1D`.

        It is made where the dense weight is, if no device is given, and is in training if that is.
        `sizes` is `num_kept`, where the class cannot tell that from the shape.
        """
        weight = weight_matrix(linear)
        rows, columns = weight.shape
        options: dict[str, Any] = {"dtype": weight.dtype, "device": device or weight.device}
        options |= {"bias": getattr(linear, "bias", None) is not None, **sizes}
        return cls(columns, rows, **options).train(linear.training)

    def to_linear(self) -> nn.Linear:
        """The same layer with its zeros stored."""
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        return self.give(linear, None)

    def give(self, dense: Dense, dtype: torch.dtype | None) -> Dense:
        """Give an `nn.Linear` or a `Conv1D` of this shape the weight and the bias, and return it.

        They are in this dtype, or in that of this layer.
        """
        weight = self.dense_weight().to(dtype)
        stored = weight if isinstance(dense, nn.Linear) else weight.T.contiguous()
        dense.weight = nn.Parameter(stored)
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach().to(dtype))
        return dense.train(self.training)

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
