"""Write a pruning with bits as integers that vLLM and SGLang run, in compressed-tensors' layout.

The export is lossless: a checkpoint whose weights are not on such a grid raises, the written files
are read back and compared bit by bit, and transformers loads them if the package is installed.
Experts are packed one by one.
"""

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from export.conversion.checkpoint import Checkpoint, open_checkpoint
from export.conversion.claims import Claim, Claims
from export.conversion.integers import NAME, TENSORS, Integers, read, scale_type, store
from export.conversion.parity import compare_text, predicts_tokens, text_failures
from export.conversion.selection import LayerChoice
from export.conversion.writing import write_converted
from mrp_lightning.errors import OptionError, ParityError, PatternError, first_line
from mrp_lightning.models.checkpoint import (
    build_without_weights,
    longest_sequence,
    model_class,
)
from mrp_lightning.models.integrity import required
from mrp_lightning.solver.grid import Grid, GridParameters, ScaleType, decompose, fit_groups
from mrp_lightning.targets.blocks import listed, matches, require_matches
from mrp_lightning.targets.layers import Expert, layers_of

_GROUPS = (128, 64, 32)
"""The group sizes that engines' kernels support, largest first; a whole row is another."""
_BITS = (4, 8)


@dataclass(frozen=True)
class Compressed:
    """The matrices that an export packs, and their codes.

    Attributes:
        layers: The matrices of the files that are packed.
        integers: The codes, and the modules that stay dense.
        left: The reasons why pruned layers stay dense, by name, but for those of `--skip`;
            `left_weights` is the number of their weights.
        known: The grid parameters that the pruning kept, by the names of packed matrices.
    """

    layers: Sequence[LayerChoice]
    integers: Integers
    left: Mapping[str, str]
    left_weights: int
    known: Mapping[str, GridParameters]

    def grid(self, shape: tuple[int, int], dtype: torch.dtype) -> Grid:
        """Return the grid of a layer."""
        return _grid(self.integers.bits, self.integers.group_size, shape[1], scale_type(dtype))


def choose_compressed(checkpoint: Checkpoint, skip: Sequence[str] = ()) -> Compressed:
    """Find codes of 4 bits, or else of 8 bits, for the layers that a report lists.

    Args:
        checkpoint: The directory of a pruning with `bits` or `grid`.
        skip: Name patterns of layers to leave dense.

    Raises:
        OptionError: The module is the user's own.
        PatternError: The run had no bits, its groups fit none of the engines', weights are not on
            such a grid, or no layer is of a kind that engines read. The message lists all layers.
        TargetError: A pattern in `skip` matches nothing.
        FormatError: The checkpoint is quantized already, damaged, or holds NaN or Inf.
    """
    grid, claims = _claims_of(checkpoint)
    model = build_without_weights(checkpoint.pretrained_config())
    search = _Search(model, claims, skip, grid.group_size, checkpoint.grid_parameters())
    for tensor in checkpoint.finite_parameters(model, "finding codes"):
        search.examine(*tensor)
    left = search.left
    if search.misfits:
        raise PatternError(
            f"{checkpoint.path} cannot be stored as {NAME} without loss. Prune with "
            "`grid: int4-g32`, int4-g64, int4-g128 or with `bits`, or leave layers dense with "
            f"--skip:\n{listed(search.misfits)}"
        )
    if not search.packed:
        raise PatternError(
            f"{checkpoint.path} has no layer that engines read as {NAME}. Serve it with "
            "transformers as it is, or with llama.cpp (`mrp-lightning gguf --like`):\n"
            f"{listed(left)}"
        )
    integers = Integers(search.bits, search.group_size, search.dense, list(search.dense_experts))
    weights = sum(search.layers[name].weight.numel() for name in left)
    return Compressed(search.packed, integers, left, weights, search.chosen)


def _claims_of(checkpoint: Checkpoint) -> tuple[Grid, Mapping[str, Claim]]:
    """Return the grid and the layers that the report of a pruning with bits lists."""
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
    return claims.grid, claims.layers


_EXPERT = re.compile(r"\.(\d+)\.[^.]+$")
"""The number of an expert and the name of its matrix, at the end of a name in the files."""


