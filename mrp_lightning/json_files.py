"""JSON files: what is written is read again, or refused by its file's name."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrp_lightning.errors import FormatError


def as_json(content: Any) -> str:
    """The text of a JSON file, indented, with a newline at its end.

    Args:
        content: Mappings, lists and tuples of strings, numbers, bools and `None`. Numbers that are
            not finite, which JSON lacks, become null.

    Raises:
        TypeError: There is something else in it.
    """
    return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"


def read_json(path: str | os.PathLike[str], remedy: str, version: int | None = None) -> Any:
    """Read a JSON object.

    Args:
        path: The file.
        remedy: What to do if it cannot be read, such as "prune again".
        version: What its `format_version` has to be; `None` for a file that has none.

    Raises:
        FileNotFoundError: There is no such file.
        FormatError: It is no JSON object, or of another version.
    """
    try:
        content = json.loads(
            Path(path).read_text("utf-8"),
            parse_int=lambda digits: _within_floats(int(digits)),
            parse_float=lambda digits: _within_floats(float(digits)),
            parse_constant=lambda name: _within_floats(float(name)),
        )
        # Half of a surrogate pair can be escaped in JSON, but not be written into any file.
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is not JSON ({error}). Delete it, or {remedy}.") from error
    if version is not None:
        check_version(content, str(path), version, remedy)
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise FormatError(f"{path}: expected a JSON object, got a {kind}. Delete it, or {remedy}.")
    return content


def check_version(content: Any, source: str, version: int, remedy: str) -> None:
    """Refuse what was written in another version of a format.

    Args:
        content: What was read.
        source: Where it comes from, for the message.
        version: What its `format_version` has to be.
        remedy: What to do otherwise, such as "prune again".

    Raises:
        FormatError: It has another `format_version`, or none.
    """
    found = content.get("format_version") if isinstance(content, dict) else None
    if found != version:
        raise FormatError(
            f"{source}: `format_version` is {found!r}, but this version of mrp-lightning reads "
            f"{version}. Use the version that wrote it, or {remedy}."
        )


def _within_floats(number: int | float) -> int | float:
    """A number with which can be reckoned: neither NaN nor beyond the range of floats."""
    if not abs(number) <= sys.float_info.max:
        raise ValueError("a number in it is NaN, or beyond the range of floats")
    return number


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
