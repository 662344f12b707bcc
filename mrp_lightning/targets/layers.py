"""The layers that can be pruned, viewed as matrices (rows, columns) whatever their class.

There are four kinds: `Linear`, `Conv1D` (stored transposed), `Conv2d` (unfolded) and `Expert` (a
slice of a stack); and `ExpertStack`, for experts that are removed whole. Each kind defines how its
parameter is arranged as a matrix; reading and writing are the same for all.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, unfold
from torch.nn.utils import parametrize

from mrp_ground.upstream import is_conv1d as is_conv1d
from mrp_lightning.upstream.other_names import EXPERTS
from mrp_lightning.upstream.torch_names import pads


@dataclass(frozen=True, eq=False)
class Layer(ABC):
    """One linear map of the model."""

    name: str  # in the model, as in the checkpoint
    module: nn.Module  # holds the weight

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter in which the weight is stored."""
        parameter = self.module.weight
        assert isinstance(parameter, nn.Parameter)
        return parameter

    @property
    def view(self) -> Tensor:
        """The detached weight as (rows, ...), whose last dimensions flatten to the columns."""
        return self.arranged(self.parameter.detach())

    @abstractmethod
    def arranged(self, stored: Tensor) -> Tensor:
        """Return a view (rows, ...) of a tensor that has the parameter's shape."""

    @property
    def weight(self) -> Tensor:
        """The detached weight (rows, columns); a view if strides can express it."""
        return self.view.flatten(1)

    @property
    def columns(self) -> int:
        """The number of input features."""
        return math.prod(self.view.shape[1:])

    @property
    def grouped_columns(self) -> int:
        """The number of adjacent columns that must be a multiple of the M of an N:M pattern."""
        return self.view.shape[-1]

    @property
    def owner(self) -> str:
        """The name of the module that holds the weight."""
        return self.name

    @property
    def parameter_name(self) -> str:
        """The name of the parameter in which the weight is stored, as in the checkpoint."""
        return f"{self.owner}.weight"

    @property
    def key(self) -> Hashable:
        """The identity of the weight: tied layers have equal keys."""
        return id(self.parameter)

    @property
    def reading(self) -> Hashable:
        """The way in which the input is read; layers share a Hessian only if theirs are equal."""
        return None

    def inputs(self, x: Tensor) -> Tensor:
        """Return the vectors (..., columns) that the weight multiplies, from the module's input."""
        return x

    def write_(self, weight: Tensor) -> None:
        """Overwrite the weight (rows, columns) in place, so that ties and optimizers stay valid."""
        view = self.view
        with torch.no_grad():
            view.copy_(weight.to(view.device, view.dtype).view(view.shape))


class Linear(Layer):
    """An `nn.Linear`."""

    def arranged(self, stored: Tensor) -> Tensor:
        """Return the stored tensor, which is (rows, columns) already."""
        return stored


class Conv1D(Layer):
    """The `Conv1D` of transformers, which stores (columns, rows)."""

    def arranged(self, stored: Tensor) -> Tensor:
        """Return the transpose of the stored tensor."""
        return stored.T


class Conv2d(Layer):
    """An `nn.Conv2d` without groups: a linear map of the patch under the kernel.

    Columns are ordered (kernel row, kernel column, input channel): the channels of one position
    are neighbours, so groups N:M run along input channels, as sparse kernels for channels-last
    convolutions want them. The weight is stored (rows, channels, kernel rows, kernel columns). A
    token is one position of the output. Unfolding an input takes kernel rows × kernel columns (over
    the strides) times its memory.
    """

    module: nn.Conv2d

    def arranged(self, stored: Tensor) -> Tensor:
        """Return a view (rows, kernel rows, kernel columns, channels)."""
        return stored.permute(0, 2, 3, 1)

    @property
    def reading(self) -> Hashable:
        """The options that decide how patches are cut from the input."""
        conv = self.module
        return conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.padding_mode

    def inputs(self, x: Tensor) -> Tensor:
        """Return the patches (batch, positions, columns)."""
        conv = self.module
        x = x if x.ndim == 4 else x[None]
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = pad(x, pads(conv), mode=mode)
        # (batch, channels · kernel positions, output positions), the channels slowest.
        patches = unfold(x, conv.kernel_size, conv.dilation, 0, conv.stride)
        patches = patches.unflatten(1, (conv.in_channels, -1))
        return patches.permute(0, 3, 2, 1).flatten(2)


@dataclass(frozen=True, eq=False)
class Expert(Layer):
    """One expert's slice of a parameter (experts, ...) in which all experts are stacked."""

    stack: str  # the name of the parameter: `gate_up_proj`, `up_proj` or `down_proj`
    index: int  # the number of the expert, from 0

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter in which all experts are stacked."""
        return self.module.get_parameter(self.stack)

    def arranged(self, stored: Tensor) -> Tensor:
        """Return the slice, transposed if it is stored (columns, rows): see `is_transposed`."""
        return stored[self.index].T if self.module.is_transposed else stored[self.index]

    @property
    def owner(self) -> str:
        """The name of the module that holds the stack."""
        return self.name.rsplit(".", 2)[0]

    @property
    def parameter_name(self) -> str:
        """The name of the stack."""
        return f"{self.owner}.{self.stack}"

    @property
    def key(self) -> Hashable:
        """The identity of the stack, and the index in it."""
        return id(self.parameter), self.index

    @property
    def siblings(self) -> Hashable:
        """A key that this matrix shares with the same matrix of the module's other experts."""
        return id(self.module), self.stack

    @property
    def first(self) -> "Expert":
        """The first matrix of this expert, which reads the tokens: `gate_up_proj` or `up_proj`."""
        stack = "gate_up_proj" if self.module.has_gate else "up_proj"
        return Expert(f"{self.owner}.{self.index}.{stack}", self.module, stack, self.index)