class _Search:
    """The search for the codes of a checkpoint, matrix by matrix of its files.

    All layers of a file have the same bits: a layer off the 4-bit grid makes it 8 for all, since
    codes of 4 bits are codes of 8 bits, too. The search begins without weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        claims: Mapping[str, Claim],
        skip: Sequence[str],
        group_size: int,
        known: Mapping[str, GridParameters],
    ) -> None:
        modules = dict(model.named_modules())
        layers = [layer for name, m in modules.items() for layer in layers_of(name, m)]
        self.layers = {layer.name: layer for layer in layers}
        require_matches("--skip", skip, list(self.layers))
        self.wanted = {
            name
            for name in claims
            if name in self.layers and not any(matches(name, pattern) for pattern in skip)
        }
        experts = [layer for layer in layers if isinstance(layer, Expert)]
        # An expert for each parameter in which experts are stacked, by the parameter's name.
        self.stacks = {layer.parameter_name: layer for layer in experts}
        # Modules of which some experts are not packed: engines need one format for all.
        self.partly = {layer.owner for layer in experts if layer.name not in self.wanted}
        self.linear = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
        self.tables = {name for name, m in modules.items() if isinstance(m, nn.Embedding)}
        # Layers that stay dense must not restrict the divisors of the group size.
        packed = [name for name in self.wanted if self.why_dense(name) is None]
        widths = [self.layers[name].weight.shape[1] for name in packed]
        self.group_size = _group_size(group_size, widths) if widths else -1
        self.known, self.bits = known, _BITS[0]
        self.packed: list[LayerChoice] = []
        self.chosen: dict[str, GridParameters] = {}  # by the names of packed matrices
        self.misfits: dict[str, str] = {}  # the reasons why matrices cannot be stored, by name
        self.packed_layers: set[str] = set()  # of which a matrix is packed
        # The modules of all other matrices, by their names in the model and in the files.
        self.named: dict[str, None] = {}
        self.dense_experts: dict[str, None] = {}

    @property
    def dense(self) -> list[str]:
        """The modules that stay dense, but for experts."""
        return [
            name
            for name in dict.fromkeys([*self.linear, *self.named])
            if name not in self.packed_layers
        ]

    @property
    def left(self) -> dict[str, str]:
        """The reasons why pruned layers stay dense, by name."""
        nowhere = "the files hold no matrix of its own for it"
        return {
            name: self.why_dense(name) or nowhere
            for name in sorted(self.wanted - self.packed_layers)
        }

    def why_dense(self, name: str) -> str | None:
        """Return why a pruned layer cannot be packed, whatever its weight; `None` if it can."""
        layer = self.layers[name]
        if isinstance(layer, Expert):
            if layer.owner in self.partly:
                return "it is an expert, and others of its block stay dense"
        elif not isinstance(layer.module, nn.Linear):
            kind = type(layer.module).__name__
            return f"it is a {kind}, and engines read nn.Linear alone in this format"
        return None

    def examine(self, stored: str, parameter: str, is_converted: bool, tensor: Tensor) -> None:
        """Record a tensor of the files: its codes if it is packed, else the name of its module."""
        start, _, kind = stored.rpartition(".")
        name = parameter.rpartition(".")[0]
        if (stack := self.stacks.get(parameter)) is not None:
            # The files hold a matrix for each expert only if transformers stacks them as it loads;
            # the number is in the stored name alone, since the model has one parameter for all.
            expert = _EXPERT.search(start) if is_converted else None  # else one tensor for all
            owner = start if expert is None else start[: expert.start()]
            name = "" if expert is None else f"{stack.owner}.{expert[1]}.{stack.stack}"
            if name not in self.wanted or self.why_dense(name) is not None:
                self.dense_experts |= dict.fromkeys((stack.owner, owner))
                return
        elif is_converted or name not in self.wanted or self.why_dense(name) is not None:
            # Engines expect codes in every linear module that is not listed as dense, so each one
            # that stays dense has to be listed, by its name in the files and by that in the model.
            if kind == "weight" and tensor.ndim == 2 and name not in self.tables:
                self.named |= dict.fromkeys((name, start))
            return
        if kind == "weight" and tensor.ndim == 2:
            self.packed_layers.add(name)
            self._find_codes(start if stack else name, name, stored, tensor)

    def _find_codes(self, name: str, layer: str, stored: str, tensor: Tensor) -> None:
        """Record a matrix to pack, with the reason if it cannot be packed without loss."""
        shape = (tensor.shape[0], tensor.shape[1])
        scales = scale_type(tensor.dtype)
        grid = partial(_grid, group_size=self.group_size, columns=shape[1], scales=scales)
        parameters = _of_matrix(self.known.get(layer), tensor, grid(self.bits))
        if parameters is not None:
            self.chosen[name] = parameters
        # The bits only grow, and one width holds for the whole checkpoint: 4-bit codes are also
        # 8-bit codes with the same scale, so that layers seen earlier still fit after a later one
        # widened it.
        while (off := _off(tensor, grid(self.bits), parameters)) and self.bits < _BITS[-1]:
            self.bits = _BITS[-1]
        if off:
            # Products that were rounded to bfloat16 are off the grid in a wider dtype.
            wider = tensor.itemsize > 2 and torch.equal(tensor.bfloat16().to(tensor.dtype), tensor)
            rounded = (
                f"; it was pruned as bfloat16 and is stored as {tensor.dtype}: leave out `dtype`"
            )
            self.misfits[name] = off + rounded * wider
        self.packed.append(LayerChoice(name, stored, shape, tensor.dtype))


def write_compressed(source: Checkpoint, directory: Path, chosen: Compressed) -> Iterator[str]:
    """Write the checkpoint into an empty directory, yielding layers' names as they go."""

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        grid = chosen.grid(layer.shape, layer.dtype)
        codes, scales = decompose(grid, tensor, chosen.known.get(layer.name))
        scales = scales.to(tensor.dtype)
        stored = store(codes, scales, chosen.integers.bits)
        start = layer.tensor.removesuffix("weight")
        return {f"{start}{name}": each for name, each in stored.items()}

    settings = chosen.integers.settings()
    yield from write_converted(source, directory, chosen.layers, convert, settings)


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
        else:
            start = layer.tensor.removesuffix("weight")
            stored = {key: written[f"{start}{key}"] for key in TENSORS}
            codes, scales = read(stored, chosen.integers.bits)
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


