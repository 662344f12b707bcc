"""A dry run: what pruning would lose in each block of the dense model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import fmean

from torch import nn

from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.walks import Walk
from mrp_lightning.processes import ALONE, Processes
from mrp_lightning.pruning.allocation import Measure
from mrp_lightning.pruning.block import BlockPruner
from mrp_lightning.pruning.report import PruningReport
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer


def losses_of_blocks(
    walk: Walk,
    layers: Mapping[str, Sequence[Layer]],
    padding: Padding,
    brought: Callable[[nn.Module], AbstractContextManager[None]],
    tell: Callable[[str], None],
    recipe: Recipe,
    processes: Processes = ALONE,
) -> dict[str, Measure]:
    """Prune each block, put its weights back, and go on with the dense model's outputs.

    Args:
        walk: A walk over the dense model, at its start.
        layers: The layers to prune, by block.
        padding: What tells tokens from padding.
        brought: Keeps a block on the device while it runs.
        tell: Called with what is being done.
        recipe: How they are pruned.
        processes: The processes that share the batches and the rows of the layers.

    Returns:
        The mean relative loss of each block's layers, by its name, but those of which no layer is
        run.
    """
    last = max((k for k, block in enumerate(walk.blocks) if layers[block.name]), default=-1)
    measures: dict[str, Measure] = {}
    for k, block in enumerate(walk.blocks[: last + 1]):
        mine = list(layers[block.name])
        pruner = BlockPruner(
            walk=walk,
            k=k,
            recipe=recipe,
            true_sequential=False,
            padding=padding,
            report=PruningReport({}),
            tell=lambda task: tell(f"dry run, {task}"),
            processes=processes,
        )
        with brought(block.module):
            with _put_back(mine):
                rows = {row.name: row.relative_loss or 0.0 for row in pruner.prune(mine)}
            if rows:
                run = [layer for layer in mine if layer.name in rows]
                measures[block.name] = Measure(fmean(rows.values()), run)
            for i in walk.advance(k) if k < last else ():
                tell(f"dry run, {block.name}, outputs {i + 1}/{len(walk.batches)}")
    return measures


@contextmanager
def _put_back(layers: Sequence[Layer]) -> Iterator[None]:
    """Give layers the weights that they have now after this context, whatever happens in it."""
    before = [layer.weight.clone() for layer in layers]
    try:
        yield
    finally:
        for layer, weight in zip(layers, before, strict=True):
            layer.write_(weight)
