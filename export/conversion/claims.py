"""The claims of a pruning report about a checkpoint, which an export checks on its weights."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mrp_lightning.records.report import NAME, PruningReport
from mrp_lightning.solver.grid import Grid
from mrp_lightning.solver.patterns import SemiStructured


@dataclass(frozen=True)
class Claim:
    """The claim of a report about a pruned layer."""

    sparsity: float  # the least fraction of zero weights; 0 if nothing is claimed
    pattern: SemiStructured | None  # of each group, if there is one

    def breach(self, weight: Tensor) -> str | None:
        """Return how a weight (rows, columns) violates the claim; `None` if it does not."""
        kept, pattern = weight != 0, self.pattern
        if pattern is not None:
            if not pattern.divides(kept.shape[1]):
                return f"its {kept.shape[1]} columns do not split into groups of {pattern.group}"
            counts = kept.unflatten(1, (-1, pattern.group)).sum(dim=2)
            broken = int((counts > pattern.kept).sum())
            return f"{broken} of {counts.numel()} groups are not {pattern}" if broken else None
        # A claim without a pattern is a count of the whole layer, since rows may have different
        # numbers of zeros. More zeros than claimed are no breach.
        size, count = kept.numel(), int(kept.sum())
        if count <= size - round(self.sparsity * size):
            return None
        return f"{1 - count / size:.2%} of it is zero, expected {self.sparsity:.2%}"


@dataclass(frozen=True)
class Claims:
    """The claims of a `pruning_report.json` that an export checks.

    Attributes:
        layers: The claims of the pruned layers by name; `None` without a report.
        structure: The kind of units that were removed as a whole, such as `neurons`, or `None`.
        grid: The grid of the weights, or `None`.
        grids: All grids, also that of the output head, which is none of the layers.
    """

    layers: dict[str, Claim] | None = None
    structure: str | None = None
    grid: Grid | None = None
    grids: Sequence[Grid] = ()

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> "Claims":
        """Return the claims of the report in a directory, none if there is no report.

        Raises:
            FormatError: The report is damaged, or of another version.
        """
        file = Path(directory) / NAME
        if not file.is_file():
            return cls()
        report = PruningReport.load(file)
        amount, structure = report.amount, report.config.get("structure")
        groups = amount.pattern if isinstance(amount.pattern, SemiStructured) else None
        is_narrow = structure is not None  # removed columns no longer exist, so there are no zeros
        layers = {
            row.name: Claim(0.0 if is_narrow else row.sparsity or 0.0, groups)
            for row in report.pruned
            if row.sparsity is not None or amount.for_head.grid is None  # a head has no sparsity
        }
        return cls(layers, structure, amount.grid, amount.grids)
