"""The tensor types of GGUF files: exact if a type can hold a weight, else rounded.

A type with codes and scales holds a weight exactly if reading the file, and casting to the
checkpoint's dtype, returns the same bits. Codes follow from the parameters that the pruning kept;
without them, codes and scales are recovered from the weight (`fit_groups`). Quantising again would
change them, since gguf's own quantisers choose other scales.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quantize
from torch import Tensor

from mrp_lightning.errors import FormatError, OptionError, ParityError
from mrp_lightning.records.grid_file import NAME as PARAMETERS
from mrp_lightning.solver.grid import GRIDS, Grid, GridParameters, fit_groups

AUTO = "auto"
_FIRST = 4  # rows for a quick check, which most weights off the grid fail
_Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class GgufType:
    """A tensor type of GGUF files.

    Attributes:
        name: The name on the command line and, for types with codes and scales, in `GRIDS`.
        stored_as: gguf's name of the tensor type.
        file_type: gguf's name of the type of a file whose matrices have this type.
        pack: Packs codes (n, columns), scales (n, groups) and, for types with minima, these,
            likewise, into blocks (n, bytes), uint8; None for types without codes.
    """

    name: str
    stored_as: GGMLQuantizationType
    file_type: LlamaFileType
    pack: Callable[..., _Array] | None = None

    @property
    def grid(self) -> Grid | None:
        """The codes and scales of the type; None for floating-point types."""
        return None if self.pack is None else GRIDS[self.name]


@dataclass(frozen=True)
class Encoded:
    """An encoded tensor: the packed bytes, or the numbers of a floating-point type."""

    content: _Array
    kind: GgufType


def _nibbles(codes: _Array) -> _Array:
    """Return the lower four bits of codes (n, 32): code j and code j + 16 share a byte."""
    low = codes.astype(np.uint8) & 15
    return low[:, :16] | (low[:, 16:] << 4)


def _float16(scales: _Array) -> _Array:
    return scales.astype("<f2").view(np.uint8).reshape(-1, 2)


def _q4_0(codes: _Array, scales: _Array) -> _Array:
    # Codes begin at −8, and the file holds them from 0: ggml subtracts 8 as it reads.
    return np.hstack([_float16(scales), _nibbles(codes + 8)])


def _q5_0(codes: _Array, scales: _Array) -> _Array:
    fifth = np.packbits(codes + 16 >= 16, axis=1, bitorder="little")
    # `_nibbles` drops the fifth bit, which the word `fifth` holds: it is set iff code + 16 ≥ 16.
    return np.hstack([_float16(scales), fifth, _nibbles(codes + 16)])


def _q4_1(codes: _Array, scales: _Array, minima: _Array) -> _Array:
    return np.hstack([_float16(scales), _float16(-minima), _nibbles(codes)])


def _q5_1(codes: _Array, scales: _Array, minima: _Array) -> _Array:
    fifth = np.packbits(codes >= 16, axis=1, bitorder="little")
    return np.hstack([_float16(scales), _float16(-minima), fifth, _nibbles(codes)])


def _q8_0(codes: _Array, scales: _Array) -> _Array:
    return np.hstack([_float16(scales), codes.astype(np.int8).view(np.uint8)])


def _iq4_nl(codes: _Array, scales: _Array) -> _Array:
    places = np.searchsorted(GRIDS["iq4_nl"].codebook, codes)
    return np.hstack([_float16(scales), _nibbles(places)])


def _mxfp4(codes: _Array, scales: _Array) -> _Array:
    # The codes are twice the values of E2M1 (0, ½, 1, …, 6), so that they are whole numbers, and
    # the scale is half of the format's: hence 128 in the exponent, and not 127.
    sizes = np.searchsorted([0, 1, 2, 3, 4, 6, 8, 12], np.abs(codes))
    exponents = np.frexp(scales)[1] + 127  # the scale is 2^(exponent − 128)
    return np.hstack([exponents.astype(np.uint8), _nibbles(sizes + 8 * (codes < 0))])


def _steps(name: str, scales: _Array) -> tuple[_Array, _Array]:
    """Return scales or minima (n, groups) of a type as whole numbers and their units (n,)."""
    units = GRIDS[name].units(torch.from_numpy(scales))
    assert units is not None
    unit = units[:, 0].numpy()
    # The quotient is a whole number up to the rounding of the division, which `rint` removes.
    return np.rint(scales / unit[:, None]).astype(np.int64), unit


def _q3_k(codes: _Array, scales: _Array) -> _Array:
    steps, unit = _steps("q3_k", scales)
    # Scales of q3_k have a sign, and are stored with the offset 32 in six bits.
    steps += 32
    # Code + 4 has three bits: two in `low`, four codes to a byte, and one in `high`, eight to a
    # byte. The fields of a byte do not overlap, so that their sum is a bitwise or.
    parts = (codes + 4).reshape(-1, 2, 4, 32)  # 16 groups of 16, as (halves, shifts, bytes)
    shifts = 2 * np.arange(4)[:, None]
    low = ((parts & 3) << shifts).sum(2).reshape(-1, 64)
    high = ((parts.reshape(-1, 8, 32) >> 2) << np.arange(8)[:, None]).sum(1)
    nibbles = (steps[:, :8] & 15) | ((steps[:, 8:] & 15) << 4)
    tops = ((steps.reshape(-1, 4, 4) >> 4) << shifts).sum(1)
    packed = [part.astype(np.uint8) for part in (high, low, nibbles, tops)]
    return np.hstack([*packed, _float16(unit)])


def _q4_k(codes: _Array, scales: _Array, minima: _Array) -> _Array:
    return np.hstack([_six_bits("q4_k", scales, minima), _nibbles_of_pairs(codes)])


def _q5_k(codes: _Array, scales: _Array, minima: _Array) -> _Array:
    groups = codes.reshape(-1, 8, 32)  # the fifth bits of column j of all groups share a byte
    fifth = ((groups >> 4) << np.arange(8)[:, None]).sum(1).astype(np.uint8)
    return np.hstack([_six_bits("q5_k", scales, minima), fifth, _nibbles_of_pairs(codes)])


def _six_bits(name: str, scales: _Array, minima: _Array) -> _Array:
    """Return two units and eight pairs of six bits in twelve bytes.

    The first four scales and the first four minima have the lower bits of eight bytes. The other
    pairs have a byte each for their lower four bits, and the upper two bits of the first eight.
    """
    (steps, unit), (lower, minimum_unit) = _steps(name, scales), _steps(name, minima)
    first = [steps[:, :4] | (steps[:, 4:] >> 4 << 6), lower[:, :4] | (lower[:, 4:] >> 4 << 6)]
    packed = np.hstack([*first, (steps[:, 4:] & 15) | ((lower[:, 4:] & 15) << 4)])
    return np.hstack([_float16(unit), _float16(minimum_unit), packed.astype(np.uint8)])


def _nibbles_of_pairs(codes: _Array) -> _Array:
    """Return the lower four bits of codes (n, 256): groups 2i and 2i + 1 share 32 bytes."""
    low = (codes & 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    return (low[:, :, 0] | (low[:, :, 1] << 4)).reshape(-1, 128)


_T, _F = GGMLQuantizationType, LlamaFileType
TYPES = {
    kind.name: kind
    for kind in (
        GgufType("q3_k", _T.Q3_K, _F.MOSTLY_Q3_K_M, _q3_k),
        GgufType("mxfp4", _T.MXFP4, _F.MOSTLY_MXFP4_MOE, _mxfp4),
        GgufType("iq4_nl", _T.IQ4_NL, _F.MOSTLY_IQ4_NL, _iq4_nl),
        GgufType("q4_0", _T.Q4_0, _F.MOSTLY_Q4_0, _q4_0),
        GgufType("q4_k", _T.Q4_K, _F.MOSTLY_Q4_K_M, _q4_k),
        GgufType("q4_1", _T.Q4_1, _F.MOSTLY_Q4_1, _q4_1),
        GgufType("q5_0", _T.Q5_0, _F.MOSTLY_Q5_0, _q5_0),
        GgufType("q5_k", _T.Q5_K, _F.MOSTLY_Q5_K_M, _q5_k),
        GgufType("q5_1", _T.Q5_1, _F.MOSTLY_Q5_1, _q5_1),
        GgufType("q8_0", _T.Q8_0, _F.MOSTLY_Q8_0, _q8_0),
        GgufType("bf16", _T.BF16, _F.MOSTLY_BF16),
        GgufType("f16", _T.F16, _F.MOSTLY_F16),
        GgufType("f32", _T.F32, _F.ALL_F32),
    )
}
"""The types by name, in the order that auto tries: the smallest first."""


def encode(name: str, parameter: Tensor, kind: str, known: GridParameters | None = None) -> Encoded:
    """Encode a parameter in a type, exactly if the type can hold it, else rounded.

    Args:
        name: The name of the tensor in the file, for messages.
        parameter: (..., columns), floating point.
        kind: The name of a type, or auto for the smallest type that holds the parameter exactly.
        known: The parameters on a grid with which the parameter was made, if they are known.

    Raises:
        OptionError: The type cannot hold the parameter, and gguf has no rounding to it; or, with
            auto, no type holds it.
        FormatError: The parameter holds NaN or infinite values; or, with auto, the known parameters
            have minima and do not give the parameter.
        ParityError: A zero weight would become non-zero, or a finite one infinite.
    """
    if not parameter.isfinite().all():
        raise FormatError(
            f"{name} holds NaN or infinite weights, which no model computes with. Fetch the "
            "checkpoint again, or prune a sound one."
        )
    if kind != AUTO:
        gguf_type = TYPES[kind]
        exact = _exact(parameter, gguf_type, known, may_round=True)
        return exact or _rounded(name, parameter, gguf_type)
    minima = known is not None and known.minima is not None
    for each in TYPES.values():
        if minima and not (each.grid is not None and each.grid.minimum):
            continue  # only parameters that no longer fit the weights would leave it to others
        if (encoded := _exact(parameter, each, known)) is not None:
            return encoded
    if minima:
        raise FormatError(
            f"{name}: the minima that the pruning kept in {PARAMETERS} do not give these weights, "
            "which were changed since. Prune again, or round the weights with --type."
        )
    raise OptionError(
        f"{name} holds {parameter.dtype} values that no type of a GGUF file holds to the bit. Name "
        "a type with --type."
    )


def exact_type(parameter: Tensor, known: GridParameters | None) -> str | None:
    """Return the smallest type with codes and scales that holds a parameter exactly, if any."""
    with_codes = (kind for kind in TYPES.values() if kind.grid is not None)
    fitting = (kind.name for kind in with_codes if _exact(parameter, kind, known) is not None)
    return next(fitting, None)


def _exact(
    parameter: Tensor, kind: GgufType, known: GridParameters | None, *, may_round: bool = False
) -> Encoded | None:
    """Return the parameter encoded exactly in a type; None if the type cannot hold it.

    If it `may_round` instead, None also for coarser values that lie on a grid of eight bits.
    """
    matrix = parameter.detach().reshape(-1, parameter.shape[-1])
    if torch.equal(matrix.bfloat16().to(matrix.dtype), matrix):
        # The products of codes and scales were rounded to bfloat16. Only in that dtype are they on
        # the grid.
        matrix = matrix.bfloat16()  # pruned in bfloat16, and stored wider
    if kind.pack is None or kind.grid is None:
        content = quantize(matrix.float().numpy(), kind.stored_as)
        decoded = torch.from_numpy(np.array(dequantize(content, kind.stored_as)))
        is_exact = bool(torch.equal(decoded.to(matrix.dtype), matrix))
    else:
        on_grid = _on_grid(matrix, kind.grid, known, may_round)
        is_exact = on_grid is not None
        if on_grid is not None:
            codes, *numbers = on_grid
            blocks = codes.numpy().astype(np.int64).reshape(-1, kind.grid.columns_together)
            of_blocks = [each.numpy().reshape(-1, kind.grid.together) for each in numbers]
            content = kind.pack(blocks, *of_blocks).reshape(len(matrix), -1)
    if not is_exact:
        return None
    return Encoded(content.reshape(*parameter.shape[:-1], -1), kind)


def _on_grid(
    matrix: Tensor, grid: Grid, known: GridParameters | None, may_round: bool
) -> tuple[Tensor, ...] | None:
    """Return codes, scales and any minima that give a matrix to the bit; None without such."""
    if not grid.divides(matrix.shape[1]):
        return None
    if known is not None and (codes := grid.codes_of(matrix, known)) is not None:
        return codes, known.scales, *([] if known.minima is None else [known.minima])
    # Most matrices that are on no grid fail in their first rows, which saves the fit of the rest.
    codes, _, fits = fit_groups(grid, matrix[:_FIRST])
    if not fits.all():
        return None
    # Quantisers of eight bits give the largest weight of a group the largest code. The coarser
    # values of another type lie on this grid, too, by scales that take minutes to find for a head.
    peaks = grid.grouped(codes).abs().amax(2)
    if may_round and grid.bits == 8 and not ((peaks == grid.largest) | (peaks == 0)).all():
        return None
    codes, scales, fits = fit_groups(grid, matrix)
    return (codes, scales) if bool(fits.all()) else None


def _rounded(name: str, parameter: Tensor, kind: GgufType) -> Encoded:
    """Return the parameter rounded by gguf; as F16 if its columns are no multiple of the group."""
    values = parameter.detach().float().contiguous().numpy()
    if kind.grid is not None and not kind.grid.divides(values.shape[-1]):
        kind = TYPES["f16"]
    try:
        content = quantize(values, kind.stored_as)
    except NotImplementedError:
        raise OptionError(
            f"--type {kind.name}: {name} is not on the grid of this type, and package gguf cannot "
            f"round to it. Prune with `grid: {kind.name}`, or take --type auto."
        ) from None
    decoded = dequantize(content, kind.stored_as)
    # Rounding may move any weight but a zero: a pruned weight that came back would undo the
    # pruning.
    reason = "" if np.isfinite(decoded).all() else "its largest weights are beyond this type"
    if returned := np.count_nonzero(decoded[values == 0]):
        reason = f"{returned:,} of its zeros would become other numbers"
    if reason:
        raise ParityError(
            f"{name} cannot be stored as {kind.name}: {reason}. Use --type bf16 or auto."
        )
    return Encoded(content, kind)
