"""The names by which a user chooses texts, and mixtures of them."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.text.sources import (
    CALIBRATION,
    EVALUATION,
    PUBLISHED,
    StandardLibrary,
    TextFiles,
    TextSource,
)
from mrp_lightning.text.windows import Cutter

SELF = "self"
"""The name of the text that the model writes itself."""
_STDLIB = "stdlib"
"""The name of the source code of Python's standard library."""
_ARGUMENTS = ("train_files", "dataset")
"""Arguments whose text a mixture can name."""

_TOLERANCE = 1e-6  # of the sum of all shares: three times 0.333333 is accepted
_NAME = re.compile(r"[\w.+-]+")


def shares_of(calibration: str | Mapping[str, float]) -> dict[str, float]:
    """Return the share of each source of calibration text: positive fractions with the sum 1.

    A source is `self`, `stdlib`, a published text, the name of an argument (`train_files`,
    `dataset`), or the path of a file. A single source has the share 1; sources with the share 0 are
    left out. An OptionError lists all mistakes.
    """
    if not isinstance(calibration, str | Mapping):
        raise OptionError(
            "expected one source, or a share of each, as in {self: 0.5, c4: 0.5}. Got "
            f"{calibration!r}.",
            "calibration",
        )
    shares: Mapping[str, Any] = {calibration: 1.0} if isinstance(calibration, str) else calibration
    mistakes = [
        f"the share of {name} must be a number from 0 to 1; got {share!r}"
        for name, share in shares.items()
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1
    ]
    if not mistakes and abs((total := math.fsum(shares.values())) - 1) > _TOLERANCE:
        mistakes = [f"expected shares of 1 in all, as in {{self: 0.5, c4: 0.5}}; got {total:g}"]
    names = (SELF, _STDLIB, *CALIBRATION, *_ARGUMENTS)
    unknown = [n for n in shares if n not in names and not Path(n).expanduser().is_file()]
    if unknown:
        mistakes += [
            f"{', '.join(map(repr, unknown))} unknown. Expected {SELF} (the model writes its "
            f"own text), {_STDLIB} (Python's standard library), {', '.join(CALIBRATION)} "
            f"(published texts), {' or '.join(_ARGUMENTS)} (what `train_files` or "
            "`dataset` gives), or a file that exists"
        ]
    if mistakes:
        raise OptionError(f"{'; '.join(mistakes)}.", "calibration")
    return {name: float(share) for name, share in shares.items() if share}


def texts_by_name(evaluation: Mapping[str, str] | Sequence[str] | str | None) -> dict[str, str]:
    """Return the texts to evaluate on, by the names under which results report them.

    Each name becomes a part of the name of a metric, such as `perplexity/code`.
    """
    known_texts, is_named = (_STDLIB, *EVALUATION), isinstance(evaluation, Mapping)
    texts = [evaluation] if isinstance(evaluation, str) else evaluation or []
    by_name = dict(evaluation) if isinstance(evaluation, Mapping) else {t: t for t in texts}
    mistakes = [
        f"{text!r} unknown"
        for text in by_name.values()
        if text not in known_texts and not (is_named and Path(str(text)).expanduser().is_file())
    ]
    mistakes += [
        f"`{n}` is no name of a text" for n in by_name if is_named and not _NAME.fullmatch(n)
    ]
    if mistakes:
        raise OptionError(
            f"{', '.join(mistakes)}. Expected {', '.join(known_texts)} or, with a name for its "
            "results, a file that exists, as in `evaluation: {mine: test.txt}`.",
            "evaluation",
        )
    return by_name


Keys = tuple[str, ...]
ONE_TEXT = (
    "`data` takes either `dataset` or `train_files`/`eval_files` or `calibration`/`evaluation`, "
    "not several of them; shares of several texts are given as in "
    "`calibration: {self: 0.5, train_files: 0.5}`"
)


def exclusive_keys(calibration: object) -> list[list[Keys]]:
    """Return lists of groups of keys of `data`; at most one group of each list may be given."""
    files: Keys = ("train_files", "eval_files")
    if calibration is None or calibration in CALIBRATION:
        return [[files, ("dataset",), ("calibration", "evaluation", "corpora_dir")]]
    # A mixture concerns calibration alone: the text to evaluate on may come from any argument.
    named = _named_keys(calibration)
    # 1. Text to evaluate on has one origin.
    # 2. So has text to calibrate on. A key that the mixture itself names is a part of it, not a
    #    rival, and is left out of both rules.
    rules = [[files, ("dataset",), ("evaluation",)], [files[:1], ("calibration",)]]
    return [[tuple(key for key in keys if key not in named) for keys in rule] for rule in rules]


