"""A dry run: what pruning a block alone would do to the output of the dense model."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from mrp_lightning.allocation.output_change import OutputChange
from mrp_lightning.calibration.offload import Pinned
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Walk
from mrp_lightning.errors import TargetError
from mrp_lightning.processes import Processes
from mrp_lightning.targets.layers import Layer


@dataclass(frozen=True)
class Change:
    """The effect of pruning one block alone.

    Attributes:
        of_output: The mean change of the model's output; see `OutputChange`.
        layers: The layers of the block that are run, and so will be pruned.
    """

    of_output: float
    layers: list[Layer]


@dataclass(frozen=True, eq=False)
class DryRun:
    """One pass over the blocks of the dense model, which leaves them as they were.

    Attributes:
        model: The module whose forward the walk runs.
        walk: A walk over the dense model, at its start.
        layers: The layers to prune, by block.
        padding: What tells tokens from padding.
        pinned: Keeps a block on the device while it runs.
        prune: Prunes layers of a block, by its number, and returns the names of those it pruned.
        tell: Called with what is being done.
        processes: The processes that share the batches and the rows of the layers.
    """

    model: nn.Module
    walk: Walk
    layers: Mapping[str, Sequence[Layer]]
    padding: Padding
    pinned: Pinned
    prune: Callable[[int, list[Layer]], set[str]]
    tell: Callable[[str], None]
    processes: Processes

    def changes(self) -> dict[str, Change]:
        """Prune each block, run on to the output, put its weights back, and go on with the next.

        Returns:
            The changes by the name of the block, but of blocks of which no layer is run.

        Raises:
            TargetError: The model returns nothing that can be compared, or no finite numbers.
        """
        waiting = [k for k, block in enumerate(self.walk.blocks) if self.layers[block.name]]
        last = max(waiting, default=-1)
        output = OutputChange(self.model, self.walk, self.padding, self.processes)
        changes: dict[str, Change] = {}
        for k, block in enumerate(self.walk.blocks[: last + 1]):
            layers = list(self.layers[block.name])
            with self.pinned(block.module):
                with _put_back(layers):
                    run = self.prune(k, layers)
                    self.tell(f"{block.name}, the model's output")
                    found = output.of(k) if run else 0.0
                if not math.isfinite(found):
                    raise TargetError(
                        f"`allocation: output`: with {block.name} pruned the output differs by "
                        f"{found}. Expected a finite number: load the model in bfloat16 or "
                        "float32, or leave `allocation` out."
                    )
                for i in self.walk.advance(k) if k < last else ():
                    self.tell(f"{block.name}, outputs {i + 1}/{len(self.walk.batches)}")
            if run:
                changes[block.name] = Change(found, [x for x in layers if x.name in run])
        return changes


@contextmanager
def _put_back(layers: Sequence[Layer]) -> Iterator[None]:
    """Give layers the weights that they have now after this context, whatever happens in it."""
    before = [layer.weight.clone() for layer in layers]
    try:
        yield
    finally:
        for layer, weight in zip(layers, before, strict=True):
            layer.write_(weight)
