"""Kernels and waits of what runs on the stand-in for a GPU, counted by operator.

Each operator that is no view counts as one kernel, though factorisations take several on a GPU.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import second_device
import torch
from second_device import Disguised
from torch import Tensor
from torch.utils._pytree import tree_leaves

FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "lift_fresh"}
"""Operators of memory and metadata alone."""
SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
CHECKED = {"linalg_cholesky", "linalg_solve", "linalg_inv", "linalg_solve_ex"}
"""Operators that look at an error code on the host."""


class Launches(Counter[str]):
    """Counts of `kernels`, `views`, `syncs` (the host waits) and `uploads` (it copies to it)."""

    def add(self, operator: Any, inputs: list[Tensor], outputs: list[Any]) -> None:
        """Count one operator with the tensors that it takes and returns."""
        name = operator._schema.name.removeprefix("aten::")
        on_device = [isinstance(tensor, Disguised) for tensor in inputs]
        back = [isinstance(output, Disguised) for output in outputs]
        if any(on_device) and outputs and not any(back):
            self["syncs"] += 1
        elif name in SIZED_BY_VALUES | CHECKED or is_bool_index(name, inputs):
            self["syncs"] += 1
            self["kernels"] += 1
        elif name in ("_to_copy", "copy_") and not all(on_device):
            self["uploads"] += 1
        elif name in FREE:
            pass
        elif any(r.alias_info and not r.alias_info.is_write for r in operator._schema.returns):
            self["views"] += 1
        else:
            self["kernels"] += 1


def is_bool_index(name: str, inputs: list[Tensor]) -> bool:
    """Return whether an index is a mask, whose number of elements is a value."""
    return name == "index" and any(tensor.dtype == torch.bool for tensor in inputs[1:])


@contextmanager
def counted() -> Iterator[Launches]:
    """Count all operators on the stand-in in this context."""
    launches, run = Launches(), second_device._run

    def count(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(operator, args, kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        launches.add(operator, inputs, tree_leaves(result))
        return result

    with mock.patch.object(second_device, "_run", count):
        yield launches