@dataclass(frozen=True, eq=False)
class ExpertStack(Layer):
    """The second matrices of all experts side by side, (rows, experts · inner features).

    Its input is the inner activations of all experts, each times its router weight, so that
    removing an expert removes columns.
    """

    stack: str = "down_proj"

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter in which all experts are stacked."""
        return self.module.get_parameter(self.stack)

    def arranged(self, stored: Tensor) -> Tensor:
        """Return a view (rows, experts, inner features)."""
        return stored.permute((2, 0, 1) if self.module.is_transposed else (1, 0, 2))

    @property
    def owner(self) -> str:
        """The name of the module that holds the stack."""
        return self.name.rpartition(".")[0]

    @property
    def parameter_name(self) -> str:
        """The name of the stack."""
        return self.name


def layers_of(name: str, module: nn.Module) -> list[Layer]:
    """Return the layers of a module's own weights: none, one, or the matrices of experts."""
    if isinstance(module, nn.Linear):
        return [Linear(name, module)]
    if is_conv1d(module):
        return [Conv1D(name, module)]
    if isinstance(module, nn.Conv2d) and module.groups == 1:
        return [Conv2d(name, module)]
    if holds_experts(module):
        stacks = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
        return [
            Expert(f"{name}.{e}.{stack}", module, stack, e)
            for e in range(len(module.get_parameter("down_proj")))
            for stack in stacks
        ]
    return []


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module is a stack of experts of transformers 5, whose layout is known."""
    is_decorated = all(
        hasattr(module, name) for name in ("is_transposed", "has_gate", "num_experts")
    )
    if not is_decorated or not hasattr(getattr(module, "config", None), EXPERTS):
        return False
    stacks = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    parameters = _own_parameters(module)
    return all(stack in parameters and parameters[stack].ndim == 3 for stack in stacks)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a module itself holds, by name."""
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def is_linear(module: nn.Module) -> bool:
    """Return whether a module itself holds the weight of a `Layer`."""
    return bool(layers_of("", module))


_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


_REPARAMETRIZED = {
    "weight_mask": ("torch.nn.utils.prune", "torch.nn.utils.prune.remove(layer, 'weight')"),
    "weight_g": ("weight_norm", "torch.nn.utils.remove_weight_norm(layer)"),
    "weight_u": ("spectral_norm", "torch.nn.utils.remove_spectral_norm(layer)"),
}
"""Functions of torch that compute a weight in a hook, by a parameter or buffer that each adds."""


def why_not_plain(layer: Layer, *, allow_meta: bool = False) -> str | None:
    """Return why a weight cannot be read and written as a matrix, with the next step.

    It is `None` for a dense floating tensor on a real device or, if `allow_meta`, the meta device.
    """
    module = layer.module
    if parametrize.is_parametrized(module):
        return "it is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    parameters = _own_parameters(module)
    weight = parameters.get(layer.stack if isinstance(layer, Expert) else "weight")
    if weight is None:
        buffers = dict(module.named_buffers(recurse=False))
        for parameter, (owner, remedy) in _REPARAMETRIZED.items():
            if parameter in parameters or parameter in buffers:
                return f"{owner} computes its weight; call {remedy} first"
        return "it has no parameter `weight` (packed or re-parametrized); load the dense model"
    if not isinstance(layer, Expert) and set(parameters) - {"weight", "bias"}:
        extra = ", ".join(sorted(set(parameters) - {"weight", "bias"}))
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
    """Return the names of a module's packed weights, and of indices of them; [] if it has none."""
    names = ("qweight", "weight_packed", "weight_quantized", "weight_meta", "weight_bits")
    buffers = dict(module.named_buffers(recurse=False))
    return [name for name in (*_own_parameters(module), *buffers) if name in names]


def is_adapter(module: nn.Module) -> bool:
    """Return whether a module wraps a layer with a low-rank adapter, as PEFT does."""
    parts = [name for name, _ in module.named_children()]
    return "base_layer" in parts and any(
        name.startswith(("lora_", "ia3_", "oft_", "vera_")) for name in parts
    )


def fused_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield stacked weights that no `Layer` represents: other experts, packed attention."""
    if isinstance(module, _CONVOLUTIONS) or holds_experts(module):
        return
    for name, parameter in _own_parameters(module).items():
        stacked = parameter.ndim == 3 and min(parameter.shape[1:]) > 1
        if stacked or (isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight"):
            yield name, parameter


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is an LSTM, a GRU or a plain recurrent network, or a cell of one."""
    return isinstance(module, nn.RNNBase | nn.RNNCellBase)


def other_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's matrices that neither a `Layer` nor `fused_weights` represents.

    Embeddings, norms and biases are left out, as are vectors stored with more dimensions.
    """
    no_matrices = (nn.Embedding, nn.LayerNorm, nn.RMSNorm, *_CONVOLUTIONS)
    if isinstance(module, no_matrices) or is_linear(module):
        return
    fused = {name for name, _ in fused_weights(module)}
    for name, parameter in _own_parameters(module).items():
        if name in fused or "bias" in name:
            continue
        if sum(size > 1 for size in parameter.shape) > 1:
            yield name, parameter


def why_no_layer(module: nn.Module) -> str | None:
    """Return why a convolution stays dense, `None` for one that is pruned and for other modules."""
    if not isinstance(module, _CONVOLUTIONS) or is_linear(module):
        return None
    kind = type(module).__name__
    if module.groups == module.in_channels > 1:
        return f"it is a depthwise {kind}"
    if module.groups > 1:
        return f"it is a {kind} in {module.groups} groups"
    return f"it is a {kind}; of convolutions, only nn.Conv2d is pruned"
