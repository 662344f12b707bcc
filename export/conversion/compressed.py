"""Write a pruning with bits as integers that vLLM and SGLang run: compressed-tensors, or GPTQ.

Each weight is stored as integers of 4 or 8 bits, eight or four in an int32, with a scale for each
row and group of columns. The export is lossless: a checkpoint whose weights
are not on such a grid raises, and the written files are read back and compared bit by bit.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from export.conversion.checkpoint import Checkpoint, Track, open_checkpoint, silently
from export.conversion.selection import Claims, LayerChoice
from export.conversion.writing import write_converted
from mrp_ground.grid import Grid, GridParameters, ScaleType
from mrp_lightning.errors import OptionError, ParityError, PatternError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.targets.blocks import matches, require_matches

_GROUPS = (128, 64, 32)
"""The group sizes that engines' kernels support, largest first; a whole row is another."""
_BITS = (4, 8)


@dataclass(frozen=True)
class Compressed:
    """The choice of an export.

    Attributes:
        layout: The tensors of a layer.
        layers: The layers whose weights are packed.
        bits: Bits of a weight: 4 or 8.
        group_size: Columns that share a scale; −1 for all of a row.
        ignored: The names of the other linear layers.
        known: The grid parameters that the pruning kept, by the names of layers.
    """

    layout: "IntegerLayout"
    layers: Sequence[LayerChoice]
    bits: int
    group_size: int
    ignored: Sequence[str]
    known: Mapping[str, GridParameters]

    def grid(self, shape: tuple[int, int], dtype: torch.dtype) -> Grid:
        """Return the grid of a layer."""
        return _grid(self.bits, self.group_size, shape[1], self.layout.scale_type(dtype))


class IntegerLayout(ABC):
    """The tensors of a layer of integers, and the configuration by which engines find them."""

    name: str  # on the command line
    package: str  # with which transformers loads it

    @abstractmethod
    def settings(self, chosen: Compressed) -> dict[str, Any]:
        """Return the `quantization_config` of a checkpoint."""

    @abstractmethod
    def store(self, codes: Tensor, scales: Tensor, bits: int, width: int) -> dict[str, Tensor]:
        """Return the tensors of a layer by their names in it.

        Args:
            codes: (rows, columns), from −2^(bits − 1).
            scales: (rows, groups), in the dtype of the weight.
            bits: The bits of a code.
            width: The number of columns that share a scale.
        """

    @abstractmethod
    def read(self, stored: Mapping[str, Tensor], bits: int) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of the tensors of a layer, as of `store`."""

    def scale_type(self, dtype: torch.dtype) -> ScaleType:
        """Return the numbers that the scales of a weight can be: those of its dtype."""
        return ScaleType(1 - int(math.log2(torch.finfo(dtype).eps)))

    def why_not(self, shape: tuple[int, int], bits: int) -> str | None:  # noqa: ARG002
        """Return why the layout cannot hold a weight, `None` if it can."""
        return None


class PackQuantized(IntegerLayout):
    """compressed-tensors' `pack-quantized`: the codes of a row are packed along its columns."""

    name = package = "compressed-tensors"

    def settings(self, chosen: Compressed) -> dict[str, Any]:
        """Return one scheme for all linear layers but the ignored ones."""
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
            "ignore": list(chosen.ignored),
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
        """Unpack the codes."""
        return _unpack(stored["weight_packed"], bits), stored["weight_scale"]


