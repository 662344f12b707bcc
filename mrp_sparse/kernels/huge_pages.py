"""Memory for packed weights that Linux may back by huge pages.

A product of few tokens reads a weight once, a little of each of its rows at a time. In pages of
4 KiB a third of its time goes into translating addresses: 2.2 ms of an 8192 × 2048 bitmask with
eight tokens on one core of a Zen 4, and 1.7 ms in pages of 2 MiB. By default Linux gives these only
to memory for which a program asks (`transparent_hugepage/enabled` is `madvise`).
"""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

SIZE = 2**21
"""Bytes of a huge page on x86, and on Arm with pages of 4 KiB."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor, in huge pages if it is on the CPU and has room for one."""
    count = math.prod(shape)
    num_bytes = count * dtype.itemsize
    if device.type != "cpu" or num_bytes < SIZE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    # Memory of this process alone: of shared memory Linux makes huge pages under other settings.
    # Room beyond the tensor, which lets it begin at a whole page, is never touched.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, num_bytes + SIZE, flags=flags)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % SIZE
    # A kernel without huge pages refuses the advice, and the pages stay small. The last page of the
    # tensor stays small as well, or else it would take up to 2 MiB more than the tensor.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, begin, num_bytes // SIZE * SIZE)
    # The tensor keeps the memory, which is returned with the last view of it.
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(*shape)
