"""A dry run: what pruning a block alone would do to the output of the dense model."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mrp_lightning.allocation.dense_pass import DensePass, Measure
from mrp_lightning.allocation.output_change import OutputChange
from mrp_lightning.errors import TargetError
from mrp_lightning.targets.layers import Layer


def changes_of_output(
    dense: DensePass, prune_block: Callable[[int, list[Layer]], set[str]]
) -> dict[str, Measure]:
    """Prune each block, run on to the output, put its weights back, and go on with the next.

    Args:
        dense: The pass.
        prune_block: Prunes layers of a block, by its number, and returns the names of those that
            it has pruned.

    Returns:
        The mean change of the model's output with each block alone pruned, by the block's name,
        but those of which no layer is run.

    Raises:
        TargetError: The model returns nothing that can be compared, or no finite numbers.
    """
    walk, last = dense.walk, dense.last
    output = OutputChange(dense)

    def change(k: int, layers: list[Layer]) -> Measure | None:
        name = walk.blocks[k].name
        with _put_back(layers):
            run = prune_block(k, layers)
            dense.tell(f"dry run, {name}, the model's output")
            found = output.of(k) if run else 0.0
        if not math.isfinite(found):
            raise TargetError(
                f"`allocation: output`: with {name} pruned the output differs by {found}. Expected "
                "a finite number: load the model in bfloat16 or float32, or take `allocation: dlp`."
            )
        for i in walk.advance(k) if k < last else ():
            dense.tell(f"dry run, {name}, outputs {i + 1}/{len(walk.batches)}")
        if not run:
            return None
        return Measure(found, [layer for layer in layers if layer.name in run])

    return dense.measure(change)


@contextmanager
def _put_back(layers: Sequence[Layer]) -> Iterator[None]:
    """Give layers the weights that they have now after this context, whatever happens in it."""
    before = [layer.weight.clone() for layer in layers]
    try:
        yield
    finally:
        for layer, weight in zip(layers, before, strict=True):
            layer.write_(weight)
