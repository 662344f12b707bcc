"""Which layers of a checkpoint are packed, and why the others stay dense."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from export.conversion.checkpoint import Checkpoint
from export.conversion.model_names import ParameterNames, is_read_directly
from export.conversion.tracking import Track, silently
from export.packed.format import GROUP, broken_groups, positive_zeros, why_not_packable
from export.packed.linear import is_packable
from mrp_lightning.errors import FormatError, PatternError
from mrp_lightning.models.skeleton import build_without_weights
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.targets.layers import Expert, Layer, is_conv1d, layers_of
from mrp_lightning.targets.names import matches, require_matches
from mrp_lightning.targets.plan import make_plan

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class LayerChoice:
    """One linear layer of the checkpoint.

    Attributes:
        name: Name of the module in the model.
        tensor: Name of its weight in the files; empty where no tensor there is its weight.
        shape: Shape of the weight, (rows, columns).
        dtype: Dtype of the stored weight.
        transposed: Whether the file holds (columns, rows), as for `Conv1D`.
        broken_groups: Number of groups of four columns with more than two non-zeros.
        negative_zeros: Number of −0.0 in the weight.
        not_finite: Number of NaN and ±inf in the weight.
        reason: The reason why it stays dense; `None` for a layer that is packed.
    """

    name: str
    tensor: str
    shape: tuple[int, int]
    dtype: torch.dtype
    transposed: bool = False
    broken_groups: int = 0
    negative_zeros: int = 0
    not_finite: int = 0
    reason: str | None = None

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weight with its zeros."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weight and its meta, or of the dense weight where it stays so."""
        if self.reason is not None:
            return self.dense_bytes
        return self.dense_bytes // 2 + self.shape[0] * self.shape[1] // 8

    def matrix(self, tensor: Tensor) -> Tensor:
        """The weight (rows, columns) of the tensor in the file."""
        return tensor.T.contiguous() if self.transposed else tensor


def choose_layers(
    checkpoint: Checkpoint,
    *,
    skip: Sequence[str] = (),
    allow_partial: bool = False,
    track: Track = silently,
) -> list[LayerChoice]:
    """Look at every linear layer, and refuse a checkpoint that is not 2:4 where it should be.

    It should be 2:4 in the layers that its `pruning_report.json` lists as pruned; without a report,
    in all that a run with the default targets would prune. Other layers are packed where they
    happen to be 2:4. Pruned layers without a packed form (experts, convolutions) are listed.

    Args:
        checkpoint: The pruned checkpoint.
        skip: Name patterns (see `names.matches`) of layers that stay dense.
        allow_partial: Leave layers dense that should be 2:4 and are not.
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
    model = build_without_weights(checkpoint.pretrained_config())
    modules = {name: module for name, module in model.named_modules() if is_packable(module)}
    require_matches("--skip", skip, list(modules))
    expected = _expected(checkpoint, model)
    reasons = dict(_reasons(model, modules, skip))
    names = ParameterNames(model)

    choices, converted = [], set()
    for tensor_name, tensor in track(checkpoint.tensors(), checkpoint.num_tensors, "checking 2:4"):
        parameter, is_converted = names.of(tensor_name)
        name, _, kind = parameter.rpartition(".")
        if is_converted:
            converted.add(parameter)
        elif kind == "weight" and name in modules:
            choice = LayerChoice(name, tensor_name, (0, 0), tensor.dtype, is_conv1d(modules[name]))
            choices.append(_look(choice, tensor, reasons.get(name), name in expected))
    seen = {choice.name for choice in choices}
    choices += _without_tensor(model, expected - seen, converted)
    _refuse(checkpoint, choices, expected, allow_partial)
    return choices


def _look(choice: LayerChoice, tensor: Tensor, reason: str | None, expected: bool) -> LayerChoice:
    """Fill in what the weight itself says; `reason` is what is known without it."""
    weight = choice.matrix(tensor)
    reason = reason or why_not_packable(weight.shape)
    if reason is None and weight.dtype not in _DTYPES:
        reason = f"its weight is {weight.dtype}"
    rows, columns = weight.shape
    choice = replace(choice, shape=(rows, columns), reason=reason)
    if reason is not None:
        return choice
    broken = broken_groups(weight)
    if broken:
        groups = weight.numel() // GROUP
        reason = f"not 2:4: {broken} of {groups} groups have more than two non-zeros"
        reason += "" if expected else "; it was not to be pruned"
    return replace(
        choice,
        broken_groups=broken,
        negative_zeros=positive_zeros(weight)[1],
        not_finite=int((~weight.isfinite()).sum()),
        reason=reason,
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


def _refuse(
    checkpoint: Checkpoint, choices: list[LayerChoice], expected: set[str], allow_partial: bool
) -> None:
    offending = [c for c in choices if c.broken_groups and c.name in expected]
    if offending and not allow_partial:
        listed = "\n".join(f"  {choice.name}: {choice.reason}" for choice in offending)
        raise PatternError(
            f"{checkpoint.path} is not 2:4 in {len(offending)} of {len(expected)} layers. Prune it "
            'with `pattern: "2:4"`, leave these out with `--skip`, or pack what fits with '
            f"`--allow-partial`:\n{listed}"
        )
    if all(choice.reason is not None for choice in choices):
        listed = "\n".join(f"  {choice.name}: {choice.reason}" for choice in choices)
        raise PatternError(f"{checkpoint.path} has no layer that can be packed:\n{listed}")


def _expected(checkpoint: Checkpoint, model: nn.Module) -> set[str]:
    """Names of the layers that should be 2:4."""
    report = checkpoint.path / "pruning_report.json"
    if report.is_file():
        try:
            rows: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["layers"]
            return {row["name"] for row in rows if row["skipped"] is None}
        except (ValueError, KeyError, TypeError) as error:
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
