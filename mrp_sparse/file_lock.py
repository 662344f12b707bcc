"""A lock between processes, for what is compiled once on a machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two processes may compile the same thing, each whole
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Wait until no other process holds the lock on `file`, and hold it inside the block.

    The kernel releases the lock of a process that dies. The file stays, empty.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
