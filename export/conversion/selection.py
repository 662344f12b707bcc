"""Choose the layers of a checkpoint to pack, and give the reasons why others stay dense.

The claims of a pruning report are checked on the weights before.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from export.conversion.checkpoint import Checkpoint, require_finite, tracked, weight_file
from mrp_lightning.errors import FormatError, PatternError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.models.integrity import surplus_blocks
from mrp_lightning.records.report import NAME, PruningReport
from mrp_lightning.solver.grid import Grid, grid_of_bits
from mrp_lightning.solver.patterns import SemiStructured, Unstructured
from mrp_lightning.storage.files import OTHER_WEIGHTS
from mrp_lightning.targets.blocks import LEAST_SPARSITY, listed, matches, require_matches
from mrp_lightning.targets.layers import Expert, Layer, is_conv1d, layers_of
from mrp_lightning.targets.plan import make_plan
from mrp_sparse.formats.bitmask import BITMASK, count_kept
from mrp_sparse.formats.bitmask4 import BITMASK4, count_bytes, decompose
from mrp_sparse.formats.packed_format import PackedFormat, why_no_matrix
from mrp_sparse.formats.sparse24 import GROUP, SPARSE24, broken_groups, positive_zeros
from mrp_sparse.packed_linear import CAST, DTYPES, is_in_source, is_packable

_FOUR_BITS = grid_of_bits(4)
"""The grid of `bitmask4`, on which weights of fewer bits, or of more of its groups, lie, too."""


@dataclass(frozen=True)
class Claim:
    """The claim of a report about a pruned layer."""

    sparsity: float  # the least fraction of zero weights; 0 if nothing is claimed
    pattern: SemiStructured | None  # of each group, if there is one

    def breach(self, weight: Tensor) -> str | None:
        """Return how a weight (rows, columns) violates the claim; `None` if it does not."""
        kept, pattern = weight != 0, self.pattern
        if pattern is not None:
            if not pattern.divides(kept.shape[1]):
                return f"its {kept.shape[1]} columns do not split into groups of {pattern.group}"
            counts = kept.unflatten(1, (-1, pattern.group)).sum(dim=2)
            broken = int((counts > pattern.kept).sum())
            return f"{broken} of {counts.numel()} groups are not {pattern}" if broken else None
        # A claim without a pattern is a count of the whole layer, since rows may have different
        # numbers of zeros. More zeros than claimed are no breach.
        size, count = kept.numel(), int(kept.sum())
        if count <= size - round(self.sparsity * size):
            return None
        return f"{1 - count / size:.2%} of it is zero, expected {self.sparsity:.2%}"


@dataclass(frozen=True)
class Claims:
    """The claims of a `pruning_report.json` about a checkpoint, which an export checks.

    Attributes:
        layers: The claims of the pruned layers by name; `None` without a report.
        structure: The kind of units that were removed as a whole, such as `neurons`, or `None`.
        grid: The grid of the weights, or `None`.
        grids: All grids, also that of the output head, which is none of the layers.
    """

    layers: dict[str, Claim] | None = None
    structure: str | None = None
    grid: Grid | None = None
    grids: Sequence[Grid] = ()

    @classmethod
    def read(cls, directory: Path) -> "Claims":
        """Return the claims of the report in a directory, none if there is no report.

        Raises:
            FormatError: The report is damaged, or of another version.
        """
        file = directory / NAME
        if not file.is_file():
            return cls()
        report = PruningReport.load(file)
        amount, structure = report.amount, report.config.get("structure")
        groups = amount.pattern if isinstance(amount.pattern, SemiStructured) else None
        is_narrow = structure is not None  # removed columns no longer exist, so there are no zeros
        layers = {
            row.name: Claim(0.0 if is_narrow else row.sparsity or 0.0, groups)
            for row in report.pruned
            if row.sparsity is not None or amount.for_head.grid is None  # a head has no sparsity
        }
        return cls(layers, structure, amount.grid, amount.grids)

    @property
    def engine_grid(self) -> Grid | None:
        """The grid of an engine on which the weights, or the head alone, were put, or `None`."""
        of_head = self.grids[0] if self.grids and not self.layers else None
        grid = self.grid or of_head
        return grid if grid is not None and grid.engine is not None else None


def is_read_directly(model: nn.Module, name: str) -> bool:
    """Return whether the parent module multiplies by a layer's weight, bypassing the layer.

    Mamba multiplies by `self.dt_proj.weight`, and torch's `MultiheadAttention` by
    `out_proj.weight`: such code needs the dense matrix.
    """
    parent = model.get_submodule(name.rpartition(".")[0])
    weight = r"self\.(\w+)\.weight\b"
    uses = rf"{weight}\s*@|@\s*{weight}|\blinear\([^()]*,\s*{weight}"
    return isinstance(parent, nn.MultiheadAttention) or is_in_source(model, name, uses)


@dataclass(frozen=True)
class LayerChoice:
    """A layer of the checkpoint: a linear one, or another kind that the report lists as pruned.

    Attributes:
        name: Name of its module in the model.
        tensor: Name of the weight in the files; empty if no tensor there is this weight.
        shape: (rows, columns).
        dtype: Dtype of the weight in the files, else of the model's parameter.
        transposed: Whether the file holds (columns, rows), as for `Conv1D`.
        form: The packed format.
        kept: Number of non-zero weights; 0, like the next counts, if the layer stays dense anyway.
        code_bytes: Bytes of the non-zero weights as codes of four bits, if these are wanted.
        off_grid: The reason why there are no such codes.
        broken_groups: Number of groups of four columns with more than two non-zeros.
        negative_zeros: Number of weights that are −0.0.
        breach: How the layer violates the claim of the report.
        misfit: Whether the layer stays dense because of a breach, or because its zeros or weights
            do not fit the format.
        reason: The reason why the layer stays dense; `None` for a packed layer.
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
        """Bytes of all packed tensors, or of the weight if it stays dense."""
        if self.reason is not None:
            return self.dense_bytes
        return self.form.num_bytes(self.shape, self.dtype, self.count)

    @property
    def count(self) -> int:
        """Elements of the packed `weight`: bytes of codes for `bitmask4`, else kept values."""
        return self.code_bytes if self.form is BITMASK4 else self.kept

    def matrix(self, tensor: Tensor) -> Tensor:
        """Return the weight (rows, columns) of the tensor in the file."""
        return tensor.T.contiguous() if self.transposed else tensor