def _named_keys(calibration: object) -> list[str]:
    sources = calibration if isinstance(calibration, Mapping) else [calibration]
    return [key for key in _ARGUMENTS if key in sources]


def check_keys(calibration: object, present: Collection[str]) -> None:
    """Raise an OptionError if several arguments give the text of one use, or `calibration` none.

    `present` are the keys of `data` that have a value.
    """
    if missing := [f"`{key}`" for key in _named_keys(calibration) if key not in present]:
        raise OptionError(
            f"it names {', '.join(missing)}, and there is no such text. Give it.", "calibration"
        )
    for rule in exclusive_keys(calibration):
        if sum(any(key in present for key in keys) for keys in rule) > 1:
            raise OptionError(f"{ONE_TEXT}.")


def source_named(name: str, files: TextFiles, directory: Path | None) -> TextSource:
    """Return the text source of a name in `data`: the standard library, a published text or a file.

    A file is read by the `column` and `conversation` of `files`. The `directory` has local copies
    of published texts; `None` means the hub.
    """
    if name == _STDLIB:
        return StandardLibrary(_STDLIB)
    if name in PUBLISHED:
        return replace(PUBLISHED[name], directory=directory)
    path = Path(name).expanduser()
    return replace(files, train=[path], evaluation=[path], hold_out=False)


class WindowSource(Protocol):
    """A source of windows to calibrate on: a `TextSource`, a `Mixture`, or the model itself."""

    @property
    def name(self) -> str:
        """The name of the source in reports."""

    def draw(self, cutter: Cutter, count: int, seed: int) -> Tensor:
        """Draw at most `count` windows (windows, length), int64; shorter ones of a short text."""


def beside_files(own: float) -> dict[str, float]:
    """Return the shares of own text and of `train_files`, for `calibration`; none is 0."""
    shares = {SELF: own, "train_files": 1 - own}
    return {name: share for name, share in shares.items() if share}


@dataclass(frozen=True)
class Mixture:
    """Calibration windows from several sources in fixed proportions.

    Attributes:
        shares: The share of each source, in (0, 1] with the sum 1, by its name in `data`.
        sources: The sources, by the same names.
    """

    shares: Mapping[str, float]
    sources: Mapping[str, WindowSource]

    @property
    def name(self) -> str:
        """The names of the sources, each with its share where there are several."""
        names = {key: key if key in _ARGUMENTS else self.sources[key].name for key in self.shares}
        if len(names) == 1:
            return "".join(names.values())
        return " + ".join(f"{share:.3g} {names[key]}" for key, share in self.shares.items())

    def counts(self, windows: int) -> dict[str, int]:
        """Apportion windows to sources by largest remainders; a `DataError` if one gets none."""
        # n_i = ⌊s_i·n⌋, and the n − Σ n_i windows that remain go to the largest s_i·n − n_i. The
        # tolerance keeps a product such as 0.29·100 = 28.999… from losing a window by rounding.
        exact = {name: share * windows for name, share in self.shares.items()}
        counts = {name: math.floor(part + _TOLERANCE) for name, part in exact.items()}
        by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
        for name in by_remainder[: windows - sum(counts.values())]:
            counts[name] += 1
        if none := [name for name, count in counts.items() if not count]:
            raise DataError(
                f"of {windows} windows, the share of {', '.join(none)} is less than one. Give "
                "more, or leave the source out.",
                "num_samples",
            )
        return counts

    def draw(self, cutter: Cutter, count: int, seed: int) -> Tensor:
        """Draw at most `count` windows (windows, length), int64, of all sources, interleaved."""
        counts = self.counts(count)
        parts = {name: self.sources[name].draw(cutter, n, seed) for name, n in counts.items()}
        # A text shorter than a window gives shorter windows, which cannot be joined with others.
        short = [name for name, part in parts.items() if part.shape[1] != cutter.length]
        if short and len(parts) > 1:
            raise DataError(
                f"{', '.join(short)} has less text than one window of {cutter.length} tokens, and "
                "windows of several texts are of one length. Give shorter windows.",
                "sequence_length",
            )
        return interleaved([*parts.values()])


def interleaved(parts: list[Tensor]) -> Tensor:
    """Interleave the windows (count, length) of several sources in their proportions.

    Every contiguous slice has about these proportions, so that a limit on the number of batches, or
    the windows that tuning holds out, takes its share of each source.
    """
    # Window i of n stands at (i + ½)/n of [0, 1]; every source is spread evenly over the whole. The
    # stable sort settles ties by the order of the sources.
    positions = [(torch.arange(len(part)) + 0.5) / len(part) for part in parts]
    order = torch.cat(positions).argsort(stable=True)
    return torch.cat(parts)[order]
