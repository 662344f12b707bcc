"""JSON files: what is written is read again, or refused by its file's name."""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, TypeVar

from mrp_lightning.errors import FormatError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")
_EXPECTED = "Input should be "


def as_json(content: Any) -> str:
    """The text of a JSON file; numbers that are not finite, which JSON lacks, become null.

    Raises:
        TypeError: The content is more than mappings, lists, tuples, strings, numbers and `None`.
    """
    return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"


def read_json(path: str | os.PathLike[str], remedy: str, version: int | None = None) -> Any:
    """Read a JSON object.

    Args:
        path: The file.
        remedy: The next step if it cannot be read, such as "prune again".
        version: The `format_version` that it has to have; `None` for a file that has none.

    Raises:
        FileNotFoundError: There is no such file.
        FormatError: It is no JSON object, or of another version; or no file, but a directory or a
            pipe, which would be waited for.
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


def read_as(
    kind: type[T], path: str | os.PathLike[str], remedy: str, version: int | None = None
) -> T:
    """Read a JSON object as a dataclass; see `read_json` and `as_dataclass`."""
    content = read_json(path, remedy, version)
    return as_dataclass(kind, content, str(path), f"delete it, or {remedy}")


def as_dataclass(kind: type[T], content: Any, source: str, remedy: str) -> T:
    """Make a dataclass, whose fields may be dataclasses in their turn, of a file's JSON object.

    `source` names the whole in messages, which end with the next step, `remedy`.

    Types are those of JSON: a bool is no number, and a number no text, but 1 is the float 1.0. Keys
    that the dataclass does not have are passed over; those that are missing have its defaults. A
    `ValueError` of its `__post_init__` is listed with the other problems.

    Raises:
        FormatError: Values are missing, or of other types; all are listed.
    """
    from pydantic import TypeAdapter, ValidationError  # only where a file is read

    step = remedy[0].upper() + remedy[1:]
    refused = f"{source} is not as mrp-lightning writes it. {step}."
    try:
        # As JSON, in which strict types still let a list be a tuple and an object a dataclass.
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except TypeError as error:  # what a pickle can hold, and JSON cannot
        raise FormatError(f"{refused}\n  {error}") from error
    except ValidationError as error:
        problems: dict[str, str] = {}
        for found in error.errors(include_url=False):
            place = _place(found, content)
            problems.setdefault(place, _problem(place, found))  # of a union the first kind
        listed = "\n".join(f"  {problem}" for problem in problems.values())
        raise FormatError(f"{refused}\n{listed}") from error


def check_version(content: Any, source: str, version: int, remedy: str) -> None:
    """Raise a `FormatError` where `format_version` is missing or another one."""
    found = content.get("format_version") if isinstance(content, dict) else None
    if found != version:
        raise FormatError(
            f"{source}: `format_version` is {found!r}, but this version of mrp-lightning reads "
            f"{version}. Use the version that wrote it, or {remedy}."
        )


def _place(found: "ErrorDetails", content: Any) -> str:
    """Keys and positions as `layers[3].name`, without the kinds that pydantic adds for a union."""
    place = ""
    for step in found["loc"]:
        if isinstance(content, list) and isinstance(step, int):
            place, content = f"{place}[{step}]", content[step]
        elif isinstance(content, dict) and (str(step) in content or found["type"] == "missing"):
            place, content = f"{place}.{step}", content.get(str(step))
        else:
            break
    return place.removeprefix(".")


def _problem(place: str, found: "ErrorDetails") -> str:
    """One of pydantic's errors, in our words."""
    name, message = f"`{place}`" if place else "the whole", found["msg"]
    if found["type"] == "missing":
        return f"{name} is missing"
    if message.startswith(_EXPECTED):
        return f"{name} is {shortened(found['input'])}, expected {message[len(_EXPECTED) :]}"
    return f"{name}: {message.removeprefix('Value error, ')}"


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
