"""Which layers of a checkpoint are packed, and why the others stay dense."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from export.conversion.checkpoint import Checkpoint
from export.conversion.claims import Claim, layers_beside, read_claims, read_grid, refuse_unknown
from export.conversion.finite import require_finite
from export.conversion.layer_choice import LayerChoice, form_of, judge, refuse_misfits
from export.conversion.read_directly import is_read_directly
from export.conversion.tracking import Track, silently
from mrp_lightning.errors import FormatError
from mrp_lightning.models.checkpoint import names_in_model
from mrp_lightning.models.integrity import larger
from mrp_lightning.models.skeleton import build_without_weights
from mrp_lightning.records.report import NAME, PruningReport
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.targets.layers import Expert, Layer, is_conv1d, layers_of
from mrp_lightning.targets.names import matches, require_matches
from mrp_lightning.targets.plan import make_plan
from mrp_sparse.formats.bitmask import count_kept
from mrp_sparse.formats.bitmask4 import BITMASK4, GRID, count_bytes
from mrp_sparse.formats.packed_format import PackedFormat, why_no_matrix
from mrp_sparse.formats.sparse24 import broken_groups, positive_zeros
from mrp_sparse.layers.packed_linear import is_packable

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_SKIPPED = "left out by `--skip`"
_TIED = "its weight is tied to another module's"  # packed, they would no longer be tied
_NOWHERE = "the files hold no weight of its own for it"


def choose_layers(
    checkpoint: Checkpoint,
    *,
    form: PackedFormat | None = None,
    skip: Sequence[str] = (),
    allow_partial: bool = False,
    refuse: Callable[[LayerChoice], str | None] = lambda _: None,
    track: Track = silently,
) -> list[LayerChoice]:
    """Look at every linear layer, and refuse a checkpoint that is not pruned where it should be.

    It should be 2:4, or for bitmasks have enough zeros to get smaller, in the layers that its
    `pruning_report.json` lists as pruned; without a report, in all that a run with the default
    targets would prune. What the report claims of each of its layers, the pattern or the sparsity,
    has to be true, also of those that have no packed form. Other layers are packed where they
    happen to be so, but for a user's own module, of which only the report tells what its layers
    are. Pruned layers without a packed form (experts, convolutions) are listed.

    Without a `form` the checkpoint decides: four bits if its report says that it was put on such a
    grid, 2:4 if it is, or else bitmasks. `skip` holds name patterns (see `names.matches`) of layers
    that stay dense, `allow_partial` leaves those dense, too, that should be pruned and are not, and
    `refuse` gives the reason why what will be written has no form for a layer.

    Raises:
        PatternError: Layers break the pattern, or what the report claims, all listed; the report
            lists other layers than the model has; or no layer is left to pack.
        FormatError: The checkpoint is quantized already, holds NaN or Inf, fits no model, or is of
            a larger one than its configuration makes.
        TargetError: A pattern in `skip` matches nothing.
    """
    if quantization := checkpoint.config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise FormatError(
            f"{checkpoint.path} is already packed or quantized (`quant_method` {method!r}). Give "
            "the pruned checkpoint, with dense weights."
        )
    choose = _choose_by_model if checkpoint.config else _choose_by_report
    if form is None and _is_of_four_bits(checkpoint):
        form = BITMASK4
    choices, expected = choose(checkpoint, skip, track)
    form = form or form_of(choices, expected, allow_partial)
    if form is BITMASK4:
        choices = _coded(checkpoint, choices, track)
    choices = [judge(choice, form, choice.name in expected) for choice in choices]
    choices = [replace(layer, reason=layer.reason or refuse(layer)) for layer in choices]
    refuse_misfits(checkpoint, choices, expected, allow_partial)
    return choices


def _choose_by_model(
    checkpoint: Checkpoint, skip: Sequence[str], track: Track
) -> tuple[list[LayerChoice], set[str]]:
    """The layers of a transformers model, and which of them should be pruned."""
    model = build_without_weights(checkpoint.pretrained_config())
    modules = {name: module for name, module in model.named_modules() if is_packable(module)}
    require_matches("--skip", skip, list(modules))
    claims = read_claims(checkpoint.path)
    expected = _of_default_targets(model) if claims is None else set(claims)
    claims = claims or {}
    reasons = dict(_reasons(model, modules, skip))
    name_in_model = names_in_model(model, get_model_conversion_mapping(model))

    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    choices, converted, names = [], set(), []
    found = require_finite(
        track(checkpoint.tensors(), checkpoint.num_tensors, "counting zeros"),
        checkpoint.path,
        lambda stored: name_in_model(stored)[0] in parameters,
    )
    for stored, tensor in found:
        names.append(stored)
        parameter, is_converted = name_in_model(stored)
        name, _, kind = parameter.rpartition(".")
        if is_converted:
            converted.add(parameter)
        elif kind == "weight" and name in modules:
            transposed = is_conv1d(modules[name])
            choices.append(
                _look(name, stored, tensor, transposed, reasons.get(name), claims.get(name))
            )
    if problem := larger(checkpoint.path, model, names):
        raise FormatError(problem)
    unseen = expected - {choice.name for choice in choices}
    others = list(_without_tensor(model, unseen, converted))
    unknown = claims.keys() & unseen - {choice.name for choice in others}
    refuse_unknown(checkpoint.path, unknown - layers_beside(checkpoint.path))
    if others and claims:
        others = _held_against(claims, others, checkpoint.load())
    return [*choices, *others], expected


def _choose_by_report(
    checkpoint: Checkpoint, skip: Sequence[str], track: Track
) -> tuple[list[LayerChoice], set[str]]:
    """The layers of a user's own module, which its report lists; all of them should be pruned."""
    shapes = {row.name: row.shape for row in PruningReport.load(checkpoint.path / NAME).pruned}
    claims = read_claims(checkpoint.path) or {}
    require_matches("--skip", skip, list(shapes))
    # safetensors stores tied tensors once, and notes under which other names they are known.
    tied = {name for file in checkpoint.files for pair in file.metadata.items() for name in pair}
    choices = {}
    found = require_finite(
        track(checkpoint.tensors(), checkpoint.num_tensors, "counting zeros"),
        checkpoint.path,
        lambda stored: stored.endswith((".weight", ".bias")),  # more is not known of its tensors
    )
    for stored, tensor in found:
        name, _, kind = stored.rpartition(".")
        if kind != "weight" or name not in shapes:
            continue
        reason = _TIED if stored in tied else None
        if any(matches(name, pattern) for pattern in skip):
            reason = _SKIPPED
        rows, columns = shapes[name]
        transposed = tensor.ndim == 2 and _is_transposed(tensor, (rows, columns))
        choices[name] = _look(
            name, stored, tensor, transposed, reason, claims.get(name), (rows, columns)
        )
    for name in sorted(shapes.keys() - choices.keys()):
        rows, columns = shapes[name]
        choices[name] = LayerChoice(name, "", (rows, columns), torch.float32, reason=_NOWHERE)
    return list(choices.values()), set(shapes)


