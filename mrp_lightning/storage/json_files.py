"""Write JSON files without NaN, and read them as dataclasses, listing all problems at once."""

import json
import math
import os
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any, TypeVar

# At the start of a run: an installation without pydantic must not fail after hours of work.
from pydantic import TypeAdapter, ValidationError

from mrp_ground.errors import FormatError
from mrp_ground.json_files import check_version as check_version
from mrp_ground.json_files import read_json as read_json

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

T = TypeVar("T")
_EXPECTED = "Input should be "


def as_json(content: Any) -> str:
    """Return the text of a JSON file; NaN and infinities, which JSON lacks, become null.

    Surrogates, which names of files that are no UTF-8 have, become question marks.
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

    Types are strict: a bool is no number, and a number no string, but 1 is the float 1.0. Keys that
    the dataclass lacks are ignored; missing keys get its defaults. A `ValueError` of
    `__post_init__` is listed with the other problems.

    The message of a FormatError has `source`, the name of the object, lists all missing and wrong
    values, and ends with `remedy`, the next step.
    """
    step = remedy[0].upper() + remedy[1:]
    refused = f"{source} is not as mrp-lightning writes it. {step}."
    try:
        # In JSON mode, strict types accept a list for a tuple and an object for a dataclass.
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except TypeError as error:  # an unpickled object that JSON cannot hold
        raise FormatError(f"{refused}\n  {error}") from error
    except ValidationError as error:
        problems: dict[str, str] = {}
        for detail in error.errors(include_url=False):
            key = _key(detail["loc"])
            problems.setdefault(key, _problem(key, detail))  # of a union's errors the first
        listed = "\n".join(f"  {problem}" for problem in problems.values())
        raise FormatError(f"{refused}\n{listed}") from error


def _key(path: tuple[int | str, ...]) -> str:
    """Return the path of an error, such as `layers[3].name`, without pydantic's own marks."""
    steps = [step for step in path if step not in ("float", "int", "[key]")]
    key = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
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
        return {_finite(key): _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    if isinstance(content, str):
        return content.encode("utf-8", "replace").decode()
    return None if isinstance(content, float) and not math.isfinite(content) else content
