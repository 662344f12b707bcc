"""The embedded text: the source of the standard library of the Python that runs this."""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation", "test"]


def standard_library(split: Split) -> Iterator[str]:
    """The source files of one split, sorted by path.

    The SHA-256 of a file's path in the library decides its split, so that it is the same on every
    machine: 1 in 16 files is for testing, 1 in 16 for validation, the rest for training and
    calibration. Files that are empty or not UTF-8 are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts or "dist-packages" in relative.parts:
            continue
        if _split_of(relative.as_posix()) != split:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield text


def _split_of(relative: str) -> Split:
    bucket = hashlib.sha256(relative.encode()).digest()[0] % 16
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"
