"""Which layers of a checkpoint are packed, and why the others stay dense."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from export.conversion.checkpoint import Checkpoint
from export.conversion.layer_choice import LayerChoice, form_of, judge, refuse_misfits
from export.conversion.model_names import ParameterNames, is_read_directly
from export.conversion.tracking import Track, silently
from export.packed.bitmask_format import BITMASK, count_kept
from export.packed.packed_format import PackedFormat
from export.packed.packed_linear import is_packable
from export.packed.sparse24_format import broken_groups, positive_zeros
from mrp_lightning.errors import FormatError
from mrp_lightning.json_files import read_json
from mrp_lightning.models.skeleton import build_without_weights
from mrp_lightning.records.report import NAME, PruningReport
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.targets.layers import Expert, Layer, is_conv1d, layers_of
from mrp_lightning.targets.names import matches, require_matches
from mrp_lightning.targets.plan import make_plan

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
    targets would prune. Other layers are packed where they happen to be so, but for a user's own
    module, of which only the report tells what its layers are. Pruned layers without a packed form
    (experts, convolutions) are listed.

    Args:
        checkpoint: The pruned checkpoint.
        form: The format to pack in; `None` lets the pattern decide: 2:4, or else bitmasks.
        skip: Name patterns (see `names.matches`) of layers that stay dense.
        allow_partial: Leave layers dense that should be pruned so and are not.
        refuse: Gives the reason why the format that will be written has no form for a layer.
        track: Shows the progress over the tensors.

    Raises:
        PatternError: Layers break the pattern, all listed; or no layer is left to pack.
        FormatError: The checkpoint is quantized already, or fits no model.
        TargetError: A pattern in `skip` matches nothing.
    """
    if quantization := checkpoint.config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise FormatError(
            f"{checkpoint.path} is already packed or quantized (`quant_method` {method!r}). Give "
            "the pruned checkpoint, with dense weights."
        )
    if checkpoint.config:
        choices, expected = _choose_by_model(checkpoint, skip, track)
    else:
        choices, expected = _choose_by_report(checkpoint, skip, track)
    form = form or form_of(choices, expected, allow_partial)
    choices = [judge(choice, form, choice.name in expected) for choice in choices]
    choices = [replace(layer, reason=layer.reason or refuse(layer)) for layer in choices]
    refuse_misfits(checkpoint, choices, expected, allow_partial)
    return choices


def _choose_by_model(
    checkpoint: Checkpoint, skip: Sequence[str], track: Track
) -> tuple[list[LayerChoice], set[str]]:
    """The layers of a transformers model, and which of them should be 2:4."""
    model = build_without_weights(checkpoint.pretrained_config())
    modules = {name: module for name, module in model.named_modules() if is_packable(module)}
    require_matches("--skip", skip, list(modules))
    expected = _expected(checkpoint, model)
    reasons = dict(_reasons(model, modules, skip))
    names = ParameterNames(model)

    choices, converted = [], set()
    for tensor_name, tensor in track(
        checkpoint.tensors(), checkpoint.num_tensors, "counting zeros"
    ):
        parameter, is_converted = names.of(tensor_name)
        name, _, kind = parameter.rpartition(".")
        if is_converted:
            converted.add(parameter)
        elif kind == "weight" and name in modules:
            choice = LayerChoice(name, tensor_name, (0, 0), tensor.dtype, is_conv1d(modules[name]))
            choices.append(_look(choice, tensor, reasons.get(name)))
    seen = {choice.name for choice in choices}
    return [*choices, *_without_tensor(model, expected - seen, converted)], expected


def _choose_by_report(
    checkpoint: Checkpoint, skip: Sequence[str], track: Track
) -> tuple[list[LayerChoice], set[str]]:
    """The layers of a user's own module, which its report lists; all of them should be 2:4."""
    shapes = {row.name: row.shape for row in PruningReport.load(checkpoint.path / NAME).pruned}
    require_matches("--skip", skip, list(shapes))
    # safetensors stores tied tensors once, and notes under which other names they are known.
    tied = {name for shard in checkpoint.shards for pair in shard.metadata.items() for name in pair}
    choices = {}
    for tensor_name, tensor in track(
        checkpoint.tensors(), checkpoint.num_tensors, "counting zeros"
    ):
        name, _, kind = tensor_name.rpartition(".")
        if kind != "weight" or name not in shapes:
            continue
        rows, columns = shapes[name]
        reason = "its weight is tied to another module's" if tensor_name in tied else None
        if any(matches(name, pattern) for pattern in skip):
            reason = "left out by `--skip`"
        if tensor.ndim != 2:
            reason = reason or BITMASK.why_not(tensor.shape)
            choice = LayerChoice(name, tensor_name, (rows, columns), tensor.dtype, reason=reason)
        else:
            transposed = _is_transposed(tensor, (rows, columns))
            choice = LayerChoice(name, tensor_name, (0, 0), tensor.dtype, transposed)
            choice = _look(choice, tensor, reason)
        choices[name] = choice
    for name in sorted(shapes.keys() - choices.keys()):
        rows, columns = shapes[name]
        reason = "the file holds no weight of its own for it"
        choices[name] = LayerChoice(name, "", (rows, columns), torch.float32, reason=reason)
    return list(choices.values()), set(shapes)


def _is_transposed(tensor: Tensor, shape: tuple[int, int]) -> bool:
    """Whether a `Conv1D` stores (columns, rows); of a square weight the zeros tell."""
    if shape[0] != shape[1]:
        return tensor.shape != shape
    return bool(broken_groups(tensor)) and not broken_groups(tensor.T)


def _look(choice: LayerChoice, tensor: Tensor, reason: str | None) -> LayerChoice:
    """Fill in what the weight itself says; `reason` is what is known without it."""
    if tensor.ndim != 2:
        return replace(choice, reason=reason or BITMASK.why_not(tensor.shape))
    weight = choice.matrix(tensor)
    if reason is None and weight.dtype not in _DTYPES:
        reason = f"its weight is {weight.dtype}"
    rows, columns = weight.shape
    choice = replace(choice, shape=(rows, columns), reason=reason)
    if reason is not None:
        return choice
    return replace(
        choice,
        kept=count_kept(weight),
        broken_groups=broken_groups(weight),
        negative_zeros=positive_zeros(weight)[1],
        not_finite=int((~weight.isfinite()).sum()),
    )


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
            reason = "the files hold no weight of its own for it"
        rows, columns = layer.weight.shape
        yield LayerChoice(name, "", (rows, columns), layer.weight.dtype, reason=reason)


def _expected(checkpoint: Checkpoint, model: nn.Module) -> set[str]:
    """Names of the layers that should be 2:4."""
    report = checkpoint.path / NAME
    if report.is_file():
        try:
            rows: list[dict[str, Any]] = read_json(report, "remove it")["layers"]
            return {str(row["name"]) for row in rows if row["skipped"] is None}
        except (KeyError, TypeError) as error:
            raise FormatError(
                f"{report} is no report of a pruning run. Repair or remove it."
            ) from error
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
            yield name, "left out by `--skip`"
        elif owners[id(module.weight)] > 1:  # packed, they would no longer be tied
            yield name, "its weight is tied to another module's"
        elif is_read_directly(model, name):
            yield name, "the module around it multiplies with its weight itself"
