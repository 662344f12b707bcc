"""How products are computed: their precision, and ranges of rows and columns in turn."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from mrp_lightning.environment import is_out_of_memory
from mrp_lightning.upstream.torch_names import (
    float32_precision,
    has_matrix_units,
    set_float32_precision,
)

Setting = tuple[str, str]
"""Backend and operation whose float32 precision can be set: none (inherited), ieee, tf32, bf16."""

_MATMULS: tuple[Setting, ...] = (("cuda", "matmul"), ("mkldnn", "matmul"))
_PARENTS: dict[Setting, Setting] = {
    ("cuda", "matmul"): ("cuda", "all"),
    ("mkldnn", "matmul"): ("mkldnn", "all"),
    ("cuda", "all"): ("generic", "all"),
    ("mkldnn", "all"): ("generic", "all"),
}


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Compute float32 products in float32: no autocast, no TF32, no bfloat16.

    `torch.set_float32_matmul_precision("high")`, which Lightning recommends for training, rounds
    the factors to 10 bits and less. A Hessian with a condition number of 1e4 does not survive that.
    Afterwards all settings are as they were; those that were inherited still are.
    """
    narrowed = [
        setting for setting in _MATMULS if float32_precision(setting) not in ("none", "ieee")
    ]
    before = {setting: _own(setting) for setting in narrowed}
    try:
        for setting in narrowed:
            set_float32_precision(setting, "ieee")
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for setting, precision in before.items():
            set_float32_precision(setting, precision)


def has_bfloat16_units(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 numbers several times as fast as float32 numbers."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return has_matrix_units()


@contextmanager
def bfloat16_factors() -> Iterator[None]:
    """Let a CPU multiply float32 numbers that are all bfloat16 numbers, too, as such.

    Their products are exact in float32, in which they are summed: nothing is lost, and processors
    with units for it take a third of the time.
    """
    setting = ("mkldnn", "matmul")
    before = _own(setting)
    try:
        set_float32_precision(setting, "bf16")
        yield
    finally:
        set_float32_precision(setting, before)


def _own(setting: Setting) -> str:
    """The value of a setting itself, "none" if it inherits.

    PyTorch only tells what is in force, so this changes the parent for a moment and sees whether
    the setting follows.
    """
    in_force = float32_precision(setting)
    if setting not in _PARENTS:
        return in_force
    parent = _PARENTS[setting]
    before, other = _own(parent), "tf32" if in_force == "ieee" else "ieee"
    set_float32_precision(parent, other)
    try:
        return "none" if float32_precision(setting) == other else in_force
    finally:
        set_float32_precision(parent, before)


log = logging.getLogger(__name__)

ELEMENTS = 2**26
"""Elements of the temporaries of one solve; more rows than that are solved in turn."""

Found = TypeVar("Found")


def split_range(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of consecutive ranges of `width`, the last one shorter where need be."""
    for first in range(start, stop, width):
        yield first, min(first + width, stop)


def by_rows(work: Callable[[slice], Found], rows: int, columns: int) -> list[Found]:
    """Work on ranges of the rows of a matrix, as many at a time as memory allows.

    Where there is not enough memory for a range, `work` is called again with half of it, so it has
    to go on from whatever it left behind. Returns what it returned for each range; what a single
    row has no memory for is raised.
    """
    found = []
    start, most = 0, max(1, ELEMENTS // max(1, columns))
    while start < rows:
        stop = min(start + most, rows)
        try:
            found.append(work(slice(start, stop)))
            start = stop
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error) or stop - start == 1:
                raise
            most = (stop - start) // 2
            log.warning("No memory for %d rows at a time: going on with %d.", stop - start, most)
    return found
