"""What is said of an argument, in the words of the command line that it was typed on."""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def as_typed(options: Mapping[str, str]) -> Iterator[None]:
    """Name arguments in errors and warnings as they were typed.

    Args:
        options: What the user typed, such as `--num-samples`, by what messages quote in its place,
            such as `data.num_samples`.
    """
    quoted = re.compile(rf"`({'|'.join(map(re.escape, options))})(?:(?:: |=)([^`]*))?`")

    def typed(found: re.Match[str]) -> str:
        name, value = options[found[1]], found[2]
        is_flag = value in (None, "true", "True")
        return f"`{name}`" if is_flag else f"`{name} {value}`"

    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_as_typed(message: Any, *more: Any, **options: Any) -> None:
            said = type(message)(quoted.sub(typed, str(message)))
            show(said, *more, **options)

        warnings.showwarning = show_as_typed
        try:
            yield
        except Exception as error:
            if error.args and isinstance(error.args[0], str):
                error.args = (quoted.sub(typed, error.args[0]), *error.args[1:])
            raise
