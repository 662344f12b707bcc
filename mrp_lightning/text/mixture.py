"""Calibration text from several sources, each with its share of the windows."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.text.published import CALIBRATION, EVALUATION

SELF = "self"
"""The text that the model writes itself."""
STDLIB = "stdlib"
"""The source of Python's standard library."""
GIVEN = ("train_files", "dataset")
"""Text that is given in the argument of this name."""

_NAME = re.compile(r"[\w.+-]+")
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

    @property
    def files(self) -> list[str]:
        """The paths among the sources."""
        return [name for name in self.shares if not _is_name(name)]

    def __contains__(self, source: str) -> bool:
        return source in self.shares

    def __str__(self) -> str:
        names = {name: Path(name).name for name in self.files} | {SELF: "the model's own text"}
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


def texts_by_name(evaluation: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Texts to evaluate on, by the names that results give them; texts that have one keep it.

    Raises:
        OptionError: A text is unknown, or a name cannot be part of the name of a metric.
    """
    known = (STDLIB, *EVALUATION)
    if not isinstance(evaluation, Mapping):
        if unknown := [text for text in evaluation if text not in known]:
            raise OptionError(
                f"`data.evaluation`: {', '.join(map(repr, unknown))} unknown. Expected "
                f"{', '.join(known)}. A file is given with a name for its results, as in "
                "`evaluation: {mine: test.txt}`, or as `data.eval_files`."
            )
        return {name: name for name in evaluation}
    wrong = [
        f"`{name}`: {text!r} is neither one of {', '.join(known)} nor a file that exists"
        for name, text in evaluation.items()
        if text not in known and not Path(str(text)).expanduser().is_file()
    ]
    wrong += [f"`{name}` is no name of a text" for name in evaluation if not _NAME.fullmatch(name)]
    if wrong:
        raise OptionError(f"`data.evaluation`: {'; '.join(wrong)}.")
    return dict(evaluation)


def _is_name(source: str) -> bool:
    return source in (SELF, STDLIB, *CALIBRATION, *GIVEN)


def _is_known(source: object) -> bool:
    return isinstance(source, str) and (_is_name(source) or Path(source).expanduser().is_file())


def refuse_contradictions(given: set[str], mixture: Mixture | None, *, by_protocol: bool) -> None:
    """Refuse text that is given in several ways for one use, and text that is named, but not given.

    Args:
        given: Which of `train_files`, `eval_files` and `dataset` are given.
        mixture: What to calibrate on where that is not one published text, or left to the others.
        by_protocol: Whether published texts are named for the other use.
    """
    named = set(GIVEN) & mixture.shares.keys() if mixture else set()
    if missing := named - given:
        raise OptionError(
            f"`data.calibration` names {_listed(missing)}, and there is no such text. Give it, too."
        )
    if mixture and "train_files" in given - named:
        raise OptionError(
            f"`data.calibration` ({mixture}) leaves nothing to read of `data.train_files`. Leave "
            "one of them out, or give both their shares: `calibration: {self: 0.5, train_files: "
            "0.5}`."
        )
    others = given - named
    if by_protocol + ("dataset" in others) + bool(others & {"train_files", "eval_files"}) > 1:
        raise OptionError(
            "TextDataModule: give either `dataset` or `train_files`/`eval_files` or "
            "`calibration`/`evaluation`, not several of them."
        )


def _listed(names: set[str]) -> str:
    return ", ".join(f"`data.{name}`" for name in sorted(names))
