"""JSON files: written without NaN, and read as dataclasses, with every problem listed."""

import json
import math
import os
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, TypeVar

from mrp_sparse.errors import FormatError
from mrp_sparse.json_files import check_version as check_version
from mrp_sparse.json_files import read_json as read_json

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")
_EXPECTED = "Input should be "


def as_json(content: Any) -> str:
    """Return the text of a JSON file; numbers that are not finite, which JSON lacks, become null.

    Raises:
        TypeError: The content is more than mappings, lists, tuples, strings, numbers and `None`.
    """
    return json.dumps(_finite(content), indent=2, allow_nan=False) + "\n"


def read_as(
    kind: type[T], path: str | os.PathLike[str], remedy: str, version: int | None = None
) -> T:
    """Read a JSON object as a dataclass; see `read_json` and `as_dataclass`."""
    content = read_json(path, remedy, version)
    return as_dataclass(kind, content, str(path), f"delete it, or {remedy}")


def as_dataclass(kind: type[T], content: Any, source: str, remedy: str) -> T:
    """Return a JSON object as a dataclass, whose fields may be dataclasses in turn.

    `source` names the object in messages, which end with the next step, `remedy`.

    Types are those of JSON: a bool is no number, and a number no text, but 1 is the float 1.0. Keys
    that the dataclass lacks are ignored; missing ones have its defaults. A
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
        for detail in error.errors(include_url=False):
            key = _key(detail, content)
            problems.setdefault(key, _problem(key, detail))  # of a union the first kind
        listed = "\n".join(f"  {problem}" for problem in problems.values())
        raise FormatError(f"{refused}\n{listed}") from error


def _key(detail: "ErrorDetails", content: Any) -> str:
    """Return the path `layers[3].name` of an error, without pydantic's names of union members."""
    key = ""
    for step in detail["loc"]:
        if isinstance(content, list) and isinstance(step, int):
            key, content = f"{key}[{step}]", content[step]
        elif isinstance(content, dict) and (str(step) in content or detail["type"] == "missing"):
            key, content = f"{key}.{step}", content.get(str(step))
        else:
            break
    return key.removeprefix(".")


def _problem(key: str, detail: "ErrorDetails") -> str:
    """Return the message for one of pydantic's errors."""
    name, message = f"`{key}`" if key else "the whole", detail["msg"]
    if detail["type"] == "missing":
        return f"{name} is missing"
    if message.startswith(_EXPECTED):
        return f"{name} is {shortened(detail['input'])}, expected {message[len(_EXPECTED) :]}"
    return f"{name}: {message.removeprefix('Value error, ')}"


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
