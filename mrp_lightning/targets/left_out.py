"""Weights that are no layers, or that cannot be pruned as they are, and why."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mrp_lightning.targets.layers import Expert, Layer, holds_experts, is_linear, own_parameters

CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def why_not_plain(layer: Layer, *, allow_meta: bool = False) -> str | None:
    """The reason why a weight cannot be read and written as a matrix, with the next step.

    It is `None` for a dense floating tensor on a real device, or where `allow_meta` says that it
    will not be read, on the meta device.
    """
    module = layer.module
    if parametrize.is_parametrized(module):
        return "it is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    own = own_parameters(module)
    weight = own.get(layer.stack if isinstance(layer, Expert) else "weight")
    if weight is None:
        return "it has no parameter `weight` (packed or re-parametrized); load the dense model"
    if not isinstance(layer, Expert) and set(own) - {"weight", "bias"}:
        extra = ", ".join(sorted(set(own) - {"weight", "bias"}))
        return f"it has parameters beyond weight and bias ({extra}); merge adapters, or dequantize"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}; load the dense model, unsharded"
    if weight.device.type == "meta" and not allow_meta:
        return "its weight is on the meta device; load the checkpoint first"
    if weight.layout is not torch.strided or weight.dtype not in PLAIN_DTYPES:
        return f"its weight is {weight.dtype} ({weight.layout}); load it in a floating type"
    return None


PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def packed_weights(module: nn.Module) -> list[str]:
    """Integer tensors that packed layers keep in place of a weight, or to read theirs by."""
    names = ("qweight", "weight_packed", "weight_quantized", "weight_meta", "weight_bits")
    buffers = dict(module.named_buffers(recurse=False))
    return [name for name in (*own_parameters(module), *buffers) if name in names]


def is_adapter(module: nn.Module) -> bool:
    """Whether this wraps a layer with a low-rank adapter, as PEFT does."""
    parts = [name for name, _ in module.named_children()]
    return "base_layer" in parts and any(
        name.startswith(("lora_", "ia3_", "oft_", "vera_")) for name in parts
    )


def fused_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Stacks that no `Layer` can show: experts of other makes, packed attention inputs."""
    if isinstance(module, CONVOLUTIONS) or holds_experts(module):
        return
    for name, parameter in own_parameters(module).items():
        stacked = parameter.ndim == 3 and min(parameter.shape[1:]) > 1
        if stacked or (isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight"):
            yield name, parameter


def is_recurrent(module: nn.Module) -> bool:
    """Whether this is an LSTM, a GRU or a plain recurrent network, or one cell of them."""
    return isinstance(module, nn.RNNBase | nn.RNNCellBase)


def other_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Matrices that a module holds, and neither a `Layer` nor `fused_weights` shows.

    Embeddings, norms and biases are none, nor are vectors that are stored with more dimensions.
    """
    no_matrices = (nn.Embedding, nn.LayerNorm, nn.RMSNorm, *CONVOLUTIONS)
    if isinstance(module, no_matrices) or is_linear(module):
        return
    fused = {name for name, _ in fused_weights(module)}
    for name, parameter in own_parameters(module).items():
        if name in fused or "bias" in name:
            continue
        if sum(size > 1 for size in parameter.shape) > 1:
            yield name, parameter


def why_no_layer(module: nn.Module) -> str | None:
    """Why a convolution stays dense, `None` for all else."""
    if not isinstance(module, CONVOLUTIONS) or is_linear(module):
        return None
    kind = type(module).__name__
    if module.groups == module.in_channels > 1:
        return f"it is a depthwise {kind}"
    if module.groups > 1:
        return f"it is a {kind} in {module.groups} groups"
    return f"it is a {kind}; of convolutions, only nn.Conv2d is pruned"