def _form_of(choices: Sequence[LayerChoice], expected: set[str]) -> PackedFormat:
    """Return 2:4 if all layers are 2:4, else the bitmask."""
    # Only layers that were to be pruned decide. Others may fit 2:4 by chance, or not at all.
    packable = [choice for choice in choices if choice.reason is None]
    if expected:
        wanted = [choice for choice in packable if choice.name in expected]
        return BITMASK if any(choice.broken_groups for choice in wanted) else SPARSE24
    # The report of a later step, such as a cut of the vocabulary, names none: then most of those
    # with zeros decide.
    sparse = [x for x in packable if x.kept <= (1 - LEAST_SPARSITY) * x.shape[0] * x.shape[1]]
    return BITMASK if 2 * sum(x.broken_groups > 0 for x in sparse) > len(sparse) else SPARSE24


def _judged(choice: LayerChoice, form: PackedFormat, expected: bool) -> LayerChoice:
    """Return the choice, with the reason why it cannot be packed in this format, if any."""
    choice = replace(choice, form=form)
    # A breach comes before all other reasons: a layer that violates its claim is an error even if
    # no format could pack it.
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
    # The size is compared last, since the size of a packing that cannot exist means nothing.
    elif choice.packed_bytes >= choice.dense_bytes:
        reason = f"it would get no smaller: {choice.kept / max(size, 1):.0%} of it is not zero"
    else:
        return choice
    reason += "" if expected else "; it was not to be pruned"
    return replace(choice, misfit=True, reason=reason)


