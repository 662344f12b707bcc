"""Changing the weights that pruning has kept, by their gradients, while the others stay zero."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mrp_lightning.targets.layers import Layer


class KeptWeights:
    """The weights of some layers that are not zero, with a float32 master copy of them.

    Args:
        layers: The layers, which are pruned.

    Attributes:
        parameters: The parameters in which they are stored.
        masters: The master copies, in the order of the parameters; float64 where those are.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.parameters = list(dict.fromkeys(layer.parameter for layer in layers))
        fixed = {p: torch.ones_like(p, dtype=torch.bool) for p in self.parameters}
        for layer in layers:
            layer.arranged(fixed[layer.parameter]).copy_(layer.view == 0)
        self._fixed = list(fixed.values())
        self.masters = [_wide(p).requires_grad_() for p in self.parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self._best = [p.detach().clone() for p in self.parameters]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of the masters so far."""
        return [master.grad for master in self.masters if master.grad is not None]

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of the parameters to those of their masters."""
        for master, gradient, fixed in zip(self.masters, gradients, self._fixed, strict=True):
            if gradient is not None and master.grad is not None:
                master.grad += gradient.masked_fill(fixed, 0)

    def write(self) -> None:
        """Round the masters into the parameters, after a step, and forget the gradients."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
                assert master.grad is not None
                master.grad.zero_()

    def keep(self) -> None:
        """Take the parameters as they are now for the best."""
        for best, parameter in zip(self._best, self.parameters, strict=True):
            best.copy_(parameter.detach())

    @contextmanager
    def best_at_the_end(self) -> Iterator[None]:
        """Give the parameters their best values after this context, whatever happens in it."""
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, best in zip(self.parameters, self._best, strict=True):
                    parameter.copy_(best)


@contextmanager
def only_these_train(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Record gradients of some parameters, and of no others of the model."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    try:
        model.requires_grad_(False)
        for p in parameters:
            p.requires_grad_()
        with torch.enable_grad():
            yield
    finally:
        for name, p in model.named_parameters():
            p.requires_grad_(before[name])


def _wide(parameter: nn.Parameter) -> Tensor:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(dtype, copy=True)
