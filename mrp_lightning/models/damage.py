"""Which files of a checkpoint cannot be read, and why."""

import pickle
import re
import zipfile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


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
        torch.load(file, weights_only=True, mmap=zipfile.is_zipfile(file), map_location="cpu")
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            return "it is no whole pickle of tensors alone, and only such are read"
        return (
            f"it is a pickle that calls {found[1]}, which was not run. If you trust where it comes "
            "from, save the model there as safetensors"
        )
    except (EOFError, RuntimeError) as error:
        return str(error).splitlines()[0] if str(error) else "it is empty or cut off"
    return None
