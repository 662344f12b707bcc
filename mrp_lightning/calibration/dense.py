"""The dense model's own walk, beside that over the model that is being pruned."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.calibration.walks import Inject, Walk
from mrp_lightning.targets.layers import Layer


class DenseStream:
    """A second walk, over the dense model, which needs no second copy of the model.

    It begins with the walk over the model that is being pruned, and runs a block while it is still
    dense; what is pruned in it meanwhile is put back for the time of a forward. So the weights of
    one block are kept twice. Only where the walk runs all blocks in every forward (`Rerun`) are
    those of all pruned layers. With `keeps_outputs` it has `outputs` also where the walk itself
    needs none.
    """

    def __init__(self, walk: Walk, *, keeps_outputs: bool = False) -> None:
        # By batch, the hidden state that the block last left behind returned: on the walk's store,
        # `None` where the batch does not reach the block.
        self.outputs: list[Tensor | None] = [None] * len(walk.batches)
        self._walk = walk.twin()
        self._keeps_outputs = keeps_outputs or isinstance(self._walk, Inject)
        # By the name of the parameter: modules may get new ones where they are moved.
        self._dense: dict[str, tuple[Layer, Tensor]] = {}

    def remember(self, layer: Layer) -> None:
        """Keep a copy of a layer's dense weight, before it is pruned."""
        if layer.parameter_name not in self._dense:
            dense = layer.parameter.detach().to(self._walk.store, copy=True)
            self._dense[layer.parameter_name] = layer, dense

    def output(self, k: int, i: int) -> Any:
        """Run block k of the dense model on batch i; see `Walk.output`."""
        self._exchange()
        try:
            return self._walk.output(k, i)
        finally:
            self._exchange()

    def advance(self, k: int) -> Iterator[int]:
        """Make the dense outputs of block k the inputs of the next."""
        for i in range(len(self._walk.batches) if self._keeps_outputs else 0):
            self.outputs[i] = self._walk.stored(self.output(k, i))
            self._walk.keep(k, i, self.outputs[i])
            yield i
        later = {id(p) for block in self._walk.runs_after(k) for p in block.module.parameters()}
        self._dense = {
            key: (layer, dense)
            for key, (layer, dense) in self._dense.items()
            if id(layer.parameter) in later
        }

    def _exchange(self) -> None:
        """Let the model's weights and those that are kept change places. No weight moves."""
        with torch.no_grad():
            for layer, dense in self._dense.values():
                before = layer.parameter.detach().clone()
                layer.parameter.copy_(dense)
                dense.copy_(before)
