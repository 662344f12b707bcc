"""Grids of few bits: a codebook, and a scale for some columns of a row.

A weight on a grid is code times scale, with the code from a codebook and one scale for each
`group_size` consecutive columns of a row; some grids also subtract a minimum, one for each such
group. `grid_of_bits` gives the grids of this project's packed formats, `GRIDS` those of the types
that engines read: the solver is the same for all of them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from numbers import Integral

import torch
from torch import Tensor

from mrp_ground.errors import FormatError, OptionError
from mrp_lightning.solver.arguments import GROUP_SIZE

_SIGNIFICANT = {3: 5, 4: 5, 8: 1}
"""Significant bits of a scale, by the bits of a weight: codes up to eight have three of their own,
codes up to 127 seven, and bfloat16 holds eight."""
_WEIGHTS_AT_A_TIME = 2**22
_NUMBERS = 2**18
"""The most weights, each counted once for a candidate, that are compared together."""


@dataclass(frozen=True)
class ScaleType:
    """The floating-point numbers that the scales of a grid can be.

    Attributes:
        significant: Significant bits, the leading one included.
        smallest: The smallest positive scale, a power of two; below smallest·2^significant scales
            are its multiples, as the subnormal numbers of float16 are.
        largest: The largest scale.
    """

    significant: int
    smallest: float = 2.0**-100
    largest: float = 2.0**100

    def round(self, scales: Tensor) -> Tensor:
        """Return the nearest scales of this type to numbers ≥ 0; outside its range, its ends."""
        clamped = scales.clamp(self.smallest, self.largest)
        # 1. Mantissas of `frexp` are in [½, 1): the quantum is 2^(exponent − significant).
        # 2. A mantissa that is rounded up to 1 gives the next power of two, which the type has.
        # 3. Below smallest·2^significant the quantum stays the smallest scale, as for subnormals.
        exponents = torch.frexp(clamped).exponent - self.significant
        quanta = torch.ldexp(torch.ones_like(clamped), exponents).clamp_(min=self.smallest)
        return (clamped / quanta).round_().mul_(quanta)

    def shift(self, scales: Tensor, steps: int | Tensor) -> Tensor:
        """Return the scales `steps` numbers above positive ones, as if all were normal numbers."""
        half = 1 << (self.significant - 1)
        mantissas, exponents = torch.frexp(scales)
        # Normal numbers are numbered one after the other, `half` of them for each exponent, so that
        # a step across a power of two is a step like all others.
        position = exponents.long() * half + (mantissas * (2 * half)).long() - half + steps
        exponents = position.div(half, rounding_mode="floor")
        mantissas = (position - exponents * half + half).to(scales.dtype)
        return self.round(torch.ldexp(mantissas, exponents - self.significant))


_FLOAT16 = ScaleType(11, 2.0**-24, 65504.0)
_BFLOAT16 = ScaleType(8)
_POWER_OF_TWO = ScaleType(1, 2.0**-126, 2.0**126)


@dataclass(frozen=True, eq=False)
class GridParameters:
    """The numbers beside the codes of a weight on a grid.

    Attributes:
        scales: (rows, groups), floating point.
        minima: Likewise; None for grids without minima.
    """

    scales: Tensor
    minima: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The scales, and the minima if there are any."""
        return [self.scales] if self.minima is None else [self.scales, self.minima]

    def map(self, function: Callable[[Tensor], Tensor]) -> "GridParameters":
        """Return the parameters with a function applied to each tensor."""
        return GridParameters(*map(function, self.tensors))

    def split(self, sizes: list[int]) -> list["GridParameters"]:
        """Split the parameters into those of consecutive ranges of rows, of these sizes."""
        shares = zip(*(tensor.split(sizes) for tensor in self.tensors), strict=True)
        return [GridParameters(*share) for share in shares]

    @staticmethod
    def concatenated(parts: Sequence["GridParameters"]) -> "GridParameters":
        """Return the parameters of consecutive rows as those of one weight."""
        tensors = zip(*(part.tensors for part in parts), strict=True)
        return GridParameters(*map(torch.cat, tensors))


