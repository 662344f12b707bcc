"""What a checkpoint says of itself is checked before anything is built by it."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from mrp_lightning.errors import FormatError
from mrp_lightning.models.weight_files import weight_files

MOST_MODULES = 4096
"""Layers, blocks or experts of one kind that a model has at most. The largest that are published
have some hundreds."""
_MOST_LABELS = 10**6
_COUNT = re.compile(r"(layers?|blocks?|depths?|experts|stages|levels|attention_types)$")
_FREE = 2**28
"""Weights that a model may have whatever the size of its files: tables that are computed."""


def check_values(values: Any, source: str | os.PathLike[str]) -> None:
    """Refuse a configuration that would keep transformers busy for ever, or have it fetch code.

    Args:
        values: The content of a `config.json`.
        source: Where it comes from, for the message.

    Raises:
        FormatError: It is no such thing, or absurd; all reasons are listed.
    """
    if not isinstance(values, Mapping):
        raise FormatError(
            f"`model`: {source}: expected config.json to hold an object, got a "
            f"{type(values).__name__}. Fetch it again."
        )
    if problems := list(_problems(values, "")):
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise FormatError(
            f"`model`: the configuration of {source} is of no model that could be built. Fetch it "
            f"again, or correct it:\n{listed}"
        )


def check_files(directory: Path, model: nn.Module) -> None:
    """Refuse a directory whose files cannot be those of the model, before they are read.

    Args:
        directory: A Hugging Face model directory. Where it holds no weights, nothing is said.
        model: The model on the meta device, built by the directory's configuration.

    Raises:
        FormatError: See `weight_files` and `check_size`.
    """
    if files := weight_files(directory):
        check_size(model, sum(file.stat().st_size for file in files), directory)


def check_size(model: nn.Module, num_bytes: int, source: str | os.PathLike[str]) -> None:
    """Refuse a model that is far larger than the files that its weights are to come from.

    Args:
        model: The model on the meta device, where it takes no memory.
        num_bytes: The size of these files. A weight takes a byte or more, but for packed and
            quantized ones, which take a bit or more.
        source: Where they are, for the message.

    Raises:
        FormatError: It is, so that most of its weights could only be made up.
    """
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    needed = sum(tensor.numel() for tensor in tensors)
    is_packed = getattr(getattr(model, "config", None), "quantization_config", None) is not None
    if needed > num_bytes * (8 if is_packed else 1) + _FREE:
        raise FormatError(
            f"`model`: by its configuration, {source} is a model of {needed:,} weights, but its "
            f"files hold {num_bytes:,} bytes. They are not those of one model: fetch them again."
        )


def _problems(values: Mapping[Any, Any], above: str) -> Iterator[str]:
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _problems(value, f"{name}.")
            continue
        most = _MOST_LABELS if key == "num_labels" else MOST_MODULES
        is_count = key == "num_labels" or _COUNT.search(str(key))
        if is_count and (largest := max(_integers(value), default=0)) > most:
            yield f"`{name}` is {largest:,}, expected at most {most:,}"
        if key == "quantization_config" and value is not None:
            yield f"`{name}` is a {type(value).__name__}, expected an object"
        if str(key).endswith("attn_implementation") and isinstance(value, str) and "/" in value:
            yield f"`{name}` is {value!r}: code of the hub, which no checkpoint may ask for"


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _integers(item)
    elif isinstance(value, int):
        yield value
