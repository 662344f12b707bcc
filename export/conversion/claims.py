"""What a pruning report claims of each layer, held against the weights."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from mrp_lightning.errors import FormatError, OptionError, PatternError
from mrp_lightning.files import BESIDE
from mrp_lightning.json_files import read_as
from mrp_lightning.records.report import NAME
from mrp_lightning.solver.patterns import SemiStructured, make_pattern
from mrp_sparse.formats.grid import Grid

_ROUNDING = 1e-6
"""The fraction of weights by which a report's `sparsity`, a mean in float32, may be off."""


@dataclass(frozen=True)
class Claim:
    """What a report claims of a pruned layer.

    Attributes:
        sparsity: The fraction of the weights that are zero, at least; 0 where nothing is claimed.
        pattern: The pattern N:M that each group has, if there is one.
    """

    sparsity: float
    pattern: SemiStructured | None

    def breach(self, weight: Tensor) -> str | None:
        """How a weight (rows, columns) breaks the claim, and where first; `None` if it holds."""
        kept = weight != 0
        rows, columns = kept.shape
        if self.pattern is not None:
            return _broken_group(kept, self.pattern)
        expected = (1 - self.sparsity + _ROUNDING) * rows * columns
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
    """Name the first group of a bool matrix (rows, columns) that keeps too many, if one does."""
    group = pattern.group
    if not pattern.divides(kept.shape[1]):
        return f"its {kept.shape[1]} columns do not split into groups of {group}"
    counts = kept.unflatten(1, (-1, group)).sum(dim=2)
    broken = (counts > pattern.kept).nonzero()
    if not len(broken):
        return None
    row, place = (int(i) for i in broken[0])
    return (
        f"{len(broken)} of {counts.numel()} groups are not {pattern}, the first in row {row}, "
        f"columns {group * place} to {group * (place + 1) - 1}: {int(counts[row, place])} of "
        f"{group} are not zero"
    )


@dataclass(kw_only=True)
class _Row:
    name: str
    skipped: str | None = None
    sparsity: float | None = None


@dataclass(kw_only=True)
class _Config:
    pattern: Any = None
    structure: str | None = None
    bits: int | None = None
    group_size: int | None = None


@dataclass(kw_only=True)
class _Report:
    """The part of a `pruning_report.json` that an export counts on."""

    layers: list[_Row]
    config: _Config = field(default_factory=_Config)


def read_claims(directory: str | os.PathLike[str]) -> dict[str, Claim] | None:
    """The claims of the report in a directory, by layer; `None` if there is no report.

    Raises:
        FormatError: The report is damaged.
        PatternError: Its pattern is none.
    """
    file = Path(directory) / NAME
    if not file.is_file():
        return None
    report = read_as(_Report, file, "prune again")
    pattern = report.config.pattern
    made = None if pattern is None else make_pattern(None, pattern)
    groups = made if isinstance(made, SemiStructured) else None
    is_narrow = report.config.structure is not None  # its columns are gone, and none are zero
    return {
        row.name: Claim(0.0 if is_narrow else row.sparsity or 0.0, groups)
        for row in report.layers
        if row.skipped is None
    }


def read_structure(directory: str | os.PathLike[str]) -> str | None:
    """What the report in a directory says was removed whole, such as `neurons`; `None` if nothing.

    Raises:
        FormatError: The report is damaged.
    """
    file = Path(directory) / NAME
    return read_as(_Report, file, "prune again").config.structure if file.is_file() else None


def read_grid(directory: str | os.PathLike[str]) -> Grid | None:
    """The grid that the report in a directory says the weights are on; `None` if it says none.

    Raises:
        FormatError: The report is damaged.
    """
    file = Path(directory) / NAME
    config = read_as(_Report, file, "prune again").config if file.is_file() else _Config()
    if config.bits is None:
        return None
    try:
        return Grid(config.bits, 64 if config.group_size is None else config.group_size)
    except OptionError as error:
        raise FormatError(f"{file}: `config` says what no run can have: {error}") from error


def layers_beside(directory: str | os.PathLike[str]) -> set[str]:
    """The layers whose weights lie beside those of the model, as the module's own.

    Raises:
        FormatError: Their file cannot be read.
    """
    file = Path(directory) / BESIDE
    if not file.is_file():
        return set()
    try:
        with safe_open(file, framework="pt") as opened:
            return {name.rpartition(".")[0] for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{file} is damaged: {error}. Fetch or prune it again.") from error


def refuse_unknown(directory: str | os.PathLike[str], unknown: Iterable[str]) -> None:
    """Refuse a report that lists pruned layers which the model does not have."""
    if names := sorted(unknown):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise PatternError(
            f"{directory}: {NAME} lists pruned layers that the model does not have: "
            f"{', '.join(names[:5])}{more}. It is of another model: fetch or prune this one again, "
            "or remove the report."
        )
