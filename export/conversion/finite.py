"""Tensors of a checkpoint that hold NaN or Inf, in layers to pack and everywhere else."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch import Tensor

from mrp_lightning.errors import FormatError
from mrp_lightning.targets.finite import not_finite
from mrp_lightning.targets.left_out import PLAIN_DTYPES


def require_finite(
    tensors: Iterable[tuple[str, Tensor]], path: Path, is_parameter: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    """Pass the tensors of a checkpoint on, and refuse it at their end if they are not finite.

    Only parameters must be free of Inf, which some buffers hold by design, such as masks. Values of
    dtypes that torch cannot look into, such as packed ones of four bits, are not looked at.

    Raises:
        FormatError: All tensors with such values are named.
    """
    counts = {}
    for name, tensor in tensors:
        if tensor.dtype in PLAIN_DTYPES:
            wrong = ~tensor.isfinite() if is_parameter(name) else tensor.isnan()
            if count := int(wrong.sum()):
                counts[name] = count
        yield name, tensor
    if counts:
        raise FormatError(f"{path}: {not_finite(f'{len(counts)} tensors', counts)}")
