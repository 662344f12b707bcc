"""GGUF, llama.cpp's file format: configuration, tokenizer and quantized weights in one file.

transformers reads such a file and dequantizes it. This module locates the file, reads its
configuration and its model, and explains errors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from mrp_lightning.devices import is_out_of_memory
from mrp_lightning.environment import extra, progress_log, why_no_hub, without_bars
from mrp_lightning.errors import DependencyError, FormatError, TargetError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.models.integrity import check_size, check_values, misfits
from mrp_lightning.models.locations import gguf_files, refuse_empty
from mrp_lightning.upstream.other_names import bounded_gguf, bounded_gguf_readers


def located(source: str, gguf_file: str | None, revision: str | None = None) -> str:
    """Return the path of a GGUF file in a directory or, at a revision, on the hub (downloaded).

    Without `gguf_file` the source is returned unchanged. A missing file is a FileNotFoundError.
    """
    refuse_empty(source)
    if gguf_file is None:
        return source
    directory = Path(source).expanduser()
    if directory.exists():
        if (directory / gguf_file).is_file():
            return str(directory / gguf_file)
        there = ", ".join(gguf_files(directory)) or "none"
        raise FileNotFoundError(
            f"`gguf_file`: {source} has no file {gguf_file}. Name one of its .gguf files: {there}."
        )
    try:
        away = why_no_hub() is not None
        return str(cached_file(source, gguf_file, revision=revision, local_files_only=away))
    except OSError as error:
        raise FileNotFoundError(
            f"`gguf_file`: {source} is no directory, and the hub gives no {gguf_file} of that name."
            f" ({why_no_hub() or error})"
        ) from error


@contextmanager
def reading(file: Path, argument: str = "model") -> Iterator[dict[str, Any]]:
    """Yield the arguments with which `from_pretrained` reads a GGUF file, and explain its errors.

    The `argument` with which the user named the file is in the messages.

    Raises:
        DependencyError: The packages that read GGUF files are not installed.
        FormatError: The file is damaged, or transformers cannot read its architecture.
    """
    with extra("gguf", f"Reading {file.name}"):
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    # Absolute, since transformers would also look for a relative path in the working directory.
    path = file.absolute()
    try:
        # The lengths in the header are checked first: another reader would go on past the end of a
        # file as often as a damaged length asks for, without end.
        _check_lengths(path, path.stat().st_mtime_ns)
        with bounded_gguf_readers():
            yield {"pretrained_model_name_or_path": str(path.parent), "gguf_file": str(path)}
    except Exception as error:  # of any type: readers do not check a file that is cut off
        if isinstance(error, DependencyError) or is_out_of_memory(error):
            raise
        raise FormatError(f"`{argument}`: {file} {_why_not_read(file, error)}") from error


@lru_cache(maxsize=1)
def _check_lengths(file: Path, changed: int) -> None:  # noqa: ARG001  (a new file is read again)
    bounded_gguf(file)


def _why_not_read(file: Path, error: Exception) -> str:
    try:
        architecture = bounded_gguf(file).fields["general.architecture"].contents()
    except Exception as damage:
        return (
            f"is damaged: its {file.stat().st_size:,} bytes are no whole GGUF file ({damage}). "
            "Fetch it again."
        )
    return (
        f"cannot be read by transformers {transformers.__version__} as the architecture "
        f"{architecture!r} ({type(error).__name__}: {error}). Give the directory or hub id of "
        "the model that the file was made from."
    )


def has_tokenizer(file: Path) -> bool:
    """Return whether a file holds a tokenizer next to the weights."""
    with reading(file):
        return "tokenizer.ggml.tokens" in bounded_gguf(file).fields


def gguf_config(file: Path) -> PreTrainedConfig:
    """Return the configuration in a file."""
    with reading(file) as location:
        # Read as a plain dictionary: `check_values` comes before a class that computes with them.
        values = PreTrainedConfig.get_config_dict(**location)[0]
    check_values(values, file)
    with reading(file) as location:
        return AutoConfig.from_pretrained(**location)


def gguf_model(file: Path, dtype: torch.dtype | None, attention: str | None) -> PreTrainedModel:
    """Return the dequantized model of a file, bfloat16 by default, as if never quantized."""
    options = {"attn_implementation": attention} if attention else {}
    published = torch.bfloat16
    progress_log.info("Dequantizing %s …", file)  # takes half a minute for 135M parameters
    model = build_without_weights(gguf_config(file))
    check_size(model, file.stat().st_size, file, is_packed=True)
    with reading(file) as location, without_bars():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **location,
            dtype=dtype or published,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            **options,
        )
    model, loading = loaded
    if problem := misfits(file, model, loading):
        raise TargetError(f"`model`: {problem}")
    # The name is that of the file, not of its directory, which may hold several models. The dtype
    # is the one in which the model will be stored (`stored_dtype`), not that of the load.
    model.name_or_path = model.config.name_or_path = str(file.absolute())
    model.config.dtype = published
    return model
