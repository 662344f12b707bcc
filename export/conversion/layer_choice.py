"""A linear layer of a checkpoint, and whether its zeros are worth a packed form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from export.conversion.checkpoint import Checkpoint
from export.conversion.claims import read_grid, read_structure
from mrp_lightning.errors import PatternError
from mrp_lightning.records.report import NAME
from mrp_lightning.targets.names import without_numbers
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4, GRID
from mrp_sparse.formats.packed_format import PackedFormat
from mrp_sparse.formats.sparse24 import GROUP, SPARSE24


@dataclass(frozen=True)
class LayerChoice:
    """One linear layer of the checkpoint, by the name of its module in the model.

    Attributes:
        tensor: Name of its weight in the files; empty where no tensor there is its weight.
        shape: Shape of the weight, (rows, columns).
        transposed: Whether the file holds (columns, rows), as for `Conv1D`.
        form: The format that it is packed in.
        kept: Number of weights that are not zero.
        code_bytes: Number of bytes that they take as codes of four bits.
        off_grid: The reason why they have no such codes, where that was looked for, or `None`.
        broken_groups: Number of groups of four columns with more than two non-zeros.
        breach: How it breaks what the report of its pruning claims; `None` if it does not.
        misfit: Whether it stays dense because of its zeros: they break the pattern or are too few.
        reason: The reason why it stays dense; `None` for a layer that is packed.
    """

    name: str
    tensor: str
    shape: tuple[int, int]
    dtype: torch.dtype
    transposed: bool = False
    form: PackedFormat = SPARSE24
    kept: int = 0
    code_bytes: int = 0
    off_grid: str | None = None
    broken_groups: int = 0
    negative_zeros: int = 0
    breach: str | None = None
    misfit: bool = False
    reason: str | None = None

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weight with its zeros."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def packed_bytes(self) -> int:
        """Bytes of all packed tensors, or of the dense weight where it stays so."""
        if self.reason is not None:
            return self.dense_bytes
        return self.form.num_bytes(self.shape, self.dtype, self.count)

    @property
    def count(self) -> int:
        """Number of elements of the packed `weight`, where the format counts them."""
        return self.code_bytes if self.form is BITMASK4 else self.kept

    def matrix(self, tensor: Tensor) -> Tensor:
        """The weight (rows, columns) of the tensor in the file."""
        return tensor.T.contiguous() if self.transposed else tensor


def form_of(
    choices: Sequence[LayerChoice], expected: set[str], allow_partial: bool
) -> PackedFormat:
    """The format that the pattern asks for: 2:4 where all is 2:4, or what may be partial."""
    asked = [choice for choice in choices if choice.name in expected and choice.reason is None]
    fits = [not choice.broken_groups for choice in asked]
    return SPARSE24 if all(fits) or (allow_partial and any(fits)) else BITMASK


def judge(choice: LayerChoice, form: PackedFormat, expected: bool) -> LayerChoice:
    """Say what keeps a layer from being packed in this format, if anything does."""
    choice = replace(choice, form=form)
    if choice.breach is not None:
        return replace(choice, misfit=True, reason=choice.breach)
    if reason := choice.reason or form.why_not(choice.shape):
        return replace(choice, reason=reason)
    size = choice.shape[0] * choice.shape[1]
    if form is SPARSE24 and choice.broken_groups:
        reason = f"not 2:4: {choice.broken_groups} of {size // GROUP} groups have more than two "
        reason += "non-zeros"
    elif form is BITMASK4 and choice.off_grid:
        reason = f"not of four bits: {choice.off_grid}"
    elif choice.packed_bytes >= choice.dense_bytes:
        reason = f"it would get no smaller: {choice.kept / max(size, 1):.0%} of it is not zero"
    else:
        return choice
    reason += "" if expected else "; it was not to be pruned"
    return replace(choice, misfit=True, reason=reason)


def refuse_misfits(
    checkpoint: Checkpoint, choices: list[LayerChoice], expected: set[str], allow_partial: bool
) -> None:
    """Refuse a checkpoint of which layers that should be pruned are not, or none can be packed."""
    breaches = [choice for choice in choices if choice.breach is not None]
    if breaches and not allow_partial:
        raise PatternError(
            f"{checkpoint.path} is not what its {NAME} says, in {len(breaches)} of {len(expected)} "
            "layers. Fetch or prune the model again. If the change is meant, leave these layers "
            f"out with `--skip`, or dense with `--allow-partial`:\n{_listed(breaches)}"
        )
    offending = [choice for choice in choices if choice.misfit and choice.name in expected]
    if offending and not allow_partial:
        many = f"{len(offending)} of {len(expected)} layers"
        if structure := read_structure(checkpoint.path):
            raise PatternError(
                f"{checkpoint.path} was made narrower by `structure: {structure}`: its layers are "
                "smaller and dense, and there are no zeros to pack. It is smaller and faster as it "
                "is, wherever models run. To pack it, too, prune it again with `pattern`."
            )
        if offending[0].form is SPARSE24:
            problem = f'is not 2:4 in {many}. Prune it with `pattern: "2:4"`'
        elif any(choice.off_grid for choice in offending):
            problem = f"is not of four bits in {many}. Write `--format bitmask`"
        else:
            problem = f"has too few zeros in {many}. {_of_bits(checkpoint)}Prune it"
        raise PatternError(
            f"{checkpoint.path} {problem}, leave these out with `--skip`, or pack what fits with "
            f"`--allow-partial`:\n{_listed(offending)}"
        )
    if all(choice.reason is not None for choice in choices):
        listed = _listed(choices)
        raise PatternError(f"{checkpoint.path} has no layer that can be packed:\n{listed}")


def _of_bits(checkpoint: Checkpoint) -> str:
    """Why a grid of few bits does not make a checkpoint smaller, if it is on one."""
    grid = read_grid(checkpoint.path)
    if grid is None:
        return ""
    return (
        f"It is on a grid of {grid.bits} bits in groups of {grid.group_size}; what is packed is 3 "
        f"or 4 bits, in groups of a multiple of {GRID.group_size}. `python -m export.to_gguf` writes 8 bits, "
        "too. "
    )


def _listed(choices: Sequence[LayerChoice]) -> str:
    reasons = {choice.name: choice.reason or "" for choice in choices}
    return "\n".join(f"  {layers}: {reason}" for layers, reason in alike(reasons))


def alike(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Layers with their reasons; those that differ in numbers only are one, with their count.

    Where numbers in the reasons differ, too, one layer stands for all.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((without_numbers(name), without_numbers(reason)), []).append(name)
    found = []
    for (pattern, _), names in groups.items():
        first = names[0]
        layers = first if len(names) == 1 else f"{pattern} ({len(names)} layers)"
        if len({reasons[name] for name in names}) > 1:
            layers += f", such as {first}"
        found.append((layers, reasons[first]))
    return found
