"""One pass over the blocks of the dense model, to measure each before any is pruned."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from mrp_lightning.calibration.norms import InputNorms
from mrp_lightning.calibration.offload import Pinned
from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Walk
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.targets.layers import Expert, Layer


@dataclass(frozen=True)
class Measure:
    """What is measured of a block of the dense model.

    Attributes:
        value: For DLP the sum over its layers of the median of |w_ij|·‖x_j‖, x being their inputs;
            for `output` the mean change of the model's output where the block alone is pruned.
        layers: The layers of the block that are run, and so will be pruned.
    """

    value: float
    layers: list[Layer]


@dataclass(frozen=True, eq=False)
class DensePass:
    """One pass over the blocks of the dense model.

    Attributes:
        model: The module whose forward the walk runs.
        walk: A walk over the dense model, at its start.
        layers: The layers to prune, by block.
        padding: What tells tokens from padding.
        pinned: Keeps a block on the device while it runs.
        tell: Called with what is being done.
        processes: The processes that share the batches and the rows of the layers.
    """

    model: nn.Module
    walk: Walk
    layers: Mapping[str, Sequence[Layer]]
    padding: Padding
    pinned: Pinned
    tell: Callable[[str], None]
    processes: Processes = ALONE

    @property
    def last(self) -> int:
        """The number of the last block that has layers to prune, −1 if none has."""
        waiting = (k for k, block in enumerate(self.walk.blocks) if self.layers[block.name])
        return max(waiting, default=-1)

    def measure(self, of: Callable[[int, list[Layer]], Measure | None]) -> dict[str, Measure]:
        """Measure block after block, each where it runs.

        Args:
            of: Measures a block, by its number and its layers, and goes on to the next. `None` is
                for a block of which no layer is run.

        Returns:
            The measures, by the names of the blocks.
        """
        measures: dict[str, Measure] = {}
        for k, block in enumerate(self.walk.blocks[: self.last + 1]):
            with self.pinned(block.module):
                measure = of(k, list(self.layers[block.name]))
            if measure is not None:
                measures[block.name] = measure
        return measures


def medians_of_blocks(dense: DensePass) -> dict[str, Measure]:
    """What DLP goes by: the sum over a block's layers of the median of |w_ij|·‖x_j‖."""
    walk = dense.walk

    def medians(k: int, layers: list[Layer]) -> Measure | None:
        norms = InputNorms(layers, dense.padding)
        with norms.hooked():
            for i in range(len(walk.batches)):
                walk.step(k, i)
                norms.end_batch()
                dense.tell(f"{walk.blocks[k].name}, norms {i + 1}/{len(walk.batches)}")
        norms.sum_over(dense.processes)
        walk.leave(k)
        # Experts that saw no tokens are pruned by what the others saw.
        run = [x for x in layers if norms.of(x) is not None or isinstance(x, Expert)]
        if all(norms.of(x) is None for x in run):
            return None
        return Measure(math.fsum(_median(x, norms.of(x)) for x in layers), run)

    return dense.measure(medians)


def _median(layer: Layer, norms: Tensor | None) -> float:
    if norms is None:
        return 0.0
    return float((layer.weight.float().abs() * norms.to(layer.weight.device)).median())
