"""Which layers of a checkpoint are packed, and why the others stay dense."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from export.checkpoint import Checkpoint, PackedName
from export.format import GROUP, broken_groups, positive_zeros, why_not_packable
from export.huggingface import skeleton
from export.layer import is_packable
from export.progress import Track, silently
from mrp_lightning.errors import FormatError, PatternError
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.walk.layers import is_conv1d
from mrp_lightning.walk.names import matches, require_matches
from mrp_lightning.walk.plan import make_plan

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class LayerChoice:
    """One linear layer of the checkpoint.

    Attributes:
        name: Of the module in the model.
        tensor: Name of its weight in the files.
        shape: (rows, columns).
        dtype: Of the stored weight.
        transposed: Whether the file holds (columns, rows).
        broken_groups: Groups of four columns with more than two non-zeros.
        negative_zeros: How many −0.0 it has.
        reason: Why it stays dense; `None` for a layer that is packed.
    """

    name: str
    tensor: str
    shape: tuple[int, int]
    dtype: torch.dtype
    transposed: bool
    broken_groups: int
    negative_zeros: int
    reason: str | None

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

    @property
    def packed_name(self) -> PackedName:
        """What the writer needs."""
        return PackedName(self.name, self.transposed)


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
    happen to be 2:4.

    Args:
        checkpoint: The source.
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
    model = skeleton(checkpoint.pretrained_config())
    modules = {name: module for name, module in model.named_modules() if is_packable(module)}
    require_matches("--skip", skip, list(modules))
    expected = _expected(checkpoint, model)
    tied = set(_tied(model, modules))

    choices = []
    tensors = track(checkpoint.tensors(), checkpoint.num_tensors, "checking 2:4")
    for tensor_name, tensor in tensors:
        name = _module_of(tensor_name, modules)
        if name is None:
            continue
        reason = None
        if name in tied:
            reason = "its weight is tied to another module's"
        elif any(matches(name, pattern) for pattern in skip):
            reason = "left out by `--skip`"
        transposed = is_conv1d(modules[name])
        choices.append(_look(name, tensor_name, tensor, transposed, reason, name in expected))
    _refuse(checkpoint, choices, expected, allow_partial)
    return choices


def _look(
    name: str, key: str, tensor: Tensor, transposed: bool, reason: str | None, expected: bool
) -> LayerChoice:
    weight = PackedName(name, transposed).matrix(tensor)
    broken = negative = 0
    if reason is None:
        reason = why_not_packable(weight.shape)
    if reason is None and weight.dtype not in _DTYPES:
        reason = f"its weight is {weight.dtype}"
    if reason is None:
        broken, negative = broken_groups(weight), positive_zeros(weight)[1]
        if broken:
            groups = weight.numel() // GROUP
            reason = f"not 2:4: {broken} of {groups} groups have more than two non-zeros"
            reason += "" if expected else "; it was not to be pruned"
    rows, columns = weight.shape
    return LayerChoice(
        name, key, (rows, columns), weight.dtype, transposed, broken, negative, reason
    )


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
    layers = [layer for of_block in plan.layers.values() for layer in of_block]
    return {layer.name for layer in (*layers, *plan.outside)}


def _module_of(tensor: str, modules: dict[str, nn.Module]) -> str | None:
    """The layer whose weight this is; files may lack the prefix of the base model, or have one."""
    name, _, kind = tensor.rpartition(".")
    if kind != "weight":
        return None
    if name in modules:
        return name
    near = [m for m in modules if m.endswith(f".{name}") or name.endswith(f".{m}")]
    return near[0] if len(near) == 1 else None


def _tied(model: nn.Module, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Layers whose weight another module holds, too: packed, they would no longer be tied."""
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for name, module in modules.items():
        if owners[id(module.weight)] > 1:
            yield name