@dataclass(frozen=True)
class Grid:
    """The values that weights of few bits can have: code·scale, or code·scale − minimum.

    Attributes:
        bits: Bits of a stored code.
        group_size: Number of consecutive columns of a row that share a scale, ≥ 1; the last group
            of a row may be shorter.
        codebook: The codes, whole numbers in ascending order. If it is not symmetric about zero,
            scales have a sign, which decides the end of the codebook that a group reaches.
        scales: The numbers that scales and minima can be; with `steps`, those that units can be.
        name: The name of an engine's type, such as those in `GRIDS`; None for `grid_of_bits`.
        steps: The lowest and the highest of the whole numbers that scales are, times a unit; None
            for scales that are stored as they are. Minima are such numbers times another unit.
        together: The number of consecutive groups of a row that share a unit.
        minimum: Whether a weight is code·scale − minimum, with a minimum for each group. Codes are
            0 and more then, and scales positive.
    """

    bits: int
    group_size: int
    codebook: tuple[int, ...]
    scales: ScaleType
    name: str | None = None
    steps: tuple[int, int] | None = None
    together: int = 1
    minimum: bool = False

    def __str__(self) -> str:
        return self.name or f"{self.bits}bit"

    @cached_property
    def signed(self) -> bool:
        """Whether scales have a sign."""
        is_symmetric = self.codebook == tuple(-code for code in reversed(self.codebook))
        return not is_symmetric and not self.minimum

    @property
    def largest(self) -> int:
        """The largest absolute value of a code."""
        return max(map(abs, self.codebook))

    @property
    def engine(self) -> str | None:
        """The engine whose type this is: "vLLM" for integers, "llama.cpp", or none."""
        if self.name is None:
            return None
        return "vLLM" if self.name.startswith("int") else "llama.cpp"

    @property
    def columns_together(self) -> int:
        """The number of columns that are stored together: those of the groups with one unit."""
        return self.group_size * self.together

    def divides(self, columns: int) -> bool:
        """Return whether rows of so many columns can be stored."""
        # Those of engines' types are stored in whole groups.
        return self.name is None or columns % self.columns_together == 0

    @property
    def needs_parameters(self) -> bool:
        """Whether codes follow from the values of a weight only with its known parameters."""
        return self.minimum or self.steps is not None

    @property
    def holds_zero(self) -> bool:
        """Whether zero is a code in each group; False with minima, where its code may differ."""
        return 0 in self.codebook and not self.minimum

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

    def spread(self, scales: Tensor, columns: int) -> Tensor:
        """Repeat the scales (rows, groups) for each weight of their groups: (rows, columns)."""
        return scales.repeat_interleave(self.group_size, 1)[:, :columns]

    def round_scales(self, scales: Tensor, units: Tensor | None = None) -> Tensor:
        """Return the nearest scales that the grid can have, never zero; without units, signs stay.

        For a grid with `steps`, scales are whole multiples of `units`, if these are given.
        """
        if units is None or self.steps is None:
            return self.scales.round(scales.abs()).copysign(scales)
        steps = (scales / units).round_().clamp_(*self.steps)
        # Weights are divided by their scales, so that zero is no scale.
        return torch.where(steps == 0, 1, steps) * units

    def round_minima(self, minima: Tensor, units: Tensor | None = None) -> Tensor:
        """Return the nearest minima that the grid can have; with `units`, their multiples ≥ 0."""
        if units is None or self.steps is None:
            rounded = self.scales.round(minima.abs()).copysign(minima)
            # `ScaleType.round` clamps to the smallest scale, but a minimum may be zero.
            return torch.where(minima.abs() < self.scales.smallest / 2, 0, rounded)
        return (minima / units).round_().clamp_(0, self.steps[1]) * units

    def choose_units(self, scales: Tensor) -> Tensor:
        """Return the unit that scales (groups, ...) share: (...).

        With this unit, the largest scale is, up to rounding, the step farthest from zero.
        """
        assert self.steps is not None
        largest = scales.gather(0, scales.abs().argmax(0, keepdim=True))[0]
        units = largest / max(self.steps, key=abs)
        return self.scales.round(units.abs()).copysign(units)

    def units(self, scales: Tensor) -> Tensor | None:
        """Return the units of scales or minima (rows, groups) of the grid, of the same shape.

        None for a grid without `steps`. The unit is 0 for groups that share none, 1 if all are 0.
        """
        if self.steps is None:
            return None
        exact = scales.double().unflatten(1, (-1, self.together))
        largest = exact.gather(2, exact.abs().argmax(2, keepdim=True))
        units = torch.zeros_like(largest)
        # 1. A unit is the quotient of the largest number by its step, exact in float64: a step has
        #    few bits, and a unit at most eleven.
        # 2. `choose_units` gives the largest number the farthest step, so that this is tried first.
        # 3. Several units may fit; all of them give the same numbers, and the first is kept.
        for step in sorted(range(self.steps[0], self.steps[1] + 1), key=abs, reverse=True):
            if step == 0:
                continue
            tried = largest / step
            steps = exact / tried
            fitting = self.scales.round(tried.abs()) == tried.abs()
            fitting &= (steps == steps.round().clamp(*self.steps)).all(2, keepdim=True)
            units = torch.where((units == 0) & fitting, tried, units)
        units = torch.where(largest == 0, 1, units)
        return units.expand_as(exact).flatten(1).to(scales.dtype)

    def nearest_(self, ratios: Tensor) -> Tensor:
        """Replace weights divided by their scales by the nearest codes, and return them."""
        lowest, highest = self.codebook[0], self.codebook[-1]
        if len(self.codebook) == highest - lowest + 1:  # all whole numbers between the ends
            return ratios.round_().clamp_(lowest, highest)
        # Codes are whole numbers, so that midpoints between them are multiples of ½.
        halves = ratios.mul_(2).floor_().clamp_(2 * lowest, 2 * highest).sub_(2 * lowest)
        codes = _nearest_codes(self.codebook, ratios.dtype, ratios.device)
        return ratios.copy_(codes[halves.long()])

    def codes_of(self, weight: Tensor, parameters: GridParameters) -> Tensor | None:
        """Return the codes of a weight for parameters, which may be those of another one or grid.

        The result is int8 (rows, columns), whose `values` in the weight's dtype equal the weight
        (rows, columns), with −0.0 equal to 0; None if there are no such codes.
        """
        rows, columns = weight.shape
        parameters = parameters.map(lambda tensor: tensor.to(weight.device, torch.float32))
        if not self._can_store(parameters, (rows, self.groups(columns))):
            return None
        codes = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
        for some in row_ranges(rows, columns):
            share = parameters.map(lambda tensor, some=some: tensor[some])  # type: ignore[misc]
            exact = weight[some].detach()
            wanted = exact.to(torch.float32, copy=True)
            if share.minima is not None:
                wanted += self.spread(share.minima, columns)
            chosen = self.nearest_(wanted.div_(self.spread(share.scales, columns)))
            # The nearest codes prove nothing: the parameters may be those of another weight.
            if not torch.equal(self.values(chosen, share).to(weight.dtype), exact):
                return None
            codes[some] = chosen.to(torch.int8)
        return codes

    def values(self, codes: Tensor, parameters: GridParameters) -> Tensor:
        """Return the weight of codes (rows, columns), float32, as engines compute it."""
        # The product is rounded before the minimum is subtracted: a fused step would differ in the
        # last bit.
        weight = codes.float() * self.spread(parameters.scales.float(), codes.shape[1])
        if parameters.minima is None:
            return weight
        return weight.sub_(self.spread(parameters.minima.float(), codes.shape[1]))

    def _can_store(self, parameters: GridParameters, shape: tuple[int, int]) -> bool:
        """Return whether the grid can have these parameters, float32, of that shape."""
        scales, minima, stored = parameters.scales, parameters.minima, parameters.tensors
        if (minima is not None) != self.minimum or any(x.shape != shape for x in stored):
            return False
        if not all(bool(x.isfinite().all()) for x in stored) or not bool((scales != 0).all()):
            return False
        if self.steps is not None:
            units = [self.units(x) for x in stored]
            return all(x is not None and bool((x != 0).all()) for x in units)
        if minima is not None and not torch.equal(self.round_minima(minima), minima):
            return False
        return torch.equal(self.round_scales(scales), scales)


