"""Write a pruning with bits as integers that vLLM and SGLang run, in compressed-tensors' layout.

In its layout `pack-quantized` the codes of a row are packed along its columns, eight or four in an
int32, with a scale for each row and group of columns. Experts are packed one by one. The export is
lossless: a checkpoint whose weights are not on such a grid raises, and the written files are read
back and compared bit by bit.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from export.conversion.checkpoint import Checkpoint, open_checkpoint
from export.conversion.selection import Claims, LayerChoice
from export.conversion.writing import write_converted
from mrp_lightning.errors import OptionError, ParityError, PatternError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.solver.grid import Grid, GridParameters, ScaleType, decompose, fit_groups
from mrp_lightning.targets.blocks import listed, matches, require_matches
from mrp_lightning.targets.layers import Expert, layers_of

NAME = "compressed-tensors"
"""The name for `--format`, of the `quant_method`, and of the package that reads the layout."""
_TENSORS = ("_packed", "_scale", "_shape")
_GROUPS = (128, 64, 32)
"""The group sizes that engines' kernels support, largest first; a whole row is another."""
_BITS = (4, 8)
_EXPERT = re.compile(r"\.(\d+)\.[^.]+$")
"""The number of an expert and the name of its matrix, at the end of a name in the files."""


class Compressed:
    """The codes of a checkpoint, matrix by matrix of its files, and the modules that stay dense.

    All layers of a file have the same bits: a layer off the 4-bit grid makes it 8 for all, since
    codes of 4 bits are codes of 8 bits, too.

    Args:
        model: The model, without weights.
        names: The names of the pruned layers.
        skip: Name patterns of layers that stay dense.
        group_size: The group size of the run.
        known: The grid parameters that the pruning kept, by the names of layers.

    Attributes:
        layers: The matrices of the files that are packed.
        bits: Bits of a weight: 4 or 8.
        group_size: Columns that share a scale; −1 for all of a row.
        parameters: The grid parameters that the pruning kept, by the names of packed matrices.
        misfits: The reasons why matrices cannot be stored without loss, by name.
        dense_experts: The modules of experts that stay dense, by the names in the files and in
            transformers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        names: Iterable[str],
        skip: Sequence[str],
        group_size: int,
        known: Mapping[str, GridParameters],
    ) -> None:
        modules = dict(model.named_modules())
        layers = [layer for name, m in modules.items() for layer in layers_of(name, m)]
        self._of_model = {layer.name: layer for layer in layers}
        require_matches("--skip", skip, list(self._of_model))
        self._wanted = {
            name
            for name in names
            if name in self._of_model and not any(matches(name, pattern) for pattern in skip)
        }
        experts = [layer for layer in layers if isinstance(layer, Expert)]
        # An expert for each parameter in which experts are stacked, by the parameter's name.
        self._stacks = {layer.parameter_name: layer for layer in experts}
        # Modules of which some experts are not packed: engines need one format for all.
        self._partly = {layer.owner for layer in experts if layer.name not in self._wanted}
        self._linear = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
        self._tables = {name for name, m in modules.items() if isinstance(m, nn.Embedding)}
        # Layers that stay dense must not restrict the divisors of the group size.
        packed = [name for name in self._wanted if self._why_dense(name) is None]
        widths = [self._of_model[name].weight.shape[1] for name in packed]
        self.group_size = _group_size(group_size, widths) if widths else -1
        self._known, self.bits = known, _BITS[0]
        self.layers: list[LayerChoice] = []
        self.parameters: dict[str, GridParameters] = {}
        self.misfits: dict[str, str] = {}
        self._packed: set[str] = set()  # the layers of which a matrix is packed
        # The modules of all other matrices, by their names in the model and in the files.
        self._named: dict[str, None] = {}
        self.dense_experts: dict[str, None] = {}

    @property
    def left(self) -> dict[str, str]:
        """The reasons why pruned layers stay dense, by name, but for those of `--skip`."""
        nowhere = "the files hold no matrix of its own for it"
        return {
            name: self._why_dense(name) or nowhere for name in sorted(self._wanted - self._packed)
        }

    @property
    def left_weights(self) -> int:
        """The number of the weights of the layers in `left`."""
        return sum(self._of_model[name].weight.numel() for name in self.left)

    def settings(self) -> dict[str, Any]:
        """Return the `quantization_config`: one scheme for all linear layers but those ignored."""
        strategy: dict[str, Any] = {"strategy": "channel"}
        if self.group_size > 0:
            strategy = {"strategy": "group", "group_size": self.group_size}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False}
        scheme = {"targets": ["Linear"], "weights": weights | strategy, "format": "pack-quantized"}
        modules = dict.fromkeys([*self._linear, *self._named])
        dense = [name for name in modules if name not in self._packed]
        # A pattern is for the module of all experts, and for each matrix of one.
        experts = [rf"re:^{re.escape(name)}(\..*)?$" for name in self.dense_experts]
        return {
            "quant_method": NAME,
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": [*dense, *experts],
        }

    def grid(self, columns: int, dtype: torch.dtype) -> Grid:
        """Return the grid of a layer of this many columns and this dtype."""
        codebook = tuple(range(-(2 ** (self.bits - 1)), 2 ** (self.bits - 1)))
        size = columns if self.group_size < 0 else self.group_size
        # eps = 2^(1 − p) for p significant bits, so p = 1 − log2(eps).
        scales = ScaleType(1 - int(math.log2(torch.finfo(dtype).eps)))
        return Grid(self.bits, size, codebook, scales, f"int{self.bits}-g{size}")

    def _why_dense(self, name: str) -> str | None:
        """Return why a pruned layer cannot be packed, whatever its weight; `None` if it can."""
        layer = self._of_model[name]
        if isinstance(layer, Expert):
            if layer.owner in self._partly:
                return "it is an expert, and others of its block stay dense"
        elif not isinstance(layer.module, nn.Linear):
            kind = type(layer.module).__name__
            return f"it is a {kind}, and engines read nn.Linear alone in this format"
        return None

    def examine(self, stored: str, parameter: str, is_converted: bool, tensor: Tensor) -> None:
        """Record a tensor of the files: its codes if it is packed, else the name of its module."""
        start, _, kind = stored.rpartition(".")
        name = parameter.rpartition(".")[0]
        if (stack := self._stacks.get(parameter)) is not None:
            # The files hold a matrix for each expert only if transformers stacks them as it loads;
            # the number is in the stored name alone, since the model has one parameter for all.
            expert = _EXPERT.search(start) if is_converted else None  # else one tensor for all
            owner = start if expert is None else start[: expert.start()]
            name = "" if expert is None else f"{stack.owner}.{expert[1]}.{stack.stack}"
            if name not in self._wanted or self._why_dense(name) is not None:
                self.dense_experts |= dict.fromkeys((stack.owner, owner))
                return
        elif is_converted or name not in self._wanted or self._why_dense(name) is not None:
            # Engines expect codes in every linear module that is not listed as dense, so each one
            # that stays dense has to be listed, by its name in the files and by that in the model.
            if kind == "weight" and tensor.ndim == 2 and name not in self._tables:
                self._named |= dict.fromkeys((name, start))
            return
        if kind == "weight" and tensor.ndim == 2:
            self._packed.add(name)
            self._find_codes(start if stack else name, name, stored, tensor)

    def _find_codes(self, name: str, layer: str, stored: str, tensor: Tensor) -> None:
        """Record a matrix to pack, with the reason if it cannot be packed without loss."""
        shape = (tensor.shape[0], tensor.shape[1])
        grid = partial(self.grid, shape[1], tensor.dtype)
        parameters = _of_matrix(self._known.get(layer), tensor, grid())
        if parameters is not None:
            self.parameters[name] = parameters
        # The bits only grow, and one width holds for the whole checkpoint: 4-bit codes are also
        # 8-bit codes with the same scale, so that layers seen earlier still fit after a later one
        # widened it.
        while (off := _off(tensor, grid(), parameters)) and self.bits < _BITS[-1]:
            self.bits = _BITS[-1]
        if off:
            # Products that were rounded to bfloat16 are off the grid in a wider dtype.
            wider = tensor.itemsize > 2 and torch.equal(tensor.bfloat16().to(tensor.dtype), tensor)
            rounded = (
                f"; it was pruned as bfloat16 and is stored as {tensor.dtype}: leave out `dtype`"
            )
            self.misfits[name] = off + rounded * wider
        self.layers.append(LayerChoice(name, stored, shape, tensor.dtype))


def choose_compressed(checkpoint: Checkpoint, skip: Sequence[str] = ()) -> Compressed:
    """Find codes of 4 bits, or else of 8 bits, for the layers that a report lists but for `skip`.

    Raises:
        OptionError: The module is the user's own.
        PatternError: The run had no bits, its groups fit none of the engines', weights are not on
            such a grid, or no layer is of a kind that engines read. The message lists all layers.
        TargetError: A pattern in `skip` matches nothing.
        FormatError: The checkpoint is quantized already, damaged, or holds NaN or Inf.
    """
    path = checkpoint.path
    if not checkpoint.config:
        raise OptionError(f"`--format {NAME}` is for transformers models; got {path}.")
    checkpoint.require_dense()
    claims = Claims.read(path)
    if claims.grid is None or claims.layers is None:
        raise PatternError(
            f"`--format {NAME}` stores weights of few bits, and {path} has no report of a "
            "pruning with `bits` or `grid`. Prune it with `bits: 4` and `group_size: 32`."
        )
    model = build_without_weights(checkpoint.pretrained_config())
    known = checkpoint.grid_parameters()
    chosen = Compressed(model, claims.layers, skip, claims.grid.group_size, known)
    for tensor in checkpoint.parameters(model, "finding codes"):
        chosen.examine(*tensor)
    if chosen.misfits:
        raise PatternError(
            f"{path} cannot be stored as {NAME} without loss. Prune with "
            "`grid: int4-g32`, int4-g64, int4-g128 or with `bits`, or leave layers dense with "
            f"--skip:\n{listed(chosen.misfits)}"
        )
    if not chosen.layers:
        raise PatternError(
            f"{path} has no layer that engines read as {NAME}. Serve it with "
            "transformers as it is, or with llama.cpp (`mrp-lightning gguf --like`):\n"
            f"{listed(chosen.left)}"
        )
    return chosen


def write_compressed(source: Checkpoint, directory: Path, chosen: Compressed) -> Iterator[str]:
    """Write the checkpoint into an empty directory, yielding layers' names as they go."""

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        grid = chosen.grid(layer.shape[1], layer.dtype)
        codes, scales = decompose(grid, tensor, chosen.parameters.get(layer.name))
        stored = _pack(codes, chosen.bits), scales.to(tensor.dtype), torch.tensor(codes.shape)
        return dict(zip(_names(layer), stored, strict=True))

    yield from write_converted(source, directory, chosen.layers, convert, chosen.settings())


