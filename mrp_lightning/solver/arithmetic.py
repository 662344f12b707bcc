"""The precision of matrix products, and loops over ranges of rows and columns."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

from mrp_lightning.devices import is_out_of_memory
from mrp_lightning.errors import NumericalWarning
from mrp_lightning.upstream.torch_names import (
    float32_precision,
    multiplies_bfloat16,
    set_float32_precision,
)

_MATMULS = (("cuda", "matmul"), ("mkldnn", "matmul"))
"""Backends and operations, whose float32 precision is none (inherited), ieee, tf32 or bf16."""


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Compute float32 products in float32: no autocast, no TF32, no bfloat16.

    `torch.set_float32_matmul_precision("high")`, which Lightning recommends for training, rounds
    the factors to 10 bits and less. A Hessian with a condition number of 1e4 does not survive that.
    """
    # A setting that is already full stays untouched, and so goes on inheriting.
    previous = {setting: float32_precision(setting) for setting in _MATMULS}
    previous = {key: value for key, value in previous.items() if value not in ("none", "ieee")}
    try:
        for setting in previous:
            set_float32_precision(setting, "ieee")
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for setting, precision in previous.items():
            set_float32_precision(setting, precision)


def has_bfloat16_units(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 at least twice as fast as float32.

    The device's instructions decide, never a measured time, so that a run on the same kind of
    device repeats its result to the bit.
    """
    if device.type == "cuda":
        # Emulated products are supported as well, but not faster, which is all that matters here.
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return multiplies_bfloat16()


_FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities of GPUs with half as many float64 as float32 units; others have 1/32."""


@cache
def warn_of_slow_float64(device: torch.device) -> None:
    """Warn, once for each GPU with few float64 units, of work in float64, up to 64 times slower."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) in _FAST_FLOAT64:
        return
    warnings.warn(
        f"float32 does not suffice for an ill-conditioned layer, and {device} "
        f"({torch.cuda.get_device_name(device)}) computes float64 up to 64 times more slowly: "
        "layers of 14,336 columns take minutes. More damping or more calibration text avoids it.",
        NumericalWarning,
        stacklevel=2,
    )


@contextmanager
def bfloat16_factors() -> Iterator[None]:
    """Let a CPU multiply float32 numbers as bfloat16, for numbers that bfloat16 represents exactly.

    Their products are exact in float32, in which they are summed, so the result is unchanged;
    processors with bfloat16 units take a third of the time.
    """
    previous = float32_precision(_MATMULS[1])
    try:
        set_float32_precision(_MATMULS[1], "bf16")
        yield
    finally:
        set_float32_precision(_MATMULS[1], previous)


log = logging.getLogger(__name__)

ELEMENTS = 2**26
"""The most elements of a temporary tensor in one solve; further rows are solved in turn."""

Result = TypeVar("Result")


def split_range(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of consecutive ranges of `width`; the last one may be shorter."""
    for first in range(start, stop, width):
        yield first, min(first + width, stop)


def by_rows(
    work: Callable[[slice], Result], rows: int, columns: int, elements: int | None = None
) -> list[Result]:
    """Call `work` on consecutive ranges of the rows of a matrix, and return its results.

    A range has at most `elements` elements, by default `ELEMENTS`, but at least one row. If memory
    does not suffice for it, `work` is called again on half of it, so it must be repeatable after an
    error. If memory does not suffice for one row, the error is raised.
    """
    results = []
    start, chunk_size = 0, max(1, (elements or ELEMENTS) // max(1, columns))
    while start < rows:
        stop = min(start + chunk_size, rows)
        try:
            results.append(work(slice(start, stop)))
            start = stop
        except (MemoryError, RuntimeError) as error:
            # Where a CPU has no memory, PyTorch raises a plain RuntimeError: only its text differs.
            if not is_out_of_memory(error) or stop - start == 1:
                raise
            # The smaller size holds for all later ranges, which would run out of memory likewise.
            chunk_size = (stop - start) // 2
            log.warning(
                "No memory for %d rows at a time: going on with %d.", stop - start, chunk_size
            )
    return results