def row_ranges(rows: int, columns: int) -> Iterator[slice]:
    """Yield ranges of rows with few enough weights to bound the float64 temporaries."""
    at_a_time = max(1, _WEIGHTS_AT_A_TIME // max(1, columns))
    for first in range(0, rows, at_a_time):
        yield slice(first, first + at_a_time)


@lru_cache
def _nearest_codes(codebook: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the codes nearest to the ranges [i/2, (i + 1)/2) from the lowest code on."""
    codes = torch.tensor(codebook, dtype=dtype, device=device)
    middles = torch.arange(2 * codebook[0], 2 * codebook[-1] + 1, dtype=dtype, device=device) / 2
    # The addition of ¼ moves to the middle of each range, away from midpoints between codes, which
    # are its ends.
    return codes[torch.bucketize(middles + 0.25, (codes[1:] + codes[:-1]) / 2)]


def grid_of_bits(bits: int, group_size: int = GROUP_SIZE, *, zero_has_a_code: bool = False) -> Grid:
    """Return the grid of this project's packed formats for a number of bits.

    Codes q are integers with |q| ≤ 2^(bits − 1), at 8 bits |q| ≤ 127. Scales s have five
    significant bits (1.xxxx·2ᵉ) at 3 and 4 bits, and one at 8, so that q·s is exact in bfloat16,
    and a checkpoint in bfloat16, float16 or float32 holds exactly these values.

    Args:
        bits: Bits of a stored code: 3, 4 or 8.
        group_size: Number of columns with one scale, ≥ 1.
        zero_has_a_code: Whether zero is one of the 2^bits codes −2^(bits − 1) to 2^(bits − 1) − 1,
            whose longer end the sign of the scale chooses. Otherwise 2^(bits − 1) is a code, too,
            as in formats that store the positions of non-zero weights, and no code of zero. Zero
            is in the codebook in both cases; 8 bits have one codebook.

    Raises:
        OptionError: `bits` or `group_size` is out of range.
    """
    # Bools are whole numbers to Python, and 4.0 equals 4, but neither is meant.
    if isinstance(bits, bool) or not isinstance(bits, Integral) or bits not in _SIGNIFICANT:
        raise OptionError(f"`bits` must be 3, 4 or 8; got {bits!r}.")
    if isinstance(group_size, bool) or not isinstance(group_size, Integral) or group_size < 1:
        raise OptionError(
            f"`group_size` must be a positive number of columns, such as 64; got {group_size!r}."
        )
    bits, group_size = int(bits), int(group_size)  # of NumPy's integers
    largest = 127 if bits == 8 else 1 << (bits - 1)
    # At 8 bits there are 255 codes, not 256: zero has one in any case.
    highest = largest - (zero_has_a_code and bits < 8)
    codebook = tuple(range(-largest, highest + 1))
    return Grid(bits, group_size, codebook, ScaleType(_SIGNIFICANT[bits]))


_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the numbers of E2M1."""

_INT4, _INT8 = tuple(range(-8, 8)), tuple(range(-127, 128))

GRIDS = {
    str(grid): grid
    for grid in (
        Grid(3, 16, tuple(range(-4, 4)), _FLOAT16, "q3_k", steps=(-32, 31), together=16),
        Grid(4, 32, _INT4, _FLOAT16, "q4_0"),
        Grid(5, 32, tuple(range(-16, 16)), _FLOAT16, "q5_0"),
        Grid(8, 32, _INT8, _FLOAT16, "q8_0"),
        Grid(4, 32, tuple(range(16)), _FLOAT16, "q4_1", minimum=True),
        Grid(5, 32, tuple(range(32)), _FLOAT16, "q5_1", minimum=True),
        Grid(4, 32, tuple(range(16)), _FLOAT16, "q4_k", (0, 63), together=8, minimum=True),
        Grid(5, 32, tuple(range(32)), _FLOAT16, "q5_k", (0, 63), together=8, minimum=True),
        Grid(4, 32, _IQ4_NL, _FLOAT16, "iq4_nl"),
        Grid(4, 32, _FP4, _POWER_OF_TWO, "mxfp4"),
        *(Grid(4, size, _INT4, _BFLOAT16, f"int4-g{size}") for size in (32, 64, 128)),
        *(Grid(8, size, _INT8, _BFLOAT16, f"int8-g{size}") for size in (32, 64, 128)),
    )
}
"""The grids of engines by name: llama.cpp's types, and the integers of compressed-tensors, whose
scales are bfloat16."""


def grid_named(name: str, argument: str = "grid") -> Grid:
    """Return the grid of an engine, or raise an OptionError for an `argument` that names none."""
    if name not in GRIDS:
        raise OptionError(f"`{argument}` must be one of {', '.join(GRIDS)}; got {name!r}.")
    return GRIDS[name]


def decompose(
    grid: Grid, weight: Tensor, known: GridParameters | None = None
) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a weight that lies on a grid.

    Each weight is code·scale, rounded to the weight's dtype. Of several possible scales that of the
    smallest codes is taken, for grids with a name that of the largest. A group of zeros has the
    scale 1, or 0 if no code is zero.

    Args:
        grid: The grid.
        weight: (rows, columns), floating point; with `steps`, in whole units (see `Grid.divides`).
        known: The parameters with which the weight was made, if they are known. They are used if
            they give its values; see `Grid.codes_of`.

    Returns:
        The codes, int8 (rows, columns), and the scales, float32 (rows, groups).

    Raises:
        FormatError: Some group of a row has no such scale, or the grid has minima or units and they
            are not `known`; the message names the first group.
    """
    codes, scales, fits = fit_groups(grid, weight, known)
    if not bool(fits.all()):
        row, group = (~fits).nonzero()[0].tolist()
        start = group * grid.group_size
        stop = min(start + grid.group_size, weight.shape[1])
        of_type = "" if grid.name is None else f" of the type {grid.name}"
        raise FormatError(
            f"Row {row}, columns {start} to {stop - 1} (group {group}): no scale makes these "
            f"weights codes{of_type} from {grid.codebook[0]} to {grid.codebook[-1]}, as "
            f"{grid.bits} bits with groups of {grid.group_size} need. The weight was changed after "
            "it was put on its grid, or is on another one: give its `bits` and `group_size`, or "
            "its `grid`."
        )
    return codes, scales


def fit_groups(
    grid: Grid, weight: Tensor, known: GridParameters | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes and scales as `decompose` does, and the groups that lie on the grid.

    The third result is bool (rows, groups), True for the groups whose codes and scales give the
    weight exactly; codes and scales of the others mean nothing. Values alone do not determine
    minima and units, so that no group of a grid with these fits without `known` parameters.
    """
    rows, columns = weight.shape
    scales = torch.ones(rows, grid.groups(columns), device=weight.device)
    fits = torch.ones(scales.shape, dtype=torch.bool, device=weight.device)
    if known is not None and (known_codes := grid.codes_of(weight, known)) is not None:
        return known_codes, known.scales.to(scales), fits
    codes = torch.zeros(rows, columns, dtype=torch.int8, device=weight.device)
    if grid.needs_parameters:
        return codes, scales, ~fits
    for some in row_ranges(rows, columns):
        share = weight[some].detach()
        values = grid.grouped(share.to(torch.promote_types(weight.dtype, torch.float32)))
        peaks = values.gather(2, values.abs().argmax(2, keepdim=True))[..., 0]
        chosen, factors, fits[some] = _fit_scales(grid, values, peaks, weight.dtype)
        codes[some] = chosen.flatten(1)[:, :columns].to(torch.int8)
        scales[some] = factors.float()
    return codes, scales, fits


def _fit_scales(
    grid: Grid, values: Tensor, peaks: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes and scales of groups, and whether these fit, for a grid without `steps`.

    `values` (rows, groups, group_size) are in at least float32, `peaks` (rows, groups) are the
    largest of each group with their signs, and code·scale is rounded to `dtype`.
    """
    if not grid.signed:
        peaks = peaks.abs()
    zero = peaks == 0
    codes, waiting = torch.zeros_like(values), ~zero  # NaN waits, too, and never fits
    # Without a code for zero, a group of zeros has the scale zero.
    scales = torch.ones_like(peaks) if grid.holds_zero else (~zero).to(peaks.dtype)
    # 1. The largest weight gives the candidates: each code leaves few scales for it.
    # 2. Whether a candidate gives the largest weight is a test of one number per group; only the
    #    groups that pass are rounded in full.
    # 3. Solved groups take no other candidate: the order of these decides between several.
    # 4. Of few weights many candidates are tried together, since most matrices that are on no grid
    #    are refused by their first rows. Of many weights mostly the first candidate fits.
    together = max(1, _NUMBERS // max(1, values.numel()))
    for code, scale in _candidates(grid, peaks, dtype, together):
        possible = waiting & ((code * scale).to(dtype) == peaks)
        _, row, group = possible.nonzero(as_tuple=True)
        if not len(row):
            continue
        targets, factors = values[row, group], scale[possible][:, None]
        chosen = grid.nearest_(targets / factors)
        fits = ((chosen * factors).to(dtype) == targets).all(1)
        fitting = possible.masked_scatter(possible, fits)
        first = (fitting & (fitting.cumsum(0) == 1))[possible]
        row, group = row[first], group[first]
        codes[row, group], scales[row, group] = chosen[first], factors[first, 0]
        waiting[row, group] = False
        if not bool(waiting.any()):
            break
    return codes, scales, ~waiting


def _candidates(
    grid: Grid, peaks: Tensor, dtype: torch.dtype, together: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield candidates for the largest weights of groups: first one, then so many together.

    Yields:
        Codes of the largest weights, (candidates, 1, 1), and scales that may give these weights,
        (candidates, rows, groups).
    """
    # A weight in `dtype` bounds its scale to within half a unit in the last place. That is one
    # scale if products are exact, and else some neighbours.
    odd_parts = [code // (code & -code) for code in grid.codebook if code]
    products = grid.scales.significant + max(map(abs, odd_parts)).bit_length()
    missing = grid.scales.significant - _significant_bits(dtype)
    span = 0 if products <= _significant_bits(dtype) else 1 + (1 << max(0, missing))
    # Packed formats store the smallest codes; solvers choose scales that reach the largest.
    codes = sorted(grid.codebook, key=abs, reverse=grid.name is not None)
    pairs = [
        (code, steps)
        for code in codes
        if code > 0 or (code < 0 and grid.signed)
        for steps in sorted(range(-span, span + 1), key=abs)
    ]
    for start, stop in pairwise([0, *range(1, len(pairs), together), len(pairs)]):
        some = torch.tensor(pairs[start:stop], device=peaks.device)[:, :, None, None]
        code, steps = some[:, 0].to(peaks.dtype), some[:, 1]
        centre = grid.round_scales(peaks / code)
        yield code, grid.scales.shift(centre.abs(), steps).copysign(centre)


def _significant_bits(dtype: torch.dtype) -> int:
    return 1 - int(math.log2(torch.finfo(dtype).eps))