def _refuse_misfits(
    path: Path, claims: Claims, choices: list[LayerChoice], expected: set[str]
) -> None:
    """Raise a `PatternError` if layers that should be pruned are not, or none is left to pack."""
    # Breaches come first: if the report contradicts the files, no advice on formats is right.
    if breaches := [choice for choice in choices if choice.breach is not None]:
        raise PatternError(
            f"{path} is not what its {NAME} says, in {len(breaches)} of {len(expected)} "
            "layers. Fetch or prune the model again. If the change is meant, leave these layers "
            f"out with `--skip`:\n{_listed(breaches)}"
        )
    if offending := [choice for choice in choices if choice.misfit and choice.name in expected]:
        many = f"{len(offending)} of {len(expected)} layers"
        if claims.structure:
            raise PatternError(
                f"{path} was made narrower by `structure: {claims.structure}`: its layers are "
                "smaller and dense, and there are no zeros to pack. It is smaller and faster as it "
                "is, wherever models run. To pack it, too, prune it again with `pattern`."
            )
        if offending[0].form is SPARSE24:
            problem = f'is not 2:4 in {many}. Prune it with `pattern: "2:4"`'
        elif any(choice.off_grid for choice in offending):
            problem = f"is not of four bits in {many}. Write `--format bitmask`"
        else:
            problem = f"has too few zeros in {many}. "
            if (grid := claims.grid) is not None:
                problem += (
                    f"It is on a grid of {grid.bits} bits in groups of {grid.group_size}; what is "
                    "packed is `bits` of 3 or 4, in groups of a multiple of "
                    f"{_FOUR_BITS.group_size}. `--format compressed-tensors` and `python -m "
                    "export.to_gguf` store other grids, too. "
                )
            problem += "Prune it"
        raise PatternError(
            f"{path} {problem}, or leave these out with `--skip`:\n{_listed(offending)}"
        )
    if all(choice.reason is not None for choice in choices):
        raise PatternError(f"{path} has no layer that can be packed:\n{_listed(choices)}")


def _listed(choices: Sequence[LayerChoice]) -> str:
    return listed({choice.name: choice.reason or "" for choice in choices})


_SKIPPED = "left out by `--skip`"
_TIED = "its weight is tied to another module's"  # packing would untie them
_COUNTING = "counting zeros"
_NOWHERE = "the files hold no weight of its own for it"


def choose_layers(
    checkpoint: Checkpoint,
    *,
    form: PackedFormat | None = None,
    skip: Sequence[str] = (),
    refuse: Callable[[LayerChoice], str | None] = lambda _: None,
) -> list[LayerChoice]:
    """Return a choice for every linear layer, and check that the checkpoint is pruned as claimed.

    The layers that `pruning_report.json` lists as pruned must fit the format (be 2:4, or on its
    grid) and become smaller; without a report, these are the layers that a run with the default
    targets prunes. The pattern or sparsity that the report claims is checked, too. Other layers of
    a transformers model are packed if they happen to fit the format.

    Args:
        checkpoint: The pruned checkpoint.
        form: The packed format. `None` lets the checkpoint decide: four bits if its report has a
            grid of at most four in groups of a multiple of 64 columns, with scales of at most five
            significant bits, as `bits` gives; 2:4 if its layers are 2:4; else bitmasks.
        skip: Name patterns (see `matches`) of layers that stay dense.
        refuse: Returns why the writer cannot store a layer, `None` if it can.

    Raises:
        PatternError: Layers violate the pattern or the report's claims, and the message lists all;
            the report lists layers that the model lacks; or no layer is left to pack.
        FormatError: The checkpoint is quantized already, holds NaN or Inf, or does not fit the
            model of its configuration.
        TargetError: A pattern in `skip` matches nothing.
    """
    checkpoint.require_dense()
    claims = Claims.read(checkpoint.path)
    if form is None and _fits_four_bits(claims.grid):
        form = BITMASK4
    # Codes of four bits are costly to look for, so the search has to know whether they are wanted.
    # The choice between 2:4 and bitmasks needs the counts of all layers, so it comes after.
    search = _Search(checkpoint, claims.layers, skip, form is BITMASK4)
    choices, expected = search.in_model() if checkpoint.config else search.in_report()
    form = form or _form_of(choices, expected)
    choices = [_judged(choice, form, choice.name in expected) for choice in choices]
    # The writer is asked after the judgement, and its reasons are no misfits: pruning the layer
    # again would not help.
    choices = [replace(layer, reason=layer.reason or refuse(layer)) for layer in choices]
    _refuse_misfits(checkpoint.path, claims, choices, expected)
    return choices


