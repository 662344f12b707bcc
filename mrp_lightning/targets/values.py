"""The values of weights: those that are not finite, and zeros."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mrp_lightning.errors import TargetError, counted
from mrp_lightning.targets.blocks import listed, named_modules
from mrp_lightning.targets.layers import PLAIN_DTYPES, Layer, layers_of, why_not_plain

_VALUES_AT_ONCE = 2**22


def refuse_not_finite(
    layers: Sequence[Layer], parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Raise if weights hold NaN or Inf, which would make every result NaN.

    Args:
        layers: The layers to prune.
        parameters: All parameters of the model or block, by name; parameters that are no plain
            tensors, or on the meta device, are not checked.

    Raises:
        TargetError: Values are not finite. The message names all such weights.
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
    if bad_counts := {name: count for name, count in counts.items() if count}:
        inside = sum(layer.name in bad_counts for layer in layers)
        num_others = len(bad_counts) - inside
        parts = [f"{counted(inside, 'layer')} to prune"] * bool(inside)
        where = " outside the layers to prune" if layers else ""
        parts += [f"{counted(num_others, 'parameter')}{where}"] * bool(num_others)
        raise TargetError(not_finite(" and ".join(parts), bad_counts))


def _count(tensor: Tensor) -> int:
    """Count the values that are not finite, in chunks that bound the memory of `isfinite`."""
    rows = torch.atleast_1d(tensor)
    chunk_size = max(1, _VALUES_AT_ONCE * len(rows) // max(1, rows.numel()))
    return sum(int((~torch.isfinite(part)).sum()) for part in rows.split(chunk_size))


def not_finite(subject: str, counts: Mapping[str, int]) -> str:
    """Return the message on `counts` of values that are not finite, by name, with the next step."""
    lines = listed({name: f"{count:,}" for name, count in counts.items()})
    return (
        f"NaN or Inf in {subject}. The checkpoint is damaged, or its values were too large for "
        f"its dtype: get it again, or in bfloat16. NaN and Inf in each:\n{lines}"
    )


_LEAST_SPARSITY = 0.05
"""The least fraction of zeros in a pruned layer: trained weights are zero by chance only."""


def pruned_layers(model: nn.Module) -> list[Layer]:
    """Return the layers with at least 5% zeros, in the order of the module tree, each weight once.

    Layers of zeros alone are left out, since they were initialised so, and layers for which
    `why_not_plain` returns a reason.
    """
    first_layers: dict[object, Layer] = {}
    for name, module in named_modules(model):
        for layer in layers_of(name, module):
            if layer.key in first_layers or why_not_plain(layer) is not None:
                continue
            zeros = int((layer.weight == 0).sum())
            if _LEAST_SPARSITY * layer.weight.numel() <= zeros < layer.weight.numel():
                first_layers[layer.key] = layer
    return list(first_layers.values())
