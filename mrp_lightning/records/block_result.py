"""The result of one finished block, which a pruning makes, a journal stores and a report lists."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mrp_lightning.errors import JournalError
from mrp_lightning.records.grid_file import save_parameters
from mrp_lightning.records.rows import BlockReport, LayerReport
from mrp_lightning.solver.grid import GridParameters
from mrp_lightning.storage.json_files import as_dataclass
from mrp_lightning.targets.layers import Layer

_KEY = "record"
"""The key, in the metadata of a journal's file, of its content other than tensors."""


@dataclass(frozen=True, eq=False)
class LayerResult:
    """The result of one layer, whose weight is written into the model.

    Attributes:
        row: The row of the layer in the report; it has the reason if the layer was left dense.
        grid: The parameters of its weight on the grid of an engine; `None` for other grids, whose
            values give the parameters back, and without a grid.
    """

    row: LayerReport
    grid: GridParameters | None = None

    @property
    def name(self) -> str:
        """The name of the layer in the checkpoint."""
        return self.row.name

    @property
    def is_pruned(self) -> bool:
        """Whether the layer is pruned; otherwise it was left dense."""
        return self.row.skipped is None


@dataclass(frozen=True, eq=False)
class BlockResult:
    """The result of one finished block, or of the layers outside of the blocks.

    Attributes:
        name: The name of the block, empty for layers outside of the blocks.
        layers: The results of its layers, those that were left dense included.
        row: The row of the block in the report, `None` for a block that is not tuned and has no
            sparsity of its own.
        weights: The parameters of pruned layers, and of others that were tuned, by their names in
            the checkpoint; in the journal of a streamed block, all tensors of the block. Empty for
            a result that needs none, since the model holds them.
    """

    name: str
    layers: tuple[LayerResult, ...] = ()
    row: BlockReport | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> list[LayerReport]:
        """The rows of the layers in the report."""
        return [result.row for result in self.layers]

    @property
    def pruned_rows(self) -> list[LayerReport]:
        """The rows of the layers that are pruned."""
        return [result.row for result in self.layers if result.is_pruned]

    @property
    def grid(self) -> dict[str, GridParameters]:
        """The parameters of the layers on the grid of an engine, by the names of layers."""
        return {result.name: result.grid for result in self.layers if result.grid is not None}

    def pruned(self, layers: Iterable[Layer]) -> list[Layer]:
        """Return the pruned ones among `layers`, in their order."""
        names = {result.name for result in self.layers if result.is_pruned}
        return [layer for layer in layers if layer.name in names]

    def with_grid(self, grid: Mapping[str, GridParameters]) -> "BlockResult":
        """Return the result with grid parameters by layer name; other layers keep their own."""
        layers = tuple(replace(x, grid=grid.get(x.name, x.grid)) for x in self.layers)
        return replace(self, layers=layers)

    def with_weights_of(self, layers: Iterable[Layer], tuned: Iterable[Layer]) -> "BlockResult":
        """Return a copy whose `weights` are the model's parameters now, not their values.

        Of the `layers` of the block the pruned ones count, and all that block tuning changed.
        """
        changed = [*self.pruned(layers), *tuned]
        weights = {layer.parameter_name: layer.parameter.detach() for layer in changed}
        return replace(self, weights=weights)

    def restore(
        self,
        layers: Sequence[Layer],
        before_change: Callable[[Layer], None],
        tuned: Sequence[Layer] = (),
    ) -> None:
        """Write the weights back into the pruned layers of the block, and into the `tuned` ones.

        `before_change` is called with each of these layers before any of them is written.
        """
        changed = self.pruned(layers)
        names = {layer.name for layer in changed}
        if lost := [row.name for row in self.pruned_rows if row.name not in names]:
            raise JournalError(
                f"The journal holds pruned layers that the block `{self.name}` does not have: "
                f"{', '.join(lost[:5])}. It is of another version: give `resume=False`, which "
                "starts afresh."
            )
        # Tuned layers have no rows in the result, only weights.
        changed += [layer for layer in tuned if layer.parameter_name in self.weights]
        # All before any: layers of one stack share a parameter, so that writing the first one would
        # change the dense weights of the next.
        for layer in changed:
            before_change(layer)
        with torch.no_grad():
            # By parameter, not by layer: the experts of a stack share one.
            for name, parameter in {x.parameter_name: x.parameter for x in changed}.items():
                parameter.copy_(self.weights[name])

    def on_cpu(self) -> "BlockResult":
        """Return the result with contiguous weights on the CPU."""
        weights = {n: w.detach().cpu().contiguous() for n, w in self.weights.items()}
        return replace(self, weights=weights)

    def save(self, file: Path) -> None:
        """Write a result that is `on_cpu`, without the parameters of grids."""
        content: dict[str, Any] = {"name": self.name}
        content["layers"] = [row.to_dict() for row in self.rows]
        if self.row is not None:
            content["block"] = asdict(self.row)
        metadata = {"format": "pt", _KEY: json.dumps(content)}
        save_file(dict(self.weights), file, metadata)

    def save_grid(self, file: Path) -> None:
        """Write the parameters of grids, apart: a streamed block's file joins the checkpoint."""
        save_parameters(self.grid, file)

    @classmethod
    def load(cls, file: Path) -> "BlockResult":
        """Read a file that `save` wrote, onto the CPU; `with_grid` adds the parameters of grids."""
        with safe_open(file, "pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            text = (opened.metadata() or {}).get(_KEY, "")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):  # RecursionError: brackets nested too deeply
            content = None  # refused below, as any content that is no result
        remedy = "set `resume: false` (`prune --restart`) to start the run afresh"
        header = as_dataclass(_Header, content, str(file), remedy)
        return cls(header.name, tuple(map(LayerResult, header.layers)), header.block, weights)


@dataclass(kw_only=True)
class _Header:
    """The part of a result that is written as JSON beside the weights."""

    name: str
    layers: list[LayerReport]
    block: BlockReport | None = None