def _fits_four_bits(grid: Grid | None) -> bool:
    """Return whether bits, groups and scales of a grid are those of codes of four bits."""
    return (
        grid is not None
        and grid.bits <= _FOUR_BITS.bits
        and grid.group_size % _FOUR_BITS.group_size == 0
        and grid.scales.significant <= _FOUR_BITS.scales.significant
    )


@dataclass(frozen=True)
class _Search:
    """The search for the linear layers of a checkpoint."""

    checkpoint: Checkpoint
    claims: Mapping[str, Claim] | None  # of its report by layer; `None` without a report
    skip: Sequence[str]
    finds_codes: bool  # of four bits, which takes time

    def in_model(self) -> tuple[list[LayerChoice], set[str]]:
        """Return the layers of a transformers model, and the names of those to be pruned."""
        checkpoint, claims = self.checkpoint, self.claims or {}
        model = build_without_weights(checkpoint.pretrained_config())
        modules = {name: module for name, module in model.named_modules() if is_packable(module)}
        require_matches("--skip", self.skip, list(modules))
        expected = _default_targets(model) if self.claims is None else set(claims)
        reasons = dict(self._reasons(model, modules))
        choices, converted, stored_names = [], set(), []
        for stored, parameter, is_converted, tensor in checkpoint.parameters(model, _COUNTING):
            stored_names.append(stored)
            name, _, kind = parameter.rpartition(".")
            # A converted parameter is no matrix of the files, so it can be neither packed nor
            # examined here. Its layer is examined below, in the loaded model.
            if is_converted:
                converted.add(parameter)
            elif kind == "weight" and name in modules:
                transposed = is_conv1d(modules[name])
                choice = LayerChoice(name, stored, (0, 0), tensor.dtype, transposed)
                choices.append(self._examine(choice, tensor, reasons.get(name)))
        # The files are compared with the model before the report is: with the wrong configuration,
        # layers would seem to be missing from the model.
        if problem := surplus_blocks(checkpoint.path, model, stored_names):
            raise FormatError(problem)
        unseen = expected - {choice.name for choice in choices}
        without_matrix = _without_matrix(model, unseen, converted)
        _refuse_unknown(checkpoint.path, claims.keys() & unseen - without_matrix.keys())
        return [*choices, *without_matrix.values()], expected

    def in_report(self) -> tuple[list[LayerChoice], set[str]]:
        """Return the layers of a user's own module, which its report lists: all are pruned."""
        report = PruningReport.load(self.checkpoint.path / NAME)
        shapes = {row.name: (row.shape[0], row.shape[1]) for row in report.pruned}
        require_matches("--skip", self.skip, list(shapes))
        # safetensors stores tied tensors once, with their other names in the metadata.
        files = self.checkpoint.files
        tied = {name for file in files for pair in file.metadata.items() for name in pair}
        choices = {
            name: LayerChoice(name, "", shape, torch.float32, reason=_NOWHERE)
            for name, shape in sorted(shapes.items())
        }
        tensors = tracked(self.checkpoint.tensors(), self.checkpoint.num_tensors, _COUNTING)
        # The other tensors of a module have no known role.
        for stored, tensor in require_finite(
            tensors, self.checkpoint.path, lambda key: key.endswith((".weight", ".bias"))
        ):
            name, _, kind = stored.rpartition(".")
            if kind != "weight" or name not in shapes:
                continue
            reason = _TIED if stored in tied else None
            if any(matches(name, pattern) for pattern in self.skip):
                reason = _SKIPPED
            transposed = tensor.ndim == 2 and _is_transposed(tensor, shapes[name])
            choice = LayerChoice(name, stored, shapes[name], tensor.dtype, transposed)
            choices[name] = self._examine(choice, tensor, reason)
        return list(choices.values()), set(shapes)

    def _reasons(
        self, model: nn.Module, modules: Mapping[str, nn.Module]
    ) -> Iterator[tuple[str, str]]:
        """Yield the layers that stay dense regardless of their weights, with the reason."""
        # Without `remove_duplicate=False`, each tied parameter would count once, under its first
        # name.
        owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        for name, module in modules.items():
            if any(matches(name, pattern) for pattern in self.skip):
                yield name, _SKIPPED
            elif owners[id(module.weight)] > 1:
                yield name, _TIED
            elif is_read_directly(model, name):
                yield name, "the module around it multiplies with its weight itself"
            elif self.finds_codes and is_in_source(model, name, CAST):
                yield name, "the module around it casts its inputs to its weight's dtype: to codes"

    def _examine(self, choice: LayerChoice, tensor: Tensor, reason: str | None) -> LayerChoice:
        """Return the choice with its counts, or with the reason why the layer stays dense.

        The report's claim is checked in either case, unless the user excluded the layer.
        """
        claim = (self.claims or {}).get(choice.name)
        if no_matrix := why_no_matrix(tensor.shape):
            return replace(choice, reason=reason or no_matrix)
        weight = choice.matrix(tensor)
        if claim is not None and reason != _SKIPPED:
            choice = replace(choice, breach=claim.breach(weight))
        if reason is None and weight.dtype not in DTYPES:
            reason = f"its weight is {weight.dtype}"
        choice = replace(choice, shape=(weight.shape[0], weight.shape[1]), reason=reason)
        if reason is not None:
            return choice
        return replace(
            choice,
            kept=count_kept(weight),
            broken_groups=broken_groups(weight),
            negative_zeros=positive_zeros(weight)[1],
            code_bytes=count_bytes(weight) if self.finds_codes else 0,
            off_grid=_why_off_grid(weight) if self.finds_codes else None,
        )


