"""Write a pruning with bits as compressed-tensors' `pack-quantized`, which vLLM and SGLang run.

Each weight is stored as integers of 4 or 8 bits, eight or four in an int32, with a scale in the
model's dtype for each row and group of columns. The export is lossless: a checkpoint whose weights
are not on such a grid raises, and the written files are read back and compared bit by bit.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from export.conversion.checkpoint import Checkpoint, Track, open_checkpoint, silently
from export.conversion.selection import Claims, LayerChoice
from export.conversion.writing import write_converted
from mrp_lightning.errors import OptionError, ParityError, PatternError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.targets.blocks import matches, require_matches
from mrp_sparse.formats.grid import Grid, GridParameters, ScaleType

FORMAT = "compressed-tensors"
_GROUPS = (128, 64, 32)
"""The group sizes that engines' kernels support, largest first; a whole row is another."""
_BITS = (4, 8)


@dataclass(frozen=True)
class Compressed:
    """The choice of an export.

    Attributes:
        layers: The layers whose weights are packed.
        bits: Bits of a weight: 4 or 8.
        group_size: Columns that share a scale; −1 for all of a row.
        ignored: The names of the other linear layers.
        known: The grid parameters that the pruning kept, by the names of layers.
    """

    layers: Sequence[LayerChoice]
    bits: int
    group_size: int
    ignored: Sequence[str]
    known: Mapping[str, GridParameters]

    def grid(self, shape: tuple[int, int], dtype: torch.dtype) -> Grid:
        """Return the grid of a layer: scales are numbers of the weight's dtype."""
        return _grid(self.bits, self.group_size, shape[1], dtype)

    @property
    def settings(self) -> dict[str, Any]:
        """The `quantization_config` of the checkpoint."""
        strategy = {"strategy": "channel"}
        if self.group_size > 0:
            strategy = {"strategy": "group", "group_size": self.group_size}  # type: ignore[dict-item]
        weights = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False}
        scheme = {"targets": ["Linear"], "weights": weights | strategy, "format": "pack-quantized"}
        return {
            "quant_method": FORMAT,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": list(self.ignored),
        }


def choose_compressed(
    checkpoint: Checkpoint, skip: Sequence[str] = (), track: Track = silently
) -> Compressed:
    """Find codes of 4 bits, or else of 8 bits, for the layers that a report lists.

    Args:
        checkpoint: The directory of a pruning with `bits` or `grid`.
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
        raise OptionError(f"`--format {FORMAT}` is for transformers models; got {path}.")
    checkpoint.require_dense()
    claims = Claims.read(path)
    if claims.grid is None or claims.layers is None:
        raise PatternError(
            f"`--format {FORMAT}` stores weights of few bits, and {path} has no report of a "
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
    group_size, misfits = _group_size(claims.grid.group_size, [linear[n] for n in expected]), {}
    layers, bits, known = [], _BITS[0], checkpoint.grid_parameters()
    tensors = track(checkpoint.parameters(model), checkpoint.num_tensors, "finding codes")
    for stored, parameter, is_converted, tensor in tensors:
        name, _, kind = parameter.rpartition(".")
        if kind != "weight" or name not in expected or is_converted or tensor.ndim != 2:
            continue
        shape = (tensor.shape[0], tensor.shape[1])
        # All layers of a file have the same bits: a layer off the 4-bit grid makes it 8 for all.
        # Codes of earlier layers are codes of 8 bits, too.
        while (off := _off(tensor, bits, group_size, known.get(name))) and bits < _BITS[-1]:
            bits = _BITS[-1]
        if off:
            # Products that were rounded to bfloat16 are off the grid in a wider dtype.
            wider = tensor.itemsize > 2 and torch.equal(tensor.bfloat16().to(tensor.dtype), tensor)
            rounded = (
                f"; it was pruned as bfloat16 and is stored as {tensor.dtype}: leave out `dtype`"
            )
            misfits[name] = off + rounded * wider
        layers.append(LayerChoice(name, stored, shape, tensor.dtype))
    if misfits or not layers:
        listed = "\n".join(f"  {name}: {reason}" for name, reason in misfits.items())
        raise PatternError(
            f"{path} cannot be stored as {FORMAT} without loss. Prune with `grid: int4-g32`, "
            f"int4-g64, int4-g128 or with `bits`, or leave layers dense with --skip:\n{listed}"
        )
    packed = {layer.name for layer in layers}
    ignored = [name for name in linear if name not in packed]
    return Compressed(layers, bits, group_size, ignored, known)


def write_compressed(source: Checkpoint, directory: Path, chosen: Compressed) -> Iterator[str]:
    """Write the checkpoint into an empty directory, yielding layers' names as they go."""

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        grid = chosen.grid(layer.shape, layer.dtype)
        codes, scales = grid.decompose(tensor, chosen.known.get(layer.name))
        start = layer.tensor.removesuffix("weight")
        return {
            f"{start}weight_packed": _pack(codes, chosen.bits),
            f"{start}weight_scale": scales.to(tensor.dtype),
            f"{start}weight_shape": torch.tensor(tensor.shape),
        }

    yield from write_converted(source, directory, chosen.layers, convert, chosen.settings)


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
            codes = _unpack(written[f"{start}weight_packed"], chosen.bits)
            scales = written[f"{start}weight_scale"]
            width = chosen.grid(layer.shape, layer.dtype).group_size
            # As in compressed-tensors: codes in the dtype of the scales, multiplied with one
            # rounding.
            other = codes.to(scales.dtype) * scales.repeat_interleave(width, 1)
        if other is None or not torch.equal(other, tensor):
            different.append(name)
    if different:
        raise ParityError(
            f"{len(different)} tensors read back differ from {source.path}: "
            f"{', '.join(different[:5])}. Please report this."
        )


def _group_size(size: int, layers: Sequence[nn.Linear]) -> int:
    """Return the largest supported group size that divides a run's groups, −1 for whole rows."""
    if layers and all(layer.in_features <= size for layer in layers):
        return -1
    for group in _GROUPS:
        if size % group == 0 and all(layer.in_features % group == 0 for layer in layers):
            return group
    widths = ", ".join(map(str, sorted({layer.in_features for layer in layers})))
    raise PatternError(
        f"`--format {FORMAT}` has groups of 32, 64 or 128 columns, and this run `group_size` "
        f"{size} with layers of {widths} columns. Prune with `group_size: 32`."
    )


def _grid(bits: int, group_size: int, columns: int, dtype: torch.dtype) -> Grid:
    codebook = tuple(range(-8, 8)) if bits == 4 else tuple(range(-128, 128))
    significant = 1 - int(math.log2(torch.finfo(dtype).eps))
    size = columns if group_size < 0 else group_size
    return Grid(bits, size, codebook, ScaleType(significant), f"int{bits}-g{size}")


def _off(weight: Tensor, bits: int, group_size: int, known: GridParameters | None) -> str | None:
    """Return how many groups of a weight are off the grid of `bits` bits; None if all are on it."""
    grid = _grid(bits, group_size, weight.shape[1], weight.dtype)
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
