"""The result of one finished block, which a pruning makes, a journal stores and a report lists."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors itself


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
        """Return a copy of this result whose `weights` are those that the model has now.

        Args:
            layers: The layers of the block, of which the pruned ones count.
            tuned: Other layers whose weights block tuning changed.

        Returns:
            The copy; its tensors share the memory of the parameters, and this result is unchanged.
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

        Raises:
            JournalError: The result has pruned layers that are not among `layers`.
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
            content["block"] = self.row.to_dict()
        save_tensors(self.weights, file, json.dumps(content))

    def save_grid(self, file: Path) -> None:
        """Write the parameters of grids.

        The file is separate, since that of a streamed block's weights joins the checkpoint.
        """
        save_parameters(self.grid, file, {_KEY: "grid"})

    @classmethod
    def load(cls, file: Path) -> "BlockResult":
        """Read a file that `save` wrote, onto the CPU; `with_grid` adds the parameters of grids.

        Raises:
            FormatError: The rows are damaged, or of another version of mrp-lightning.
            OSError, SafetensorError: The file is missing or truncated.
        """
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


def save_tensors(tensors: Mapping[str, Tensor], file: Path, about: str) -> None:
    """Write contiguous tensors to a file of a journal.

    `about` is stored under the metadata key `record`, by which `is_of_journal` recognises the file.
    """
    save_file(dict(tensors), file, {"format": "pt", _KEY: about})


def is_of_journal(file: Path) -> bool:
    """Return whether the header of a file has the metadata key `record`, as those of a journal do.

    The weights are not read, and may be truncated: the process that wrote them may have been
    killed. A file without a whole header is not recognised.
    """
    try:
        with file.open("rb") as opened:
            # The layout of safetensors: 8 bytes of length, a header in JSON, then the tensors. The
            # bound keeps a file of another kind from being read whole by its first 8 bytes.
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, _LONGEST_HEADER)))
        return _KEY in header["__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


@dataclass(kw_only=True)
class _Header:
    """The part of a result that is written as JSON beside the weights."""

    name: str
    layers: list[LayerReport]
    block: BlockReport | None = None
