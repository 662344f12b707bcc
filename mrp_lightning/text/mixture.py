"""Calibration text from several sources, each with its share of the windows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.text.published import CALIBRATION

SELF = "self"
"""The text that the model writes itself."""
STDLIB = "stdlib"
"""The source of Python's standard library."""
GIVEN = ("train_files", "dataset")
"""Text that is given in the argument of this name."""

_SUM = 1e-6  # how far shares may be from 1 in all, as 0.333333 three times is


@dataclass(frozen=True)
class Mixture:
    """The shares of the sources that calibration windows come from, in the order given.

    A source is `self`, `stdlib`, a published text, the name of an argument (`train_files`,
    `dataset`), or the path of a file.

    Attributes:
        shares: The share of each source, above 0, in all 1.
    """

    shares: Mapping[str, float]

    @classmethod
    def of(cls, calibration: str | Mapping[str, float]) -> "Mixture":
        """Take one source, or shares by source; those of 0 are left out.

        Raises:
            OptionError: A source is unknown, a share is no number or below 0, or they are not 1 in
                all; it lists all that is wrong.
        """
        if not isinstance(calibration, str | Mapping):
            raise OptionError(
                "`data.calibration`: expected one source, or a share of each, as in "
                f"{{self: 0.5, c4: 0.5}}; got {calibration!r}."
            )
        given: Mapping[str, Any] = (
            {calibration: 1.0} if isinstance(calibration, str) else calibration
        )
        wrong = [
            f"the share of {name} must be a number from 0 to 1; got {share!r}"
            for name, share in given.items()
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1
        ]
        if not wrong and abs(math.fsum(given.values()) - 1) > _SUM:
            wrong = [
                "expected shares that are 1 in all, as in {self: 0.5, c4: 0.5}; got "
                f"{math.fsum(given.values()):g}"
            ]
        if unknown := [name for name in given if not _is_known(name)]:
            wrong += [
                f"{', '.join(map(repr, unknown))} unknown. Expected {SELF} (the model writes its "
                f"own text), {STDLIB} (Python's standard library), {', '.join(CALIBRATION)} "
                f"(published texts), {' or '.join(GIVEN)} (what `data.train_files` or "
                "`data.dataset` gives), or a file that exists"
            ]
        if wrong:
            raise OptionError(f"`data.calibration`: {'; '.join(wrong)}.")
        return cls({name: float(share) for name, share in given.items() if share})

    @property
    def published(self) -> list[str]:
        """The published texts among the sources."""
        return [name for name in self.shares if name in CALIBRATION]

    def __contains__(self, source: str) -> bool:
        return source in self.shares

    def __str__(self) -> str:
        names = {name: Path(name).name for name in self.shares if not _is_name(name)}
        names[SELF] = "the model's own text"
        if len(self.shares) == 1:
            return "".join(names.get(name, name) for name in self.shares)
        parts = (f"{share:.3g} {names.get(name, name)}" for name, share in self.shares.items())
        return " + ".join(parts)

    def counts(self, windows: int) -> dict[str, int]:
        """How many of all windows each source gives: the largest remainders are rounded up.

        Raises:
            DataError: There are too few for a source to give any.
        """
        exact = {name: share * windows for name, share in self.shares.items()}
        found = {name: math.floor(part + _SUM) for name, part in exact.items()}
        by_remainder = sorted(exact, key=lambda name: found[name] - exact[name])
        for name in by_remainder[: windows - sum(found.values())]:
            found[name] += 1
        if none := [name for name, count in found.items() if not count]:
            raise DataError(
                f"`data.num_samples`: of {windows} windows, the share of {', '.join(none)} is less "
                "than one. Give more, or leave the source out."
            )
        return found


def interleaved(parts: list[Tensor]) -> Tensor:
    """Windows of several sources (count, length) each, evenly spread: any run of them has shares.

    What takes some of all windows, such as a limit of batches or tuning's held-out windows, so
    takes its part of each source.
    """
    places = [(torch.arange(len(part)) + 0.5) / len(part) for part in parts]
    order = torch.cat(places).argsort(stable=True)
    return torch.cat(parts)[order]


def _is_name(source: str) -> bool:
    return source in (SELF, STDLIB, *CALIBRATION, *GIVEN)


def _is_known(source: object) -> bool:
    return isinstance(source, str) and (_is_name(source) or Path(source).expanduser().is_file())
