"""How large the inputs of layers are."""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from mrp_lightning.calibration.padding import Padding
from mrp_lightning.calibration.watch import Watch
from mrp_lightning.processes import Processes
from mrp_lightning.targets.layers import Expert, Layer


class InputNorms(Watch):
    """The root mean square of each input feature of layers, over the tokens that they see."""

    def __init__(self, layers: Sequence[Layer], padding: Padding) -> None:
        super().__init__(layers, padding)
        self._sums: dict[int, Tensor] = {}
        self._tokens: dict[int, int] = {}

    def of(self, layer: Layer) -> Tensor | None:
        """The values of a layer, float32 (columns,); `None` if it saw no tokens."""
        if id(layer) not in self._sums:
            return None
        return (self._sums[id(layer)] / self._tokens[id(layer)]).sqrt()

    def sum_over(self, processes: Processes) -> None:
        """Add what other processes have seen; all of them call this."""
        if processes.size == 1 or not self.layers:
            return
        counts = processes.numbers(*(self._tokens.get(id(layer), 0) for layer in self.layers))
        tokens = [int(sum(column)) for column in zip(*counts, strict=True)]
        sums = [
            self._sums.get(id(layer), torch.zeros(layer.columns)).to(processes.device)
            for layer in self.layers
        ]
        sums = list(processes.sum_(torch.cat(sums)).split([len(part) for part in sums]))
        for layer, total, count in zip(self.layers, sums, tokens, strict=True):
            if count:
                self._sums[id(layer)], self._tokens[id(layer)] = total, count

    def note(self, layer: Layer, x: Tensor, key: Hashable) -> None:  # noqa: ARG002
        """Add the tokens of an input."""
        tokens = self._padding.tokens(layer.inputs(x), layer.module, layer.name)
        self._add(layer, tokens.reshape(-1, layer.columns))

    def note_expert(self, expert: Expert, tokens: Tensor) -> None:
        """Add the tokens that were routed to an expert."""
        self._add(expert, tokens)

    def _add(self, layer: Layer, tokens: Tensor) -> None:
        if len(tokens):
            squares = tokens.detach().float().square().sum(0)
            self._sums[id(layer)] = self._sums.get(id(layer), 0.0) + squares
            self._tokens[id(layer)] = self._tokens.get(id(layer), 0) + len(tokens)
