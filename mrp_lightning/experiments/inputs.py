"""The files that a run reads, by their content: a name alone does not make two runs comparable."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.errors import DataError, FormatError, OptionError
from mrp_lightning.models.checkpoint import directory_of, weight_files
from mrp_lightning.models.gguf import located
from mrp_lightning.models.locations import find_gguf
from mrp_lightning.storage.files import sha256_of

_BESIDE_WEIGHTS = ("config.json", "*token*", "vocab*", "merges.txt", "*.model", "*.py")
"""Files that decide what a model computes, or its tokens. Cards and results may change."""


def digests(config: Any, *, prunes: bool) -> dict[str, str]:
    """Return a SHA-256 by input (`the model`, `the tokenizer`, `the evaluation text`, …) of a run.

    Inputs without files on this machine are left out: texts of the hub, whose revision is fixed, a
    text that the model writes, and files that do not exist (any more).

    Args:
        config: The configuration of the run, as `RunConfiguration.config`.
        prunes: Whether the run reads calibration text.
    """

    def texts(stage: str) -> list[Path]:
        return TextDataModule(**config.data.as_dict()).local_files(stage)

    inputs: dict[str, Callable[[], Iterable[Path]]] = {
        "the model": lambda: _model_files(config.model),
        "the evaluation text": lambda: texts("test"),
    }
    if prunes:
        inputs["the calibration text"] = lambda: texts("predict")
    if config.data.tokenizer is not None:
        inputs["the tokenizer"] = lambda: _beside_weights(Path(config.data.tokenizer).expanduser())
    by_name = {}
    for name, files in inputs.items():
        with suppress(FileNotFoundError, DataError, FormatError, OptionError):
            if checksums := [_checksum(file) for file in files()]:
                by_name[name] = hashlib.sha256("\n".join(checksums).encode()).hexdigest()
    return by_name


def changes(recorded: Mapping[str, str], present: Mapping[str, str]) -> str:
    """Describe which inputs, of those present, have other content than recorded; "" if none has."""
    changed = [name for name, digest in recorded.items() if present.get(name, digest) != digest]
    return f"other files of {' and '.join(changed)}" if changed else ""


def _model_files(options: Any) -> list[Path]:
    """Return the files of a model and of its tokenizer, on this machine or in the hub's cache.

    Args:
        options: The options `model`, `gguf_file` and `revision` of a `CausalLM`.
    """
    source = located(options.model, options.gguf_file, options.revision)
    if (file := find_gguf(source)) is not None:
        return [file]
    directory = directory_of(source, options.revision)
    return [] if directory is None else [*weight_files(directory), *_beside_weights(directory)]


def _beside_weights(directory: Path) -> list[Path]:
    files = {file for pattern in _BESIDE_WEIGHTS for file in directory.glob(pattern)}
    return sorted(file for file in files if file.is_file())


def _checksum(file: Path) -> str:
    status = file.stat()
    return _checksum_of(file, status.st_size, status.st_mtime_ns)


@cache  # size and time of change are a part of the key: a file that was replaced is read again
def _checksum_of(file: Path, size: int, changed: int) -> str:  # noqa: ARG001
    return sha256_of(file)
