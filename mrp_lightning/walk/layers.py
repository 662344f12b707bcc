"""The layers that can be pruned, seen as matrices (rows, columns), whatever their class."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


@dataclass(frozen=True, eq=False)
class Layer:
    """One linear layer of the model.

    Attributes:
        name: Its name in the model, as in the checkpoint.
        module: An `nn.Linear`, or transformers' `Conv1D`, which stores (columns, rows).
    """

    name: str
    module: nn.Module

    @property
    def weight(self) -> Tensor:
        """A detached (rows, columns) view of the weight."""
        parameter = self.module.weight
        assert isinstance(parameter, Tensor)
        weight = parameter.detach()
        return weight.T if is_conv1d(self.module) else weight

    @property
    def columns(self) -> int:
        """Input features."""
        return self.weight.shape[1]

    def write_(self, weight: Tensor) -> None:
        """Overwrite the weight in place and in one copy: ties and optimizers keep it."""
        weight = weight.to(self.weight.device, self.weight.dtype)
        with torch.no_grad():
            self.weight.copy_(weight)


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the `Conv1D` of GPT-2; told by name, so that torch alone is needed here."""
    return any(
        (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
        for kind in type(module).__mro__
    )


def is_linear(module: nn.Module) -> bool:
    """Whether `Layer` knows this module."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def why_not_plain(module: nn.Module, *, allow_meta: bool = False) -> str | None:
    """What keeps the weight of a linear layer from being read and written as a matrix.

    Args:
        module: The layer.
        allow_meta: Whether a weight without data will do, because it is not read.

    Returns:
        The reason with the next step, or `None` for a dense floating tensor on a real device.
    """
    if parametrize.is_parametrized(module):
        return "it is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    weight = module._parameters.get("weight")
    if weight is None:
        return "it has no parameter `weight` (packed or re-parametrized); load the dense model"
    if set(module._parameters) - {"weight", "bias"}:
        extra = ", ".join(sorted(set(module._parameters) - {"weight", "bias"}))
        return f"it has parameters beyond weight and bias ({extra}); merge adapters, or dequantize"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}; load the dense model, unsharded"
    if weight.device.type == "meta" and not allow_meta:
        return "its weight is on the meta device; load the checkpoint first"
    if weight.layout is not torch.strided or weight.dtype not in _DENSE:
        return f"its weight is {weight.dtype} ({weight.layout}); load it in a floating type"
    return None


_DENSE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def packed_weights(module: nn.Module) -> list[str]:
    """Integer tensors that quantized layers keep in place of a weight."""
    tensors = {**module._parameters, **module._buffers}
    return [name for name in tensors if name in ("qweight", "weight_packed", "weight_quantized")]


def is_adapter(module: nn.Module) -> bool:
    """Whether this wraps a layer with a low-rank adapter, as PEFT does."""
    return "base_layer" in module._modules and any(
        name.startswith(("lora_", "ia3_", "oft_", "vera_")) for name in module._modules
    )


def fused_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Stacked matrices that no linear layer holds: fused experts, packed attention inputs."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        stacked = parameter.ndim == 3 and min(parameter.shape[1:]) > 1
        if stacked or (isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight"):
            yield name, parameter
