"""Integers of 4 or 8 bits in compressed-tensors' `pack-quantized` layout, and their configuration.

The codes of a row are packed along its columns, eight or four in an int32, with a scale for each
row and group of columns.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.solver.grid import ScaleType

NAME = "compressed-tensors"
"""The name for `--format`, of the `quant_method`, and of the package that reads the layout."""
TENSORS = ("weight_packed", "weight_scale", "weight_shape")


@dataclass(frozen=True)
class Integers:
    """The codes of an export.

    Attributes:
        bits: Bits of a weight: 4 or 8.
        group_size: Columns that share a scale; −1 for all of a row.
        dense: The modules that stay dense, by the name in the files and that in transformers.
        dense_experts: The modules of experts that stay dense, likewise.
    """

    bits: int
    group_size: int
    dense: Sequence[str]
    dense_experts: Sequence[str] = ()

    def settings(self) -> dict[str, Any]:
        """Return the `quantization_config`: one scheme for all linear layers but those ignored."""
        strategy: dict[str, Any] = {"strategy": "channel"}
        if self.group_size > 0:
            strategy = {"strategy": "group", "group_size": self.group_size}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False}
        scheme = {"targets": ["Linear"], "weights": weights | strategy, "format": "pack-quantized"}
        # A pattern is for the module of all experts, and for each matrix of one.
        experts = [rf"re:^{re.escape(name)}(\..*)?$" for name in self.dense_experts]
        return {
            "quant_method": NAME,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": [*self.dense, *experts],
        }


def store(codes: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    """Return the tensors of a layer by their names in it.

    Args:
        codes: (rows, columns), whole numbers from −2^(bits − 1) to 2^(bits − 1) − 1.
        scales: (rows, groups), in the dtype of the weight.
        bits: The bits of a code.
    """
    return dict(zip(TENSORS, (_pack(codes, bits), scales, torch.tensor(codes.shape)), strict=True))


def read(stored: Mapping[str, Tensor], bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes (rows, columns), int64, and the scales of the tensors of `store`."""
    columns = int(stored["weight_shape"][1])  # the last word of a row may hold more codes
    return _unpack(stored["weight_packed"], bits)[:, :columns], stored["weight_scale"]


def scale_type(dtype: torch.dtype) -> ScaleType:
    """Return the numbers that scales can be: of as many significant bits as the dtype's."""
    # eps = 2^(1 − p) for p significant bits, so p = 1 − log2(eps).
    return ScaleType(1 - int(math.log2(torch.finfo(dtype).eps)))


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes (rows, columns) from −2^(bits − 1) as int32 (rows, columns·bits/32)."""
    each = 32 // bits
    columns = codes.shape[1]
    padded = torch.zeros(len(codes), -(-columns // each) * each, dtype=torch.int64)
    # The sum is a bitwise or, since the fields of a word do not overlap. It needs int64: the top
    # field of an unsigned word does not fit int32 before the sign is restored below.
    padded[:, :columns] = codes.long() + (1 << (bits - 1))
    words = (padded.unflatten(1, (-1, each)) << (torch.arange(each) * bits)).sum(2)
    return (words - ((words >> 31) << 32)).to(torch.int32)  # the same bits, with a sign


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes of `_pack`, int64 (rows, columns), with those that fill the last word."""
    shifts = torch.arange(32 // bits) * bits
    fields = (words.long()[:, :, None] >> shifts) & ((1 << bits) - 1)
    return fields.flatten(1) - (1 << (bits - 1))
