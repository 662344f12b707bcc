"""Sparsity patterns: the number of weights to remove, and the positions that are allowed.

Selection is by rank, never by threshold, so that counts are exact; ties are broken by position, row
by row.
"""

import itertools
import math
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mrp_ground.arguments import is_number
from mrp_lightning.errors import PatternError

_EXAMPLES = '`sparsity` is a fraction such as 0.5; `pattern` is a string such as "2:4"'


class _Grouped:
    """A pattern whose weights are chosen in groups of `group` consecutive input columns."""

    group: int = 1

    def divides(self, columns: int) -> bool:
        """Return whether a number of input columns splits into whole groups."""
        return columns > 0 and columns % self.group == 0


@dataclass(frozen=True)
class Unstructured(_Grouped):
    """Unstructured sparsity: a fraction of the weights, in (0, 1), is removed anywhere."""

    sparsity: float

    def __post_init__(self) -> None:
        value = self.sparsity
        if not is_number(value) or not 0 < value < 1:
            raise PatternError(
                f"`sparsity` must be a number between 0 and 1 (both excluded), the fraction of "
                f"weights to remove; got {value!r}. {_EXAMPLES}."
            )
        object.__setattr__(self, "sparsity", float(value))

    def __str__(self) -> str:
        return f"{100 * self.sparsity:g}%"

    def budget(self, rows: int, columns: int) -> int:
        """Return the number of weights to remove from the first `columns`, rounded half up."""
        # Not `round`, which rounds halves to even. The budget never falls as columns are added, so
        # that no block of `select` gets a negative count.
        return min(math.floor(self.sparsity * rows * columns + 0.5), rows * columns)

    def select(self, scores: Tensor, start: int) -> Tensor:
        """Mark the lowest scores (rows, width) of the columns from `start` on, all rows together.

        Returns bool (rows, width), True = removed. However the columns are split into blocks, the
        blocks up to column b remove `budget(rows, b)` weights together, so that the total is exact.
        """
        rows, width = scores.shape
        count = self.budget(rows, start + width) - self.budget(rows, start)
        return lowest(scores.reshape(-1), count).view(rows, width)

    def select_in_rows(self, scores: Tensor) -> Tensor:
        """Mark the same number of lowest scores in each row. Returns bool (rows, columns)."""
        count = self.budget(1, scores.shape[1])
        # A stable sort, since `topk` does not promise an order of ties.
        ranked = scores.sort(dim=1, stable=True).indices[:, :count]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, ranked, True)

    def holds(self, pruned: Tensor) -> bool:
        """Return whether bool `pruned` (rows, columns) removes at least the fraction."""
        rows, columns = pruned.shape
        return int(pruned.sum()) >= self.budget(rows, columns)


