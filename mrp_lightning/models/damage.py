"""Read pickles of tensors alone, and explain errors of loading by the files that are damaged."""

import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mrp_lightning.devices import is_out_of_memory
from mrp_lightning.errors import FormatError, OptionError, TargetError
from mrp_lightning.models.checkpoint import directory_of

_NO_PICKLE = "it is no whole pickle of tensors alone, and only such are read"


def read_pickle(file: str | os.PathLike[str]) -> Any:
    """Load the tensors and plain containers in a file of `torch.save`, without running its code.

    All tensors are on the CPU, memory-mapped if the file is an archive.

    Raises:
        FormatError: The file is compressed, so that its memory-mapped bytes would not be weights.
            `torch.load` raises more, such as `UnpicklingError` for other objects.
    """
    # Only an archive can be mapped: its entries are stored, not compressed, so that their bytes in
    # the file are the weights.
    is_archive = zipfile.is_zipfile(file)
    if is_archive:
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise FormatError("it is compressed, and `torch.save` compresses nothing")
    return torch.load(file, weights_only=True, mmap=is_archive, map_location="cpu")


def why_no_pickle(file: Path) -> str | None:
    """Return why `read_pickle` refuses a file, `None` if it does not."""
    try:
        read_pickle(file)
    except pickle.UnpicklingError as error:
        called = re.search(r"GLOBAL ([\w.]+)", str(error))
        if called is None:
            return _NO_PICKLE
        return (
            f"it is a pickle that calls {called[1]}, which was not run. If you trust its source, "
            "save the model there as safetensors"
        )
    except (EOFError, FormatError, RuntimeError) as error:
        return str(error).splitlines()[0] if str(error) else "it is empty or cut off"
    except Exception:  # of any type: torch's unpickler does not check that a file is a pickle
        return _NO_PICKLE
    return None


def not_loaded(source: str, error: Exception) -> str:
    """Return the message for a source that transformers refuses, with its reason."""
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return f"`model`: {source} cannot be loaded. {reason}"


@contextmanager
def explained_damage(source: str, revision: str | None) -> Iterator[None]:
    """Replace unexpected errors of loading a model by one that names the damaged files, if any.

    Raises:
        FormatError: The model cannot be loaded.
    """
    try:
        yield
    except Exception as error:  # of any type: transformers does not check files
        # The files are examined only after an error, since reading all headers takes time, and
        # pickles have to be unpickled. Errors with a message of their own pass, as does a lack of
        # memory, which is no damage.
        is_ours = isinstance(error, OSError | ImportError | FormatError | OptionError | TargetError)
        if is_ours or is_out_of_memory(error):
            raise
        directory = directory_of(source, revision)
        damaged = {} if directory is None else damaged_files(directory)
        if not damaged:
            raise FormatError(not_loaded(source, error)) from error
        listed = "\n".join(f"  {file}: {reason}" for file, reason in damaged.items())
        raise FormatError(
            f"`model`: {len(damaged)} of the files with the weights of {source} cannot be read. "
            f"Fetch or write them again:\n{listed}"
        ) from error


def damaged_files(directory: Path) -> dict[str, str]:
    """Return why weight files in a directory cannot be read, by file name; empty if all can.

    Only the headers of safetensors files are read.
    """
    reasons = {}
    for file in sorted((*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin"))):
        reason = _why_no_safetensors(file) if file.suffix == ".safetensors" else why_no_pickle(file)
        if reason is not None:
            reasons[file.name] = reason
    return reasons


def _why_no_safetensors(file: Path) -> str | None:
    try:
        with safe_open(file, framework="pt"):
            return None
    except SafetensorError as error:
        size = file.stat().st_size
        return f"its {size:,} bytes are no whole safetensors file ({error})"


@contextmanager
def explained_checkpoint(path: Any, *, weights_only: bool = True) -> Iterator[None]:
    """Explain errors of reading a Lightning checkpoint, a path or URL, in this context.

    Args:
        path: The checkpoint.
        weights_only: Whether only tensors and plain containers are read; other objects explain an
            error only then.

    Raises:
        FormatError: The file is damaged, no Lightning checkpoint, or holds objects that may not be
            unpickled.
    """
    try:
        yield
    except FormatError:
        raise
    except Exception as error:  # only an unreadable file is explained; other errors pass
        reason = None
        if isinstance(path, str | Path) and Path(path).is_file():
            # A file that reads well here leaves `reason` empty: the error has another cause, and
            # passes. So it does with an archive that was read whole, other objects included.
            reason = why_no_pickle(Path(path))
            if reason is None:
                reason = why_no_checkpoint(read_pickle(path))
            elif not weights_only and zipfile.is_zipfile(path):
                reason = None
        elif isinstance(error, pickle.UnpicklingError):
            reason = "it holds more than tensors and plain containers, and only these are read"
        if reason is None:
            raise
        raise FormatError(f"`ckpt_path`: {path} cannot be read: {reason}.") from error


def why_no_checkpoint(content: Any) -> str | None:
    """Return why the content of a file is no Lightning checkpoint, `None` if it is one."""
    keys = ("state_dict", "pytorch-lightning_version")
    if isinstance(content, dict) and all(key in content for key in keys):
        return None
    return f"it is no checkpoint of Lightning, which has {' and '.join(keys)}"
