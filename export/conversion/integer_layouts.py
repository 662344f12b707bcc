"""The tensors and settings by which engines find layers of integers: compressed-tensors and GPTQ.

Each weight is stored as integers of 4 or 8 bits, eight or four in an int32, with a scale for each
row and group of columns.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.solver.grid import ScaleType


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


class IntegerLayout(ABC):
    """The tensors of a layer of integers, and the configuration by which engines find them."""

    name: str  # on the command line
    package: str  # with which transformers loads it
    module: str  # that the package installs
    tensors: tuple[str, ...]  # of a layer
    packs_experts: bool  # whether engines read experts in this layout, one by one

    @abstractmethod
    def settings(self, chosen: Integers) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint."""

    @abstractmethod
    def store(self, codes: Tensor, scales: Tensor, bits: int, width: int) -> dict[str, Tensor]:
        """Return the tensors of a layer by their names in it.

        Args:
            codes: (rows, columns), whole numbers from −2^(bits − 1) to 2^(bits − 1) − 1.
            scales: (rows, groups), in the dtype of the weight.
            bits: The bits of a code.
            width: The number of columns that share a scale.
        """

    @abstractmethod
    def read(self, stored: Mapping[str, Tensor], bits: int) -> tuple[Tensor, Tensor]:
        """Return the codes, int64, and the scales of the tensors that `store` returns."""

    def scale_type(self, dtype: torch.dtype) -> ScaleType:
        """Return the numbers that scales can be: of as many significant bits as the dtype's."""
        # eps = 2^(1 − p) for p significant bits, so p = 1 − log2(eps).
        return ScaleType(1 - int(math.log2(torch.finfo(dtype).eps)))

    def why_not(self, shape: tuple[int, int], bits: int) -> str | None:  # noqa: ARG002
        """Return why the layout cannot hold a weight, `None` if it can."""
        return None


class PackQuantized(IntegerLayout):
    """compressed-tensors' `pack-quantized`: the codes of a row are packed along its columns."""

    name = package = "compressed-tensors"
    module = "compressed_tensors"
    tensors = ("weight_packed", "weight_scale", "weight_shape")
    packs_experts = True  # transformers stacks them as it loads, and vLLM reads them one by one

    def settings(self, chosen: Integers) -> dict[str, Any]:
        """Return the `quantization_config`: one scheme for all linear layers but those ignored."""
        strategy = {"strategy": "channel"}
        if chosen.group_size > 0:
            strategy = {"strategy": "group", "group_size": chosen.group_size}  # type: ignore[dict-item]
        weights = {"num_bits": chosen.bits, "type": "int", "symmetric": True, "dynamic": False}
        scheme = {"targets": ["Linear"], "weights": weights | strategy, "format": "pack-quantized"}
        return {
            "quant_method": self.name,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": [
                *chosen.dense,
                *(f"re:{_experts_pattern(name)}" for name in chosen.dense_experts),
            ],
        }

    def store(self, codes: Tensor, scales: Tensor, bits: int, width: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return the packed codes, the scales and the shape."""
        shape = torch.tensor(codes.shape)
        return {
            "weight_packed": _pack(codes, bits),
            "weight_scale": scales,
            "weight_shape": shape,
        }

    def read(self, stored: Mapping[str, Tensor], bits: int) -> tuple[Tensor, Tensor]:
        """Return the unpacked codes (rows, columns), and the scales (rows, groups)."""
        columns = int(stored["weight_shape"][1])  # the last word of a row may hold more codes
        return _unpack(stored["weight_packed"], bits)[:, :columns], stored["weight_scale"]


class Gptq(IntegerLayout):
    """GPTQ's layout, version 1: weights are transposed, and codes are packed along input features.

    A zero point is stored less one. That of symmetric codes is 2^(bits − 1), so 2^(bits − 1) − 1 is
    stored, which `_pack` makes of −1. Scales are float16 whatever the model's dtype; weights with a
    scale that float16 cannot hold are refused as off the grid.
    """

    name, package, module = "gptq", "gptqmodel", "gptqmodel"
    tensors = ("qweight", "qzeros", "scales", "g_idx")
    packs_experts = False

    def settings(self, chosen: Integers) -> dict[str, Any]:
        """Return the `quantization_config` of all linear layers but the head and those dense."""
        patterns = [
            *(f"^{re.escape(name)}$" for name in chosen.dense),
            *map(_experts_pattern, chosen.dense_experts),
        ]
        left_dense: dict[str, Any] = {f"-:{pattern}": {} for pattern in patterns}
        return {
            "quant_method": self.name,
            "checkpoint_format": "gptq",
            "bits": chosen.bits,
            "group_size": chosen.group_size,
            "sym": True,
            "desc_act": False,
            "lm_head": False,
            "dynamic": left_dense,
        }

    def store(self, codes: Tensor, scales: Tensor, bits: int, width: int) -> dict[str, Tensor]:
        """Return codes, zero points and scales, and the group of each column."""
        return {
            "qweight": _pack(codes, bits).T.contiguous(),
            # Version 1 adds one to the zero point that it reads: 2^(bits − 1) − 1 is stored, which
            # is the code −1 plus the offset 2^(bits − 1) of `_pack`.
            "qzeros": _pack(torch.full_like(scales.T, -1, dtype=torch.int64), bits),
            "scales": scales.T.to(torch.float16).contiguous(),
            "g_idx": (torch.arange(codes.shape[1]) // width).to(torch.int32),
        }

    def read(self, stored: Mapping[str, Tensor], bits: int) -> tuple[Tensor, Tensor]:
        """Unpack the codes, and subtract the zero points plus one."""
        zeros = _unpack(stored["qzeros"], bits).T + 1
        # `_unpack` subtracts 2^(bits − 1) from codes and zero points alike, so the offset cancels
        # in their difference, and only the "plus one" of version 1 is left.
        codes = _unpack(stored["qweight"].T, bits)
        return codes - zeros[:, stored["g_idx"].long()], stored["scales"].T

    def scale_type(self, dtype: torch.dtype) -> ScaleType:
        """Return the numbers that both the dtype of the weight and float16 hold."""
        # float16 has 11 significant bits, its subnormals are multiples of 2^−24, and its largest
        # power of two is 2^15. Without these bounds, a scale of bfloat16 could fit in bits and
        # overflow.
        significant = min(11, super().scale_type(dtype).significant)
        return ScaleType(significant, 2.0**-24, 2.0**15)

    def why_not(self, shape: tuple[int, int], bits: int) -> str | None:
        """Return the reason if rows or columns leave a word of 32 bits incomplete, else `None`."""
        each = 32 // bits
        if shape[0] % each == shape[1] % each == 0:
            return None
        return f"its shape {shape[0]} × {shape[1]} is not in multiples of {each}"


def _experts_pattern(name: str) -> str:
    """Return a pattern for the module of all experts and for each matrix of one."""
    return rf"^{re.escape(name)}(\..*)?$"


LAYOUTS = {layout.name: layout for layout in (PackQuantized(), Gptq())}
"""The layouts by the format on the command line."""


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
