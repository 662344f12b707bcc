"""The grid of few bits: a scale for some columns of a row, and whole numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mrp_sparse.errors import FormatError, OptionError

GROUP_SIZE = 64
"""Default number of columns that share a scale."""

_SIGNIFICANT = {3: 5, 4: 5, 8: 1}
"""Significant bits of a scale, by the bits of a weight: codes up to eight have three of their own,
codes up to 127 seven, and bfloat16 holds eight."""
_WEIGHTS_AT_A_TIME = 2**22
_LOWEST, _HIGHEST = 2.0**-100, 2.0**100
"""Scales are of a size that no product of them leaves the range of bfloat16."""


@dataclass(frozen=True)
class Grid:
    """The values that weights of few bits can have: code times scale, symmetric about zero.

    Each row has a scale s > 0 for each `group_size` consecutive columns, the last of which may be
    fewer. Codes q are whole numbers with |q| ≤ 2^(bits − 1), at 8 bits |q| ≤ 127. Zero is a code,
    though none that needs storing where the places of the weights that are not zero are known:
    without it no more than 2^bits are left.
    Scales have five significant bits (1.xxxx·2ᵉ) at 3 and 4 bits and one at 8, so that q·s is exact
    in bfloat16, and a checkpoint in bfloat16 (or in float16 or float32) holds just these values.

    Attributes:
        bits: Bits of a stored code: 3, 4 or 8.
        group_size: Number of columns with one scale, ≥ 1.

    Raises:
        OptionError: `bits` or `group_size` is out of range.
    """

    bits: int
    group_size: int = GROUP_SIZE

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in _SIGNIFICANT:
            raise OptionError(f"`bits` must be 3, 4 or 8; got {self.bits!r}.")
        if (
            isinstance(self.group_size, bool)
            or not isinstance(self.group_size, int)
            or self.group_size < 1
        ):
            raise OptionError(
                f"`group_size` must be a positive number of columns, such as 64; got "
                f"{self.group_size!r}."
            )

    @property
    def largest(self) -> int:
        """The largest code: 4, 8 or 127."""
        return 127 if self.bits == 8 else 1 << (self.bits - 1)

    def groups(self, columns: int) -> int:
        """Return the number of scales of a row of `columns`."""
        return -(-columns // self.group_size)

    def grouped(self, weight: Tensor) -> Tensor:
        """Return a copy of the weight (rows, columns) as (rows, groups, group_size).

        A shorter last group is padded with zeros.
        """
        rows, columns = weight.shape
        width = self.groups(columns) * self.group_size
        padded = weight.new_zeros(rows, width)
        padded[:, :columns] = weight
        return padded.view(rows, -1, self.group_size)

    def round_scales(self, scales: Tensor) -> Tensor:
        """Return the nearest scales with few significant bits, within the allowed range."""
        mantissas, exponents = torch.frexp(scales.clamp(_LOWEST, _HIGHEST))
        steps = 1 << _SIGNIFICANT[self.bits]
        return torch.ldexp((mantissas * steps).round_().div_(steps), exponents)

    def decompose(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of a weight that lies on the grid: weight = code·scale.

        Of several possible scales the largest is taken, which makes the codes smallest. A group of
        zeros has the scale 1.

        Args:
            weight: (rows, columns), floating point.

        Returns:
            The codes, int8 (rows, columns), and the scales, float32 (rows, groups).

        Raises:
            FormatError: Some group of a row has no such scale; the message names the first.
        """
        rows, columns = weight.shape
        codes = torch.zeros(rows, columns, dtype=torch.int8, device=weight.device)
        scales = torch.ones(rows, self.groups(columns), device=weight.device)

        at_a_time = max(1, _WEIGHTS_AT_A_TIME // max(1, columns))  # bounds the float64 temporaries
        for first in range(0, rows, at_a_time):
            some = slice(first, first + at_a_time)
            multiples, factor = self._decompose(weight[some].detach(), first)
            codes[some] = multiples.flatten(1)[:, :columns].to(torch.int8)
            scales[some] = factor.float()
        return codes, scales

    def _decompose(self, weight: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the codes (rows, groups, group_size) and scales of some rows, in float64."""
        values = self.grouped(weight.double())
        peaks = values.abs().amax(2)
        scales = torch.ones_like(peaks)
        waiting = peaks != 0  # NaN waits, too, and in vain
        for peak_code in range(1, self.largest + 1):
            tried = peaks / peak_code
            possible = waiting & (self.round_scales(tried) == tried) & (tried * peak_code == peaks)
            places = possible.nonzero(as_tuple=True)
            if not len(places[0]):
                continue
            factors = tried[places]
            exact = (values[places] / factors[:, None]).frac() == 0
            fits = exact.all(1)
            solved = tuple(index[fits] for index in places)
            scales[solved] = factors[fits]
            waiting[solved] = False
        if bool(waiting.any()):
            row, group = waiting.nonzero()[0].tolist()
            start = group * self.group_size
            stop = min(start + self.group_size, weight.shape[1])
            raise FormatError(
                f"Row {first + row}, columns {start} to {stop - 1} (group {group}): no scale makes "
                f"these weights whole numbers of at most {self.largest}, as {self.bits} bits with "
                f"groups of {self.group_size} need. The weight was changed after it was put on its "
                "grid, or is on another one: give its `bits` and `group_size`."
            )
        return values / scales[:, :, None], scales
