"""Tokenizers from directories, the hub and checkpoints, or a message that helps."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mrp_lightning.errors import DataError, FormatError
from mrp_lightning.models.checkpoint import found_at, is_path, why_not_found
from mrp_lightning.models.gguf import find_gguf, has_tokenizer, reading


def load_tokenizer(source: str | os.PathLike[str] | PreTrainedTokenizerBase, **hub: Any) -> Any:
    """The tokenizer of a directory, hub id or GGUF file; a tokenizer is given back as it is.

    Raises:
        FileNotFoundError: There is no tokenizer.
        DataError: There is one that cannot be loaded.
        FormatError: The GGUF file is damaged, or transformers cannot read it.
        TypeError: `source` is none of the above.
    """
    if isinstance(source, PreTrainedTokenizerBase):
        return source
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            "`tokenizer` must be a tokenizer of transformers, or the directory or hub id of one. "
            f"Got {type(source).__name__}."
        )
    if file := find_gguf(str(source)):
        try:
            with reading(file) as given:
                return AutoTokenizer.from_pretrained(**given, trust_remote_code=False)
        except FormatError as error:
            if has_tokenizer(file):
                raise
            raise _nothing_at(file, "It holds only weights.") from error
    path = Path(source).expanduser()
    if not path.exists() and is_path(str(source)):
        raise _nothing_at(source, "There is no such directory.")
    try:
        # Without a word on it, transformers would ask on the terminal.
        trust = {"trust_remote_code": False}
        return AutoTokenizer.from_pretrained(**found_at(source), **trust | hub)
    except OSError as error:
        raise _nothing_at(source, why_not_found(source, error)) from error
    except Exception as error:  # whatever the classes of tokenizers stumble over in their files
        raise DataError(
            f"`tokenizer`: the tokenizer of {source} cannot be loaded; its files are incomplete or "
            f"damaged, or need an option. ({error})"
        ) from error


def _nothing_at(source: str | os.PathLike[str], reason: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"`tokenizer`: {source} gives no tokenizer. Name the directory or hub id of one. ({reason})"
    )


def tokenizer_beside(source: str, **hub: Any) -> Any:
    """The tokenizer that a model comes with, or `None` where it comes without one.

    Raises:
        DataError: There is one that cannot be loaded.
    """
    path = Path(source).expanduser()
    if path.is_dir() and find_gguf(source) is None:
        return load_tokenizer(path, **hub) if any(path.glob("tokenizer*")) else None
    try:
        return load_tokenizer(source, **hub)
    except FileNotFoundError:
        return None


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """The contents of the files of a tokenizer by name, which a Lightning checkpoint can hold."""
    with TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}


def tokenizer_from_files(files: dict[str, bytes]) -> PreTrainedTokenizerBase:
    """The tokenizer of such files; no code comes with it.

    Raises:
        DataError: The files are no tokenizer.
    """
    is_right = isinstance(files, dict) and all(
        isinstance(name, str) and Path(name).name == name != ".." and isinstance(content, bytes)
        for name, content in files.items()
    )
    if not is_right:
        raise DataError(
            "The checkpoint's tokenizer is no mapping of names of files to their bytes. Name a "
            "tokenizer with `tokenizer`, and load the model's weights alone."
        )
    with TemporaryDirectory() as directory:
        for name, content in files.items():
            Path(directory, name).write_bytes(content)
        return load_tokenizer(directory)
