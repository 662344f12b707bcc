"""Read JSON files, with errors that name the file and the next step."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from mrp_ground.errors import FormatError


def read_json(path: str | os.PathLike[str], remedy: str, version: int | None = None) -> Any:
    """Read a JSON object.

    Args:
        path: The file.
        remedy: The next step if it cannot be read, such as "prune again".
        version: The `format_version` that it has to have; `None` checks none.

    Raises:
        FileNotFoundError: There is no such file.
        FormatError: The file is no JSON object, holds NaN, a number beyond the range of floats or
            half of a surrogate pair, or is of another version; or the path is a directory, a link
            that leads nowhere, or a pipe, which would be waited for.
    """
    if os.path.lexists(path) and not Path(path).is_file():
        raise FormatError(f"{path} is no file. Move it away, or {remedy}.")
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
    """Raise a `FormatError` if content is no mapping, or its `format_version` is not `version`."""
    stored = content.get("format_version") if isinstance(content, dict) else None
    if stored != version:
        raise FormatError(
            f"{source}: `format_version` is {stored!r}, but this version of mrp-lightning reads "
            f"{version}. Use the version that wrote it, or {remedy}."
        )


def _within_floats(number: int | float) -> int | float:
    """Return the number; raise a `ValueError` if it is NaN or beyond the range of floats."""
    if not abs(number) <= sys.float_info.max:
        raise ValueError("a number in it is NaN, or beyond the range of floats")
    return number