@dataclass(frozen=True)
class SemiStructured(_Grouped):
    """N:M sparsity: `kept` of every `group` consecutive columns of a row stay, 1 ≤ kept < group."""

    kept: int
    group: int

    def __post_init__(self) -> None:
        if not 1 <= self.kept < self.group:
            raise PatternError(
                f'`pattern` "N:M" keeps N of every M consecutive weights and needs 1 ≤ N < M; got '
                f'"{self.kept}:{self.group}". For example "2:4" removes half of the weights.'
            )

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}"

    @property
    def removed(self) -> int:
        """Number of weights removed from each group."""
        return self.group - self.kept

    @property
    def sparsity(self) -> float:
        """Fraction of the weights that is removed."""
        return self.removed / self.group

    def select(self, scores: Tensor, start: int) -> Tensor:
        """Mark the lowest scores of each group in columns from `start` on: bool, True = removed.

        The width of the scores (rows, width) and `start` are multiples of the group.
        """
        del start
        members = scores.unflatten(1, (scores.shape[1] // self.group, self.group)).unbind(2)
        # rank(i) = #{j: s_j < s_i, or s_j = s_i and j < i}, counted pair by pair from rank(i) = i,
        # which is faster than sorting for short groups.
        # No rank leaves 0 … M − 1 on the way: i rises at most M − 1 − i times and falls at most i.
        dtype = torch.int8 if self.group < 128 else torch.int16
        ranks = [torch.full_like(members[0], k, dtype=dtype) for k in range(self.group)]
        for i, j in itertools.combinations(range(self.group), 2):
            inverted = (members[j] < members[i]).view(torch.int8)
            ranks[i] += inverted
            ranks[j] -= inverted
        return (torch.stack(ranks, dim=2) < self.removed).flatten(1)

    def select_in_rows(self, scores: Tensor) -> Tensor:
        """Mark the lowest scores of each group, which is part of one row: bool (rows, columns)."""
        return self.select(scores, 0)

    def holds(self, pruned: Tensor) -> bool:
        """Return whether `pruned` is in whole groups, each with enough removed weights."""
        if not self.divides(pruned.shape[1]):
            return False
        groups = (pruned.shape[1] // self.group, self.group)
        counts = pruned.unflatten(1, groups).sum(dim=2)
        return bool((counts >= self.removed).all())


@dataclass(frozen=True)
class Dense(_Grouped):
    """No weight is removed: the pattern of quantisation without pruning."""

    sparsity: ClassVar[float] = 0.0

    def __str__(self) -> str:
        return "dense"

    def select(self, scores: Tensor, start: int) -> Tensor:
        """Mark none of the scores (rows, width)."""
        del start
        return torch.zeros_like(scores, dtype=torch.bool)

    def select_in_rows(self, scores: Tensor) -> Tensor:
        """Mark none of the scores (rows, columns)."""
        return self.select(scores, 0)

    def holds(self, pruned: Tensor) -> bool:
        """Return True: nothing has to be removed."""
        del pruned
        return True


Pattern = Unstructured | SemiStructured | Dense


def make_pattern(sparsity: float | None, pattern: str | int | None) -> Pattern:
    """Return the pattern of exactly one argument; raise a PatternError if it is malformed."""
    if (sparsity is None) == (pattern is None):
        got = "neither" if sparsity is None else f"{sparsity=!r} and {pattern=!r}"
        raise PatternError(
            f"give exactly one of `sparsity` and `pattern`; got {got}. {_EXAMPLES}. Neither is "
            "needed with `bits` alone, which quantises."
        )
    if pattern is None:
        assert sparsity is not None
        return Unstructured(sparsity)
    if not isinstance(pattern, str) or pattern.strip().isdecimal():
        raise PatternError(_unquoted_message(pattern))
    # ASCII, since \d otherwise accepts the digits of all scripts.
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", pattern, flags=re.ASCII)
    if match is None:
        raise PatternError(
            f'`pattern` must be "N:M", N weights kept of every M, such as "2:4"; got {pattern!r}. '
            "For unstructured sparsity give `sparsity`, a fraction such as 0.5, instead."
        )
    return SemiStructured(int(match[1]), int(match[2]))


def lowest(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` lowest scores (n,), ties by position: bool (n,)."""
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if scores.device.type != "cpu":
        ranked = scores.sort(stable=True).indices[:count]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, ranked, True)
    # The same selection by a partition, which NumPy does many times as fast as torch sorts. Of the
    # scores that tie with the last selected one, the later ones may be surplus.
    last = float(np.partition(scores.numpy(), count - 1)[count - 1])
    # At least `count` scores are ≤ last and fewer than `count` are below it, so that the surplus
    # lies among the ties alone.
    selected = scores <= last
    surplus = int(selected.count_nonzero()) - count
    if surplus > 0:
        selected[(scores == last).nonzero()[-surplus:]] = False
    return selected


def _unquoted_message(value: object) -> str:
    """Return the message for a number: YAML 1.1 reads an unquoted 2:4 in base 60, as 124."""
    suggestion = "2:4"
    if str(value).strip().isdecimal():
        kept, group = divmod(int(str(value)), 60)
        if 1 <= kept < group:
            suggestion = f"{kept}:{group}"
    return (
        f'`pattern` must be a string such as "2:4"; got {value!r}. YAML reads an unquoted '
        f'{suggestion} as a number: write `pattern: "{suggestion}"`.'
    )