def _is_transposed(tensor: Tensor, shape: tuple[int, int]) -> bool:
    """Whether a `Conv1D` stores (columns, rows); of a square weight the zeros tell."""
    if shape[0] != shape[1]:
        return tensor.shape != shape
    return bool(broken_groups(tensor)) and not broken_groups(tensor.T)


def _look(
    name: str,
    stored: str,
    tensor: Tensor,
    transposed: bool,
    reason: str | None,
    claim: Claim | None,
    shape: tuple[int, int] = (0, 0),
) -> LayerChoice:
    """Look at the weight of a layer, unless there is a `reason` already why it stays dense.

    `shape` is that of the layer, for a weight that is no matrix.
    """
    choice = LayerChoice(name, stored, shape, tensor.dtype, transposed)
    if claim is not None and reason != _SKIPPED and tensor.ndim in (2, 4):
        # A convolution's columns are ordered as in `targets.layers.Conv2d`.
        matrix = tensor.permute(0, 2, 3, 1).flatten(1) if tensor.ndim == 4 else tensor
        choice = replace(choice, breach=claim.breach(choice.matrix(matrix)))
    if no_matrix := why_no_matrix(tensor.shape):
        return replace(choice, reason=reason or no_matrix)
    weight = choice.matrix(tensor)
    rows, columns = weight.shape
    if reason is None and weight.dtype not in _DTYPES:
        reason = f"its weight is {weight.dtype}"
    choice = replace(choice, shape=(rows, columns), reason=reason)
    if reason is not None:
        return choice
    return replace(
        choice,
        kept=count_kept(weight),
        broken_groups=broken_groups(weight),
        negative_zeros=positive_zeros(weight)[1],
    )


