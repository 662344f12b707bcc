"""This machine: its cache directory, its name, and a lock between its processes."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

try:
    import fcntl
except ImportError:  # Windows: without a lock, two processes may write the same file
    fcntl = None  # type: ignore[assignment]


def cache_directory() -> Path:
    """Return the directory of compiled steps and kernel times; `XDG_CACHE_HOME` moves it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mrp-lightning"


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


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Wait until no other process holds the lock on `file`, and hold it inside the block.

    The file is created empty if it is missing, in a directory that exists, and stays. The kernel
    releases the lock of a process that dies. On Windows nothing is locked.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
