"""The texts that a user names, each with its share of the windows."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.text.published import CALIBRATION, EVALUATION, PublishedTexts
from mrp_lightning.text.sources import GivenText, Split
from mrp_lightning.text.windows import SEPARATOR, Cutter

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


_NAME = re.compile(r"[\w.+-]+")


class NamedTexts:
    """What `data.calibration` and `data.evaluation` name.

    Args:
        calibration: What to calibrate on, as `Mixture.of` takes it; `None` for what is given.
        evaluation: The texts to evaluate on, as a list or by name; none for what is given.
        directory: That of copies of published texts; `None` for the hub and its cache.
        column: Key of the text in .jsonl files.

    Attributes:
        mixture: What to calibrate on, `None` for what is given.
        evaluation: The texts to evaluate on, by the names that results give them.
        by_protocol: Whether what is given has no split to train or to evaluate on.
        bos: Where BOS stands in what is calibrated on, if nobody says it: before the `text`, as the
            protocol of the paper has it, where that is followed; or before each `window`.

    Raises:
        OptionError: A text is unknown, shares are wrong, or the directory is of no use.
    """

    def __init__(
        self,
        calibration: Mapping[str, float] | str | None,
        evaluation: Mapping[str, str] | Sequence[str] | str | None,
        directory: Path | None,
        column: str,
    ) -> None:
        evaluation = [evaluation] if isinstance(evaluation, str) else evaluation or []
        self.evaluation = _by_name(evaluation)
        self.mixture = None if calibration is None else Mixture.of(calibration)
        self.published = PublishedTexts(directory)
        self._column = column
        # One published text alone is the paper's protocol, which says all of both uses.
        self._is_alone = calibration in CALIBRATION
        self.by_protocol = self._is_alone or bool(self.evaluation)
        self._published = {
            "calibration": self.mixture.published if self.mixture else [],
            "evaluation": [text for text in self.evaluation.values() if text in EVALUATION],
        }
        of_paper = self._is_alone or (self.mixture is None and self._published["evaluation"])
        self.bos = "text" if of_paper else "window"
        if directory is not None and not any(self._published.values()):
            raise OptionError("`data.corpora_dir` needs `data.calibration` or `data.evaluation`.")

    def refuse_contradictions(self, given: set[str]) -> None:
        """Refuse text that is given in several ways for one use, or is named, but not given.

        Args:
            given: Which of `train_files`, `eval_files` and `dataset` are given.

        Raises:
            OptionError: There is such text.
        """
        mixture = None if self._is_alone else self.mixture
        named = set(GIVEN) & mixture.shares.keys() if mixture else set()
        if missing := named - given:
            listed = ", ".join(f"`data.{name}`" for name in sorted(missing))
            raise OptionError(
                f"`data.calibration` names {listed}, and there is no such text. Give it, too."
            )
        if mixture and "train_files" in given - named:
            raise OptionError(
                f"`data.calibration` ({mixture}) leaves nothing to read of `data.train_files`. "
                "Leave one of them out, or give both their shares: `calibration: {self: 0.5, "
                "train_files: 0.5}`."
            )
        others = given - named
        of_files = bool(others & {"train_files", "eval_files"})
        if self.by_protocol + ("dataset" in others) + of_files > 1:
            raise OptionError(
                "TextDataModule: give either `dataset` or `train_files`/`eval_files` or "
                "`calibration`/`evaluation`, not several of them."
            )

    def are_read(self, stage: str) -> bool:
        """Whether a stage of the trainer reads what is named, and not what is given."""
        return self.by_protocol or (stage == "predict" and self.mixture is not None)

    def locate(self, stage: str) -> None:
        """Find, or fetch, the published texts that a stage reads.

        Raises:
            DataError: The stage has no text.
            FileNotFoundError: Files are missing; it gives the commands that download them.
        """
        if stage == "fit":
            raise DataError(
                "`fit` trains on `data.train_files`, `data.dataset` or the embedded text, not on "
                "the published texts of `data.calibration` and `data.evaluation`."
            )
        use = "calibration" if stage == "predict" else "evaluation"
        if not (self.mixture if stage == "predict" else self.evaluation):
            raise DataError(f"`data.{use}` is needed here. Name published texts.")
        self.published.locate(self._published[use], use)

    def windows(self, source: str, cutter: Cutter, count: int, seed: int) -> Tensor:
        """Random windows (count, length) of a text to calibrate on, int64.

        Raises:
            DataError: It is too short for a window, or for so many; or it is no text.
        """
        if source in CALIBRATION:
            return self.published.windows(source, cutter, count, seed)
        return cutter.random(self._documents(source, "train"), count, seed)

    def evaluation_text(self, text: str) -> tuple[str, int | None]:
        """A whole text to evaluate on, and on how many of its first windows; `None` for all."""
        if text in EVALUATION:
            return self.published.evaluation_text(text)
        return SEPARATOR.join(self._documents(text, "test")), None

    def _documents(self, source: str, split: Split) -> Sequence[str]:
        """The documents of a file, or of a split of the standard library."""
        files = () if source == STDLIB else (Path(source).expanduser(),)
        train, other = (files, ()) if split == "train" else ((), files)
        text = GivenText(train_files=train, eval_files=other, dataset=None, column=self._column)
        return text.documents(split)


def _by_name(evaluation: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Texts by the names that results give them, each fit to be part of the name of a metric."""
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