def _is_of_four_bits(checkpoint: Checkpoint) -> bool:
    """Whether the report says that the weights were put on a grid that four bits can tell."""
    grid = read_grid(checkpoint.path)
    return grid is not None and grid.bits <= GRID.bits and grid.group_size % GRID.group_size == 0


def _coded(
    checkpoint: Checkpoint, choices: Sequence[LayerChoice], track: Track
) -> list[LayerChoice]:
    """Find the codes of four bits of all layers that could be packed so."""
    waiting = {choice.tensor: choice for choice in choices if choice.reason is None}
    found = {}
    for stored, tensor in track(checkpoint.tensors(), checkpoint.num_tensors, "finding codes"):
        if (choice := waiting.get(stored)) is not None:
            weight = choice.matrix(tensor)
            found[stored] = replace(choice, code_bytes=count_bytes(weight), off_grid=_off(weight))
    return [found.get(choice.tensor, choice) for choice in choices]


def _off(weight: Tensor) -> str | None:
    """The reason why a weight has no codes of four bits, or `None`."""
    try:
        GRID.decompose(weight)
    except FormatError as error:
        return str(error)
    return None


def _without_tensor(
    model: PreTrainedModel, names: set[str], converted: set[str]
) -> Iterator[LayerChoice]:
    """Pruned layers whose weight is not a matrix of its own in the files."""
    layers = {layer.name: layer for n, m in model.named_modules() for layer in layers_of(n, m)}
    for name in sorted(names & layers.keys()):
        layer = layers[name]
        if isinstance(layer, Expert):
            reason = "it is an expert of a stack; the format packs linear layers"
        elif not is_packable(layer.module):
            reason = f"it is a {type(layer.module).__name__}; the format packs linear layers"
        elif f"{name}.weight" in converted:
            reason = "transformers computes its weight from other tensors while loading"
        else:
            reason = _NOWHERE
        rows, columns = layer.weight.shape
        yield LayerChoice(name, "", (rows, columns), layer.weight.dtype, reason=reason)


def _held_against(
    claims: Mapping[str, Claim], choices: Sequence[LayerChoice], model: nn.Module
) -> list[LayerChoice]:
    """Look at layers whose weights only the whole model has as matrices."""
    layers = {layer.name: layer for n, m in model.named_modules() for layer in layers_of(n, m)}
    return [
        replace(choice, breach=claims[choice.name].breach(layers[choice.name].weight))
        for choice in choices
    ]


def _of_default_targets(model: nn.Module) -> set[str]:
    """Names of the layers that a run with the default targets prunes."""
    plan = make_plan(model, Unstructured(0.5), allow_meta=True)
    layers: list[Layer] = [layer for of_block in plan.layers.values() for layer in of_block]
    return {layer.name for layer in (*layers, *plan.outside)}


def _reasons(
    model: nn.Module, modules: Mapping[str, nn.Module], skip: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """The layers that stay dense whatever their weights are, with the reason."""
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for name, module in modules.items():
        if any(matches(name, pattern) for pattern in skip):
            yield name, _SKIPPED
        elif owners[id(module.weight)] > 1:
            yield name, _TIED
        elif is_read_directly(model, name):
            yield name, "the module around it multiplies with its weight itself"