class Gptq(IntegerLayout):
    """GPTQ's layout, version 1: transposed, and the codes of a column of the file are packed.

    Zero points are stored less one, and those of symmetric codes are 2^(bits − 1): the code −1 of
    `_pack`. Scales are float16 whatever the model's dtype, so that weights whose scales it does not
    hold are refused as off the grid.
    """

    name, package = "gptq", "gptqmodel"

    def settings(self, chosen: Compressed) -> dict[str, Any]:
        """Return the settings of all linear layers but the head, and name the layers left dense."""
        left_dense: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name in chosen.ignored}
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
            "qzeros": _pack(torch.full_like(scales.T, -1, dtype=torch.int64), bits),
            "scales": scales.T.to(torch.float16).contiguous(),
            "g_idx": (torch.arange(codes.shape[1]) // width).to(torch.int32),
        }

    def read(self, stored: Mapping[str, Tensor], bits: int) -> tuple[Tensor, Tensor]:
        """Unpack the codes, and subtract the zero points plus one."""
        zeros = _unpack(stored["qzeros"], bits).T + 1
        codes = _unpack(stored["qweight"].T, bits)
        return codes - zeros[:, stored["g_idx"].long()], stored["scales"].T

    def scale_type(self, dtype: torch.dtype) -> ScaleType:
        """Return the numbers that both the dtype of the weight and float16 hold."""
        significant = min(11, super().scale_type(dtype).significant)
        return ScaleType(significant, 2.0**-24, 2.0**15)

    def why_not(self, shape: tuple[int, int], bits: int) -> str | None:
        """Return whether rows or columns leave a word incomplete."""
        each = 32 // bits
        if shape[0] % each == shape[1] % each == 0:
            return None
        return f"its shape {shape[0]} × {shape[1]} is not in multiples of {each}"


LAYOUTS = {layout.name: layout for layout in (PackQuantized(), Gptq())}
"""The layouts by the format on the command line."""


def choose_compressed(
    checkpoint: Checkpoint,
    layout: IntegerLayout,
    skip: Sequence[str] = (),
    track: Track = silently,
) -> Compressed:
    """Find codes of 4 bits, or else of 8 bits, for the layers that a report lists.

    Args:
        checkpoint: The directory of a pruning with `bits` or `grid`.
        layout: The layout of the codes.
        skip: Name patterns of layers to leave dense.
        track: Shows a bar.

    Raises:
        OptionError: The module is the user's own.
        PatternError: The run had no bits, or weights are not on such a grid. The message lists all
            layers.
        TargetError: A pattern in `skip` matches nothing.
        FormatError: The checkpoint is quantized already or damaged.
    """
    path = checkpoint.path
    if not checkpoint.config:
        raise OptionError(f"`--format {layout.name}` is for transformers models; got {path}.")
    checkpoint.require_dense()
    claims = Claims.read(path)
    if claims.grid is None or claims.layers is None:
        raise PatternError(
            f"`--format {layout.name}` stores weights of few bits, and {path} has no report of a "
            "pruning with `bits` or `grid`. Prune it with `bits: 4` and `group_size: 32`."
        )
    model = build_without_weights(checkpoint.pretrained_config())
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    require_matches("--skip", skip, list(linear))
    expected = {
        name
        for name in claims.layers
        if name in linear and not any(matches(name, pattern) for pattern in skip)
    }
    modules = [linear[name] for name in expected]
    group_size, misfits = _group_size(layout, claims.grid.group_size, modules), {}
    layers, bits, known = [], _BITS[0], checkpoint.grid_parameters()
    tensors = track(checkpoint.parameters(model), checkpoint.num_tensors, "finding codes")
    for stored, parameter, is_converted, tensor in tensors:
        name, _, kind = parameter.rpartition(".")
        if kind != "weight" or name not in expected or is_converted or tensor.ndim != 2:
            continue
        shape = (tensor.shape[0], tensor.shape[1])
        # All layers of a file have the same bits: a layer off the 4-bit grid makes it 8 for all.
        # Codes of earlier layers are codes of 8 bits, too.
        scales, of_layer = layout.scale_type(tensor.dtype), known.get(name)
        while (off := _off(tensor, bits, group_size, scales, of_layer)) and bits < _BITS[-1]:
            bits = _BITS[-1]
        if off:
            # Products that were rounded to bfloat16 are off the grid in a wider dtype.
            wider = tensor.itemsize > 2 and torch.equal(tensor.bfloat16().to(tensor.dtype), tensor)
            rounded = (
                f"; it was pruned as bfloat16 and is stored as {tensor.dtype}: leave out `dtype`"
            )
            misfits[name] = off + rounded * wider
        elif reason := layout.why_not(shape, bits):
            misfits[name] = reason
        layers.append(LayerChoice(name, stored, shape, tensor.dtype))
    if misfits or not layers:
        listed = "\n".join(f"  {name}: {reason}" for name, reason in misfits.items())
        raise PatternError(
            f"{path} cannot be stored as {layout.name} without loss. Prune with `grid: int4-g32`, "
            f"int4-g64, int4-g128 or with `bits`, or leave layers dense with --skip:\n{listed}"
        )
    packed = {layer.name for layer in layers}
    ignored = [name for name in linear if name not in packed]
    return Compressed(layout, layers, bits, group_size, ignored, known)


