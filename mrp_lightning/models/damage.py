"""Which files of a checkpoint cannot be read, and why."""

import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mrp_lightning.errors import FormatError

_NO_PICKLE = "it is no whole pickle of tensors alone, and only such are read"


def damaged_files(directory: Path) -> dict[str, str]:
    """Open every file with weights in a model directory, and keep those that cannot be read.

    Of a safetensors file only the header is read. Pickles are read as tensors alone: nothing that
    they name is run.

    Args:
        directory: A Hugging Face model directory.

    Returns:
        The reasons with the next step, by file name.
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


def why_no_pickle(file: Path) -> str | None:
    """The reason why a file is no pickle of tensors and plain containers, or `None`.

    Nothing that the file names is run.
    """
    try:
        _tensors_of(file)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            return _NO_PICKLE
        return (
            f"it is a pickle that calls {found[1]}, which was not run. If you trust where it comes "
            "from, save the model there as safetensors"
        )
    except (EOFError, RuntimeError) as error:
        return str(error).splitlines()[0] if str(error) else "it is empty or cut off"
    except Exception:  # torch's own unpickler stumbles over what is no pickle
        return _NO_PICKLE
    return None


@contextmanager
def explained_checkpoint(path: Any) -> Iterator[None]:
    """Say of a Lightning checkpoint that is read inside why it cannot be.

    Args:
        path: Its path or URL; anything else is not looked at.

    Raises:
        FormatError: It is damaged, no such checkpoint, or holds more than may be unpickled.
    """
    try:
        yield
    except FormatError:
        raise
    except Exception as error:  # what is in the file decides; other errors are not of the file
        reason = None
        if isinstance(path, str | Path) and Path(path).is_file():
            reason = why_no_pickle(Path(path)) or why_no_checkpoint(_tensors_of(Path(path)))
        elif isinstance(error, pickle.UnpicklingError):
            reason = "it holds more than tensors and plain containers, and only these are read"
        if reason is None:
            raise
        raise FormatError(f"`ckpt_path`: {path} cannot be read: {reason}.") from error


def why_no_checkpoint(content: Any) -> str | None:
    """The reason why what was read from a file is no checkpoint of Lightning, or `None`."""
    keys = ("state_dict", "pytorch-lightning_version")
    if isinstance(content, dict) and all(key in content for key in keys):
        return None
    return f"it is no checkpoint of Lightning, which has {' and '.join(keys)}"


def _tensors_of(file: Path) -> Any:
    return torch.load(file, weights_only=True, mmap=zipfile.is_zipfile(file), map_location="cpu")
