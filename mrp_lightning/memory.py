"""Memory: what is available, the peak of a process, freed memory, and errors for a lack of it."""

import ctypes
import re
import sys
from pathlib import Path

import torch

from mrp_lightning.errors import OutOfMemoryError

_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that a CPU or an accelerator is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemoryError):
        return True
    # torch has no type of its own for a lack of CPU memory, nor for that of a library of CUDA: only
    # the text of the error shows it.
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _NO_MEMORY)


def return_freed_memory() -> None:
    """Return freed memory to the system, where the C library would keep it.

    glibc keeps what lies between pieces in use, for all sizes below 32 MB: after the column blocks
    of a wide layer, whose temporary tensors have as many sizes as blocks, that may be 1 GB.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def available_memory(device: torch.device) -> int | None:
    """Return the free bytes of a GPU, or the available ones of Linux; elsewhere `None`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    text = meminfo.read_text() if meminfo.is_file() else ""
    match = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 2**10 if match else None


def peak_rss() -> int | None:
    """Return the peak resident memory of this process in bytes; `None` on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: torch's on a GPU, else as `peak_rss`.

    On a GPU it counts from the last reset of torch's peak, which pruning a layer begins with.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss()