def write_compressed(source: Checkpoint, directory: Path, chosen: Compressed) -> Iterator[str]:
    """Write the checkpoint into an empty directory, yielding layers' names as they go."""

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        grid = chosen.grid(layer.shape, layer.dtype)
        codes, scales = grid.decompose(tensor, chosen.known.get(layer.name))
        scales = scales.to(tensor.dtype)
        stored = chosen.layout.store(codes, scales, chosen.bits, grid.group_size)
        start = layer.tensor.removesuffix("weight")
        return {f"{start}{name}": each for name, each in stored.items()}

    settings = chosen.layout.settings(chosen)
    yield from write_converted(source, directory, chosen.layers, convert, settings)


def check_compressed(source: Checkpoint, directory: Path, chosen: Compressed) -> None:
    """Read the written files, and compare them bit by bit with the source.

    Raises:
        ParityError: Tensors differ.
    """
    written = dict(open_checkpoint(directory).tensors())
    packed = {layer.tensor: layer for layer in chosen.layers}
    different = []
    for name, tensor in source.tensors():
        if (layer := packed.get(name)) is None:
            other = written.get(name)
        else:
            start = layer.tensor.removesuffix("weight")
            stored = {
                key.removeprefix(start): each
                for key, each in written.items()
                if key.startswith(start)
            }
            codes, scales = chosen.layout.read(stored, chosen.bits)
            width = chosen.grid(layer.shape, layer.dtype).group_size
            # As engines do: codes in the model's dtype, multiplied with one rounding.
            scales = scales.to(tensor.dtype)
            other = codes.to(tensor.dtype) * scales.repeat_interleave(width, 1)
        if other is None or not torch.equal(other, tensor):
            different.append(name)
    if different:
        raise ParityError(
            f"{len(different)} tensors read back differ from {source.path}: "
            f"{', '.join(different[:5])}. Please report this."
        )


def _group_size(layout: IntegerLayout, size: int, layers: Sequence[nn.Linear]) -> int:
    """Return the largest supported group size that divides a run's groups, −1 for whole rows."""
    if layers and all(layer.in_features <= size for layer in layers):
        return -1
    for group in _GROUPS:
        if size % group == 0 and all(layer.in_features % group == 0 for layer in layers):
            return group
    widths = ", ".join(map(str, sorted({layer.in_features for layer in layers})))
    raise PatternError(
        f"`--format {layout.name}` has groups of 32, 64 or 128 columns, and this run `group_size` "
        f"{size} with layers of {widths} columns. Prune with `group_size: 32`."
    )


def _grid(bits: int, group_size: int, columns: int, scales: ScaleType) -> Grid:
    codebook = tuple(range(-8, 8)) if bits == 4 else tuple(range(-128, 128))
    size = columns if group_size < 0 else group_size
    return Grid(bits, size, codebook, scales, f"int{bits}-g{size}")


def _off(
    weight: Tensor,
    bits: int,
    group_size: int,
    scales: ScaleType,
    known: GridParameters | None,
) -> str | None:
    """Return how many groups of a weight are off the grid of `bits` bits; None if all are on it."""
    grid = _grid(bits, group_size, weight.shape[1], scales)
    fits = grid.fit(weight, known)[2]
    missing = int((~fits).sum())
    return f"{missing} of {fits.numel()} groups are no multiples of a scale" if missing else None


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes (rows, columns) from −2^(bits − 1) as int32 (rows, columns·bits/32)."""
    each = 32 // bits
    columns = codes.shape[1]
    padded = torch.zeros(len(codes), -(-columns // each) * each, dtype=torch.int64)
    padded[:, :columns] = codes.long() + (1 << (bits - 1))
    words = (padded.unflatten(1, (-1, each)) << (torch.arange(each) * bits)).sum(2)
    return (words - ((words >> 31) << 32)).to(torch.int32)  # the same bits, with a sign


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes of `_pack`, int64 (rows, columns)."""
    shifts = torch.arange(32 // bits) * bits
    fields = (words.long()[:, :, None] >> shifts) & ((1 << bits) - 1)
    return fields.flatten(1) - (1 << (bits - 1))
