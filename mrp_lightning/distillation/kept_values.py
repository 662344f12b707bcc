"""An optimizer of the kept values of parameters alone, in float32.

A step of AdamW on a weight of which half is removed needs moments for the other half only, and a
weight in bfloat16, whose eight significant bits would round most steps away, needs a copy in
float32. Both are one thing: the optimizer gets a float32 vector of the values that are kept in
place of the parameter, and the parameter gets these values back after each step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

_KEY = "kept_values"
"""The key of an optimizer's state for the values."""
_PARTS = "parts"
"""The key for the tensors that torchao's moments consist of."""
_ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"}
    | {"Rprop", "SGD"}
    | {"Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"}  # torchao's
)


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer changes each entry by its own gradients alone.

    Such are many of torch, and those of torchao, whose moments share scales.
    """
    kind = type(optimizer)
    is_known = kind.__module__.startswith(("torch.optim.", "torchao.optim."))
    return is_known and kind.__name__ in _ELEMENTWISE


def plain_moments(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of an optimizer with plain tensors in place of torchao's 8-bit moments.

    `torch.load` cannot bring torchao's tensors to another device, as Lightning asks it to.
    """
    from torchao.optim.subclass_8bit import OptimState8bit

    plain = {}
    for parameter, values in state.items():
        plain[parameter] = dict(values)
        for name, value in values.items():
            if isinstance(value, OptimState8bit):
                names, context = value.__tensor_flatten__()
                parts = {part: getattr(value, part) for part in names}
                plain[parameter][name] = {_PARTS: parts, "context": context}
    return plain


def moments_of_plain(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of an optimizer of which `plain_moments` returned the argument."""
    from torchao.optim.subclass_8bit import OptimState8bit

    moments = {}
    for parameter, values in state.items():
        moments[parameter] = dict(values)
        for name, value in values.items():
            if isinstance(value, Mapping) and _PARTS in value:
                parts = value[_PARTS], value["context"]
                moments[parameter][name] = OptimState8bit.__tensor_unflatten__(*parts)
    return moments


@dataclass(frozen=True, eq=False)
class _Part:
    """A parameter, its kept entries (bool, of its shape; `None`: all), and the vector of these.

    The vector ends in zeros, without gradients, up to a multiple of the entries that share a scale
    of the optimizer's moments: torchao leaves others in 32 bits.
    """

    parameter: nn.Parameter
    kept: Tensor | None
    values: nn.Parameter

    @classmethod
    def of(cls, parameter: nn.Parameter, kept: Tensor | None, multiple: int) -> "_Part":
        """Return the part with the parameter's present values."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        values = _chosen(parameter.detach(), kept)
        padded = F.pad(values.to(wide), (0, -len(values) % multiple))
        return cls(parameter, kept, nn.Parameter(padded.clone()))

    def take_gradient(self) -> None:
        """Move the parameter's gradient to the values."""
        gradient = self.parameter.grad
        if gradient is not None:
            chosen = _chosen(gradient, self.kept).to(self.values.dtype)
            padding = len(self.values) - len(chosen)
            self.values.grad = F.pad(chosen, (0, padding)) if padding else chosen
            self.parameter.grad = None

    def write(self) -> None:
        """Copy the values to the parameter, rounded to its dtype."""
        values, parameter = self.values.detach(), self.parameter.detach()
        if self.kept is None:
            parameter.copy_(values[: parameter.numel()].view_as(parameter))
        else:
            parameter.masked_scatter_(self.kept, values.to(parameter.dtype))


def _chosen(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """Return the kept entries of a tensor as a vector."""
    return tensor.flatten() if kept is None else tensor[kept]


class KeptValues:
    """The values that an optimizer trains in place of some of its parameters.

    Entries that are not kept stay as they are, and have no moments. A checkpoint of the optimizer
    holds the values, so that a resumed training does not depend on the parameters' rounding.

    Args:
        optimizer: An optimizer before its first step, for which `is_elementwise` is true. It steps
            the values from now on, and the parameters after them.
        kept: The entries to train of each parameter, bool of its shape; `None` for all.
    """

    def __init__(self, optimizer: Optimizer, kept: Mapping[nn.Parameter, Tensor | None]) -> None:
        self._parts: list[_Part] = []
        multiple = getattr(optimizer, "block_size", 1)
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter in kept:
                    part = _Part.of(parameter, kept[parameter], multiple)
                    group["params"][index] = part.values
                    self._parts.append(part)
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_: self._write()),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Return whether the optimizer trains values in place of this parameter."""
        return any(part.parameter is parameter for part in self._parts)

    def take_gradients(self) -> None:
        """Move the gradients of the parameters to the values: before clipping and each step."""
        for part in self._parts:
            part.take_gradient()

    def release(self) -> None:
        """Remove the hooks from the optimizer, which then changes the parameters no more."""
        for hook in self._hooks:
            hook.remove()
        self._parts, self._hooks = [], []

    @torch.no_grad()
    def _write(self) -> None:
        for part in self._parts:
            part.write()

    def _save(self, _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        # A list: several objects may each own some parameters of one optimizer, and load in the
        # order in which they saved.
        return {**state, _KEY: [*state.get(_KEY, ()), [p.values.detach() for p in self._parts]]}

    def _load(self, _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if not state.get(_KEY):
            return state
        values, *of_others = state[_KEY]
        with torch.no_grad():
            for part, stored in zip(self._parts, values, strict=True):
                part.values.copy_(stored)
                part.write()
        return {**state, _KEY: of_others}