_MODULE = "compressed_tensors"  # which transformers loads the export with
_WINDOWS, _LENGTH = 2, 32
_ADVICE = "Leave layers dense with --skip, or take another --format. Please report this."


def load_with_transformers(source: Checkpoint, directory: Path, chosen: Compressed) -> str:
    """Load an export with transformers, and return a sentence on the result.

    Its logits on random tokens are compared with those of the source. The sentence gives the reason
    if nothing is loaded: the package that reads the format is missing, or loading fails and some
    experts stay dense.

    Raises:
        ParityError: transformers cannot load the export otherwise, does not find all weights in it,
            or computes other logits.
    """
    if importlib.util.find_spec(_MODULE) is None:
        return f"transformers was not tried here: the package {NAME} is not installed."
    # compressed-tensors shows bars that no argument silences.
    with redirect_stderr(StringIO()):
        try:
            loaded: Any = model_class(source.pretrained_config()).from_pretrained(
                directory, dtype="auto", output_loading_info=True
            )
        # A missing package is no fault of the export, so it comes before the general case.
        except ImportError as error:
            return f"transformers was not tried here: {first_line(error)}"
        except Exception as error:  # of any type, from the code of the format
            if chosen.integers.dense_experts:  # seen in transformers 5.23
                return (
                    "transformers cannot load it: of this format, it reads experts that are "
                    "packed, and some stay dense."
                )
            raise ParityError(
                f"transformers cannot load what was written: {first_line(error)}. {_ADVICE}"
            ) from error
        outcome = _compared(source, *loaded)
    return f"transformers loaded it here, with the package {NAME} and {outcome}."


def _compared(source: Checkpoint, model: PreTrainedModel, loading: Any) -> str:
    """Return how a loaded export compares with its source; raise a `ParityError` if it differs."""
    missing = required(type(model), loading["missing_keys"])
    names = sorted({*missing, *loading["unexpected_keys"]})
    # Names come before logits: with a missing weight, transformers computes with a random one, and
    # the logits would only show that something differs.
    if names or loading["mismatched_keys"]:
        wrong = ", ".join(names[:5]) or "other shapes"
        raise ParityError(
            f"transformers does not find the weights of {type(model).__name__} in what was "
            f"written: {wrong}. {_ADVICE}"
        )
    if not predicts_tokens(model):
        return "all its weights"
    vocabulary = model.config.get_text_config().vocab_size
    length = min(_LENGTH, longest_sequence(model.config) or _LENGTH)
    # Random tokens need no tokenizer, which a checkpoint may lack.
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(vocabulary, (_WINDOWS, length), generator=generator)
    text = compare_text(source.load(), model, windows, origin="random tokens")
    if failures := text_failures(text):
        raise ParityError(f"transformers computes otherwise: {'; '.join(failures)}. {_ADVICE}")
    return "the same logits" + ("" if text.bit_equal else f", but for {text.max_difference:.1e}")


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


def _grid(bits: int, group_size: int, columns: int, scales: ScaleType) -> Grid:
    codebook = tuple(range(-8, 8)) if bits == 4 else tuple(range(-128, 128))
    size = columns if group_size < 0 else group_size
    return Grid(bits, size, codebook, scales, f"int{bits}-g{size}")


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