def _is_transposed(tensor: Tensor, shape: tuple[int, int]) -> bool:
    """Return whether a `Conv1D` stores (columns, rows); for square weights the zeros decide."""
    if shape[0] != shape[1]:
        return tensor.shape != shape
    return bool(broken_groups(tensor)) and not broken_groups(tensor.T)


def _why_off_grid(weight: Tensor) -> str | None:
    """Return why a weight has no codes of four bits, `None` if it has."""
    try:
        decompose(weight)
    except FormatError as error:
        return str(error)
    return None


def _without_matrix(
    model: PreTrainedModel, names: set[str], converted: set[str]
) -> dict[str, LayerChoice]:
    """Return choices for the named layers whose weight is not a separate matrix in the files."""
    choices = {}
    layers = [each for name, module in model.named_modules() for each in layers_of(name, module)]
    for layer in sorted(layers, key=lambda layer: layer.name):
        if layer.name not in names:
            continue
        if isinstance(layer, Expert):
            reason = "it is an expert of a stack; the format packs linear layers"
        elif not is_packable(layer.module):
            reason = f"it is a {type(layer.module).__name__}; the format packs linear layers"
        elif f"{layer.name}.weight" in converted:
            reason = "transformers computes its weight from other tensors while loading"
        else:
            reason = _NOWHERE
        shape = (layer.weight.shape[0], layer.weight.shape[1])
        choices[layer.name] = LayerChoice(layer.name, "", shape, layer.weight.dtype, reason=reason)
    return choices


def _default_targets(model: nn.Module) -> set[str]:
    """Return the names of the layers that a run with the default targets prunes."""
    plan = make_plan(model, Unstructured(0.5), allow_meta=True)
    layers: list[Layer] = [layer for of_block in plan.layers.values() for layer in of_block]
    return {layer.name for layer in (*layers, *plan.outside)}


def _refuse_unknown(directory: Path, unknown: Iterable[str]) -> None:
    """Raise a `PatternError` if a report lists pruned layers that the model does not have.

    Layers of a user's module around the model, whose weights are in a separate file, are allowed.
    """
    file = directory / OTHER_WEIGHTS
    if unknown and file.is_file():
        unknown = set(unknown) - {name.rpartition(".")[0] for name in weight_file(file).names}
    if names := sorted(unknown):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise PatternError(
            f"{directory}: {NAME} lists pruned layers that the model does not have: "
            f"{', '.join(names[:5])}{more}. It is of another model: fetch or prune this one again, "
            "or remove the report."
        )
