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
    """The claim of a report about a pruned layer.

    Attributes:
        sparsity: The least fraction of zero weights; 0 if nothing is claimed.
        pattern: The N:M pattern of each group, if there is one.
    """

    sparsity: float
    pattern: SemiStructured | None

    def breach(self, weight: Tensor) -> str | None:
        """Return how a weight (rows, columns) violates the claim; `None` if it does not."""
        kept = weight != 0
        rows, columns = kept.shape
        if self.pattern is not None:
            return _broken_group(kept, self.pattern)
        # A claim without a pattern is a count of the whole layer, since rows may have different
        # numbers of zeros. More zeros than claimed are no breach.
        expected = rows * columns - round(self.sparsity * rows * columns)
        count = int(kept.sum())
        if count <= expected:
            return None
        in_rows = kept.sum(dim=1)
        row = int(in_rows.argmax())
        return (
            f"{1 - count / (rows * columns):.1%} of it is zero, expected {self.sparsity:.1%}; row "
            f"{row} has the fewest zeros, {columns - int(in_rows[row])} of {columns}"
        )


def _broken_group(kept: Tensor, pattern: SemiStructured) -> str | None:
    """Return the first group of bool `kept` (rows, columns) with too many weights, or `None`."""
    group = pattern.group
    if not pattern.divides(kept.shape[1]):
        return f"its {kept.shape[1]} columns do not split into groups of {group}"
    counts = kept.unflatten(1, (-1, group)).sum(dim=2)
    broken = (counts > pattern.kept).nonzero()
    if not len(broken):
        return None
    row, index = (int(i) for i in broken[0])
    return (
        f"{len(broken)} of {counts.numel()} groups are not {pattern}, the first in row {row}, "
        f"columns {group * index} to {group * (index + 1) - 1}: {int(counts[row, index])} of "
        f"{group} are not zero"
    )


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
