"""The record of one finished block, and its file in the journal."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mrp_ground.grid import GridParameters
from mrp_lightning.errors import JournalError
from mrp_lightning.json_files import as_dataclass
from mrp_lightning.records.grid_file import save_parameters
from mrp_lightning.records.report import BlockReport, LayerReport
from mrp_lightning.targets.layers import Layer

_KEY = "record"
"""The key, in the metadata of a file, of a record's content other than weights."""
_LONGEST_HEADER = 100_000_000  # bytes, as the library has it


@dataclass(frozen=True, eq=False)
class BlockRecord:
    """The record of one finished block, or of the layers outside of the blocks.

    Attributes:
        name: The name of the block, empty for layers outside of the blocks.
        rows: The rows of its layers in the report, skipped layers included.
        block: The row of the block itself, `None` without tuning and allocation.
        weights: The parameters of pruned layers, and of others that were tuned, by their names in
            the checkpoint.
        grid: The parameters of its layers on the grid of an engine, which the journal stores in a
            file of their own: the file of a streamed block becomes one of the checkpoint.
    """

    name: str
    rows: list[LayerReport] = field(default_factory=list)
    block: BlockReport | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)
    grid: dict[str, GridParameters] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        layers: Sequence[Layer],
        rows: list[LayerReport],
        block: BlockReport | None,
        tuned: Sequence[Layer] = (),
    ) -> "BlockRecord":
        """Return a record with the weights of the layers that are pruned, and of `tuned` ones."""
        names = {row.name for row in rows if row.skipped is None}
        changed = [*(layer for layer in layers if layer.name in names), *tuned]
        weights = {layer.parameter_name: layer.parameter.detach() for layer in changed}
        return cls(name, rows, block, weights)

    def restore(
        self,
        layers: Sequence[Layer],
        before_change: Callable[[Layer], None],
        tuned: Sequence[Layer] = (),
    ) -> None:
        """Write the weights back into the pruned layers of the block, and into the `tuned` ones.

        `before_change` is called with each of these layers before any of them is written.

        Raises:
            JournalError: The record has pruned layers that are not among `layers`.
        """
        changed = self.pruned(layers)
        names = {layer.name for layer in changed}
        if lost := [row.name for row in self.rows if row.skipped is None and row.name not in names]:
            raise JournalError(
                f"The journal holds pruned layers that the block `{self.name}` does not have: "
                f"{', '.join(lost[:5])}. It is of another version: give `resume=False`, which "
                "starts afresh."
            )
        changed += [layer for layer in tuned if layer.parameter_name in self.weights]
        for layer in changed:
            before_change(layer)
        with torch.no_grad():
            for name, parameter in {x.parameter_name: x.parameter for x in changed}.items():
                parameter.copy_(self.weights[name])

    def pruned(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return those of `layers` that were pruned."""
        names = {row.name for row in self.rows if row.skipped is None}
        return [layer for layer in layers if layer.name in names]

    def on_cpu(self) -> "BlockRecord":
        """Return the record with contiguous weights on the CPU."""
        weights = {n: w.detach().cpu().contiguous() for n, w in self.weights.items()}
        return replace(self, weights=weights)

    def save(self, file: Path) -> None:
        """Write a record that is `on_cpu`."""
        content: dict[str, Any] = {"name": self.name}
        content["layers"] = [row.to_dict() for row in self.rows]
        if self.block is not None:
            content["block"] = self.block.to_dict()
        save_file(self.weights, file, {"format": "pt", _KEY: json.dumps(content)})

    def save_grid(self, file: Path) -> None:
        """Write the parameters of the block's grid."""
        save_parameters(self.grid, file, {_KEY: "grid"})

    @staticmethod
    def save_factors(factors: Mapping[str, Tensor], file: Path) -> None:
        """Write the factors of all blocks by which they are balanced."""
        save_file(dict(factors), file, {"format": "pt", _KEY: "balance"})

    @staticmethod
    def is_in(file: Path) -> bool:
        """Return whether this class wrote a file, wholly or in part, by its header.

        The weights are not read: a process that was killed may have written a part of them.
        """
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(min(length, _LONGEST_HEADER)))
            return _KEY in header["__metadata__"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    @classmethod
    def load(cls, file: Path) -> "BlockRecord":
        """Read a file that `save` wrote.

        Raises:
            FormatError: The rows are damaged, or of another version of mrp-lightning.
        """
        with safe_open(file, "pt") as opened:
            weights = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            text = (opened.metadata() or {}).get(_KEY, "")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):  # RecursionError: brackets nested too deeply
            content = None  # refused below, as any content that is no record
        remedy = "set `resume: false` to start the run afresh"
        header = as_dataclass(_Header, content, str(file), remedy)
        return cls(header.name, header.layers, header.block, weights)


@dataclass(kw_only=True)
class _Header:
    """The part of a record that is written as JSON beside the weights."""

    name: str
    layers: list[LayerReport]
    block: BlockReport | None = None
