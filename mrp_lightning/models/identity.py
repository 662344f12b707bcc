"""Whether a file of weights is still the one that it was, asked without reading it whole."""

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from mrp_lightning.errors import FormatError

_LENGTH = 8
"""Bytes in which a safetensors file says how long the header is that follows them."""


@dataclass(frozen=True)
class Identity:
    """What of a safetensors file changes when another file, or other weights, take its place.

    Attributes:
        size: Its bytes.
        modified: When it was last written to, in nanoseconds.
        inode: Its number in the file system, which a file that is moved over it does not have.
        header: The checksum of its header, which has the names, types and shapes of all tensors.
    """

    size: int
    modified: int
    inode: int
    header: str

    @classmethod
    def of(cls, file: Path) -> "Identity":
        """The identity of a file as it is now.

        Raises:
            OSError: It is gone, or no file any more.
        """
        if not file.is_file():  # a pipe would be waited for
            raise FileNotFoundError(errno.ENOENT, "no such file", str(file))
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            length = int.from_bytes(opened.read(_LENGTH), "little")
            header = hashlib.sha256(opened.read(min(length, status.st_size))).hexdigest()
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, header)

    def require(self, file: Path) -> None:
        """Refuse a file that is another one by now.

        Raises:
            FormatError: It was replaced, written to or deleted.
        """
        try:
            now = Identity.of(file)
        except OSError as error:
            change = f"cannot be read any more ({error.strerror})"
        else:
            if now == self:
                return
            change = "was replaced or written to"
        raise FormatError(
            f"{file} {change} since the model was loaded, and the blocks of two models must not be "
            "mixed. Put back the file that was there, and load the model again: what is in a "
            "journal by now stays, and the same run goes on with it."
        )
