"""A dry run: what pruning would lose in each block of the dense model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from mrp_lightning.pruning.block import BlockPruner
from mrp_lightning.pruning.dense_pass import DensePass, Measure
from mrp_lightning.pruning.report import PruningReport
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer


def losses_of_blocks(dense: DensePass, recipe: Recipe) -> dict[str, Measure]:
    """Prune each block, put its weights back, and go on with the dense model's outputs.

    Args:
        dense: The pass.
        recipe: How the layers are pruned.

    Returns:
        The mean relative loss of each block's layers, by its name, but those of which no layer is
        run.
    """
    walk, last = dense.walk, dense.last

    def loss(k: int, layers: list[Layer]) -> Measure | None:
        pruner = BlockPruner(
            walk=walk,
            k=k,
            recipe=recipe,
            true_sequential=False,
            padding=dense.padding,
            report=PruningReport({}),
            tell=lambda task: dense.tell(f"dry run, {task}"),
            processes=dense.processes,
        )
        with _put_back(layers):
            rows = {row.name: row.relative_loss or 0.0 for row in pruner.prune(layers)}
        for i in walk.advance(k) if k < last else ():
            dense.tell(f"dry run, {walk.blocks[k].name}, outputs {i + 1}/{len(walk.batches)}")
        if not rows:
            return None
        return Measure(fmean(rows.values()), [layer for layer in layers if layer.name in rows])

    return dense.measure(loss)


@contextmanager
def _put_back(layers: Sequence[Layer]) -> Iterator[None]:
    """Give layers the weights that they have now after this context, whatever happens in it."""
    before = [layer.weight.clone() for layer in layers]
    try:
        yield
    finally:
        for layer, weight in zip(layers, before, strict=True):
            layer.write_(weight)
