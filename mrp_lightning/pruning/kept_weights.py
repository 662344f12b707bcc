"""Change the weights that pruning has kept, by their gradients, while the others stay zero."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mrp_lightning.solver.patterns import Dense
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer
from mrp_sparse.formats.grid import Grid


@dataclass(frozen=True, eq=False)
class Codes:
    """The scales of a weight on a grid, and the codes that it may have.

    Attributes:
        scales: (rows, columns), the same in each group.
        lowest: The lowest code, (rows, columns) or one number.
        highest: The highest code.
    """

    scales: Tensor
    lowest: Tensor
    highest: Tensor

    @classmethod
    def of(cls, weight: Tensor, grid: Grid) -> "Codes":
        """Find them. Zero is one of 2^bits codes, as in quantisation alone.

        A group that has the code of one end never gets that of the other.

        Args:
            weight: The weight, (rows, columns), which lies on the grid.
            grid: The grid.

        Raises:
            FormatError: The weight does not lie on the grid.
        """
        codes, scales = grid.decompose(weight)
        columns = weight.shape[1]
        highest = torch.full_like(scales, grid.largest)
        lowest = -highest
        if grid.bits < 8:
            reaches = grid.grouped(codes).amax(2) == grid.largest
            lowest, highest = lowest + reaches.float(), highest - (~reaches).float()

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(grid.group_size, 1)[:, :columns]

        return cls(spread(scales), spread(lowest), spread(highest))

    def nearest(self, weight: Tensor) -> Tensor:
        """The values of the grid that are nearest to a weight (rows, columns)."""
        codes = (weight / self.scales).round_()
        return codes.clamp_(self.lowest, self.highest).mul_(self.scales)


class KeptWeights:
    """The weights of some layers that are not zero, with a float32 master copy of them.

    In quantisation alone they lie on a grid: the parameters are the grid's values nearest to the
    masters, whose gradients are taken as if there were no rounding (the straight-through estimator
    of Bengio et al., 2013). Scales stay as they are.

    Args:
        layers: The layers, which are pruned.
        recipe: How they were pruned, `None` for weights that are free.

    Attributes:
        parameters: The parameters in which they are stored.
        masters: The master copies, in the order of the parameters; float64 where those are.
    """

    def __init__(self, layers: Sequence[Layer], recipe: Recipe | None = None) -> None:
        self.parameters = list(dict.fromkeys(layer.parameter for layer in layers))
        fixed = {p: torch.ones_like(p, dtype=torch.bool) for p in self.parameters}
        removes = recipe is None or not isinstance(recipe.pattern, Dense)
        for layer in layers:
            mine = layer.arranged(fixed[layer.parameter])
            mine.copy_(layer.view == 0 if removes else torch.zeros_like(mine))
        self._fixed = list(fixed.values())
        self.masters = [_wide(p).requires_grad_() for p in self.parameters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self._best = [p.detach().clone() for p in self.parameters]
        self._rounded: list[tuple[Layer, Tensor, Codes]] = []
        if recipe is not None and recipe.grid is not None:
            assert not removes, "weights beside removed ones get on their grid after tuning"
            masters = dict(zip(self.parameters, self.masters, strict=True))
            for layer in layers:
                codes = Codes.of(layer.weight, recipe.grid)
                self._rounded.append((layer, masters[layer.parameter], codes))

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
            for layer, master, codes in self._rounded:
                layer.write_(codes.nearest(layer.arranged(master).flatten(1)))

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