def check_compressed(source: Checkpoint, directory: Path, chosen: Compressed) -> None:
    """Read the written files, and compare their values with the source's; −0.0 equals 0.

    Raises:
        ParityError: Tensors differ.
    """
    written = dict(open_checkpoint(directory).tensors())
    packed = {layer.tensor: layer for layer in chosen.layers}
    different = []
    for name, tensor in source.tensors():
        if (layer := packed.get(name)) is None:
            other = written.get(name)
        elif not {*_names(layer)} <= written.keys():
            other = None
        else:
            words, scales, shape = (written[key] for key in _names(layer))
            # The last word of a row may hold more codes.
            codes = _unpack(words, chosen.bits)[:, : int(shape[1])]
            width = chosen.grid(layer.shape[1], layer.dtype).group_size
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


def _names(layer: LayerChoice) -> list[str]:
    """Return the names of the words, the scales and the shape of a layer in the files."""
    return [f"{layer.tensor}{end}" for end in _TENSORS]


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes (rows, columns) from −2^(bits − 1) as int32 (rows, columns·bits/32)."""
    each = 32 // bits
    fields = codes.long() + (1 << (bits - 1))
    padded = nn.functional.pad(fields, (0, -codes.shape[1] % each))
    # The sum is a bitwise or, since the fields of a word do not overlap. It needs int64: the top
    # field of an unsigned word does not fit int32 before the sign is restored below.
    words = (padded.unflatten(1, (-1, each)) << (torch.arange(each) * bits)).sum(2)
    return (words - ((words >> 31) << 32)).to(torch.int32)  # the same bits, with a sign


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes of `_pack`, int64 (rows, columns), with those that fill the last word."""
    shifts = torch.arange(32 // bits) * bits
    fields = (words.long()[:, :, None] >> shifts) & ((1 << bits) - 1)
    return fields.flatten(1) - (1 << (bits - 1))


def _group_size(size: int, columns: Sequence[int]) -> int:
    """Return the largest supported group size that divides a run's groups, −1 for whole rows.

    Args:
        size: The group size of the run.
        columns: The number of columns of each layer to pack; at least one.
    """
    # Each row is one group in every layer, so a scale for each row loses nothing and needs no
    # divisor.
    if all(each <= size for each in columns):
        return -1
    # A divisor of the run's group size keeps each stored group inside one group of the run, which
    # has one scale. A larger group would join columns of different scales.
    for group in _GROUPS:
        if size % group == 0 and all(each % group == 0 for each in columns):
            return group
    widths = ", ".join(map(str, sorted(set(columns))))
    raise PatternError(
        f"`--format {NAME}` has groups of 32, 64 or 128 columns, and this run `group_size` "
        f"{size} with layers of {widths} columns. Prune with `group_size: 32`."
    )


def _of_matrix(known: GridParameters | None, matrix: Tensor, grid: Grid) -> GridParameters | None:
    """Return the parameters of a matrix, one of those that a layer may stack, `None` if unknown."""
    if known is None or len(known.scales) == len(matrix):
        return known
    # Only values identify the part: the parameters do not record which of the joined matrices they
    # belong to, and a part that reproduces the matrix bit by bit is as good as the right one.
    parts = known.split([len(matrix)] * (len(known.scales) // len(matrix)))
    return next((part for part in parts if grid.codes_of(matrix, part) is not None), None)


def _off(weight: Tensor, grid: Grid, known: GridParameters | None) -> str | None:
    """Return how many groups of a weight are off a grid, if any."""
    fits = fit_groups(grid, weight, known)[2]
    missing = int((~fits).sum())
    return f"{missing} of {fits.numel()} groups are no multiples of a scale" if missing else None
