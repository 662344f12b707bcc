"""Devices: the one that a command uses, names, warnings of slow ones, and their memory."""

import ctypes
import os
import platform
import re
import sys
from functools import cache
from pathlib import Path

import torch

from mrp_lightning.environment import progress_log
from mrp_lightning.errors import OptionError, OutOfMemoryError, first_line

_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")


def device_named(name: str | None) -> torch.device:
    """Return the device of `--device`: cpu, cuda or cuda:N; `None` is CUDA if available, else cpu.

    Raises:
        OptionError: The name is none of these, or this machine lacks the device.
    """
    if name is None:
        warn_of_unused_gpu()
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"`--device`: {str(error).splitlines()[0]}") from error
    # torch knows the names of devices that this package is not made for, such as meta or cpu:1.
    if str(device) != "cpu" and device.type != "cuda":
        raise OptionError(f"`--device {name}`: expected cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"`--device {name}`: this machine has {torch.cuda.device_count() or 'no'} CUDA "
            "device; try `cpu`."
        )
    return device


def machine(device: torch.device) -> str:
    """Return the name of the device, and the version of torch."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    return f"{name}; torch {torch.__version__}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


@cache
def warn_of_unused_gpu() -> None:
    """Warn once if torch is a CUDA build, but cannot use a GPU, so that the CPU does all the work.

    torch falls back silently if the driver is older than its CUDA, or if a container was started
    without its GPUs. `CUDA_VISIBLE_DEVICES` that hides all GPUs is a choice, and gives no warning.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None or hidden or torch.cuda.is_available():
        return
    try:
        # `is_available` hides the reason; an initialization that fails gives it.
        torch.cuda.init()
        reason = "it sees no device"
    except (AssertionError, RuntimeError) as error:
        reason = first_line(error)
    progress_log.warning(
        "THE CPU DOES ALL THE WORK: torch %s is a build for CUDA %s and can use no GPU (%s). If "
        "this machine has one, check `nvidia-smi`: CUDA 13 needs a driver 580 or newer, a "
        "container its `--gpus all`, and torch for an older driver comes from "
        "https://download.pytorch.org/whl/cu126. If it has none, set CUDA_VISIBLE_DEVICES=-1.",
        *(torch.__version__, torch.version.cuda, reason),
    )


@cache
def warn_of_slow_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Warn once of a model in 16 bits on a CPU of x86 without AVX-512, where float32 is faster."""
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    if is_narrow and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        progress_log.warning(
            "This CPU has no instructions for %s, which is several times as slow here as float32: "
            "load the model with `dtype: float32` (`--dtype float32`) if memory allows.",
            str(dtype).removeprefix("torch."),
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that a CPU or an accelerator is out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | OutOfMemoryError):
        return True
    # Only the text shows a lack of CPU memory, or of a library of CUDA: torch has no type for it.
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
