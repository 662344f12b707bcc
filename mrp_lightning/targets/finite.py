"""Whether all values of a model are finite: a NaN in one norm makes every result NaN."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mrp_lightning.errors import TargetError
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.left_out import PLAIN_DTYPES

_VALUES_AT_ONCE = 2**22


def refuse_not_finite(
    layers: Sequence[Layer], parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Refuse values that would make every result NaN, before the time of a run.

    The `parameters` are all of the model or block, by their names; those that are no plain tensors
    are not looked at, and those of the `layers` to prune only as these.

    Raises:
        TargetError: There are some; all are named.
    """
    tensors = {layer.name: layer.weight for layer in layers}
    of_layers = {id(layer.parameter) for layer in layers}
    for name, parameter in parameters:
        plain = type(parameter) is nn.Parameter and parameter.dtype in PLAIN_DTYPES
        if plain and id(parameter) not in of_layers:
            tensors[name] = parameter
    counts = {
        name: _count(tensor) for name, tensor in tensors.items() if tensor.device.type != "meta"
    }
    if wrong := {name: count for name, count in counts.items() if count}:
        inside = sum(layer.name in wrong for layer in layers)
        others = len(wrong) - inside
        parts = [f"{inside} layers to prune"] * bool(inside)
        where = " outside the layers to prune" if layers else ""
        parts += [f"{others} parameters{where}"] * bool(others)
        raise TargetError(not_finite(" and ".join(parts), wrong))


def _count(tensor: Tensor) -> int:
    """How many values are not finite, found in parts: to ask takes more memory than the values."""
    rows = torch.atleast_1d(tensor)
    most = max(1, _VALUES_AT_ONCE * len(rows) // max(1, rows.numel()))
    return sum(int((~torch.isfinite(part)).sum()) for part in rows.split(most))


def not_finite(what: str, counts: Mapping[str, int]) -> str:
    """The message on values that are not finite, by name how many, with the next step."""
    listed = "\n".join(f"  {name}: {count:,}" for name, count in counts.items())
    return (
        f"{what} hold NaN or Inf. The checkpoint is damaged, or its values were too large for its "
        f"dtype: get it again, or in bfloat16. NaN and Inf in each:\n{listed}"
    )
