"""Writing a model to disk: beside the target, and moved into place when it is whole."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mrp_lightning.errors import OptionError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_output_dir(
    path: str | os.PathLike[str], *, overwrite: bool = False, argument: str = "save_dir"
) -> None:
    """Refuse an output directory that holds something, or that cannot be made.

    Args:
        path: The directory that will be written.
        overwrite: Whether what is there may be replaced.
        argument: What the user calls this path, for the message.

    Raises:
        FileExistsError: It is a file, or a directory that is not empty and `overwrite` is false.
        PermissionError: It cannot be written.
    """
    path = Path(path)
    if path.is_file():
        raise FileExistsError(f"`{argument}`: expected a directory, but {path} is a file.")
    if not overwrite and path.is_dir() and any(path.iterdir()):
        allow = "--overwrite" if argument.startswith("-") else "overwrite: true"
        raise FileExistsError(
            f"`{argument}`: {path} exists and is not empty. "
            f"Name another directory, or allow it to be replaced with `{allow}`."
        )
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise PermissionError(f"`{argument}`: {path} cannot be made, {parent} is not writable.")


@contextmanager
def save_directory(
    path: str | os.PathLike[str], *, overwrite: bool = False, argument: str = "save_dir"
) -> Iterator[Path]:
    """Give a temporary directory beside `path` that becomes `path` when the block ends well.

    When the block raises, the temporary directory is removed and `path` is as it was.

    Raises:
        FileExistsError: See `check_output_dir`.
    """
    path = Path(path).absolute()
    check_output_dir(path, overwrite=overwrite, argument=argument)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    try:
        yield staging
        check_output_dir(path, overwrite=overwrite, argument=argument)
        _make_readable(staging)
        _move_into_place(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def save_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in one step: whoever reads it meanwhile sees the old or the new content.

    Args:
        path: The file; its directory is made.
        text: The content.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _make_readable(directory: Path) -> None:
    """Undo that temporary directories, and the files of safetensors, are private."""
    umask = os.umask(0)
    os.umask(umask)
    directory.chmod(0o777 & ~umask)
    for file in directory.rglob("*"):
        file.chmod((0o777 if file.is_dir() else 0o666) & ~umask)


def _move_into_place(staging: Path, path: Path) -> None:
    """Rename `staging` to `path`; what stood there is deleted only after the rename."""
    if not path.exists():
        staging.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    path.rename(old / path.name)
    try:
        staging.rename(path)
    except BaseException:
        (old / path.name).rename(path)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def save_pretrained(
    model: "PreTrainedModel",
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    card: str | None = None,
) -> None:
    """Write a Hugging Face directory that `from_pretrained` loads.

    Args:
        model: The model; it is not changed.
        directory: An existing directory, as `save_directory` gives it.
        tokenizer: Saved beside the model, with its chat template.
        dtype: What floating weights are stored as. `None` is the dtype of the checkpoint that the
            model came from (`model.config.dtype`): a model that was calibrated in another precision
            is stored as it was published.
        card: Text of the model card, `README.md`.
    """
    stored = model.config.dtype
    dtype = as_dtype(dtype) or as_dtype(stored) or model.dtype
    state = None if model.dtype == dtype else _cast(model.state_dict(), dtype)
    try:
        model.save_pretrained(directory, state_dict=state, max_shard_size="5GB")
        model.config.dtype = dtype  # save_pretrained had put the dtype in memory there
        model.config.save_pretrained(directory)
    finally:
        model.config.dtype = stored
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    if card is not None:
        (Path(directory) / "README.md").write_text(card, encoding="utf-8")


def as_dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    """The floating dtype of a name such as `bfloat16`.

    Raises:
        OptionError: There is none of that name.
    """
    if name is None or isinstance(name, torch.dtype):
        return name
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptionError(
            f"`dtype` must be a floating type such as float32 or bfloat16. Got {name!r}."
        )
    return found


def _cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Floating tensors in `dtype`; tensors that shared memory still share it, so ties survive."""
    cast: dict[Any, torch.Tensor] = {}
    result = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in cast or not tensor.numel():
            cast[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        result[name] = cast[key]
    return result
