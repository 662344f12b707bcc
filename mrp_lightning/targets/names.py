"""Choosing modules by name."""

import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from mrp_lightning.errors import TargetError

_REGULAR = "re:"


def matches(name: str, pattern: str, prefix: str = "") -> bool:
    """Whether a pattern means this module, or one that holds it.

    A pattern is a run of whole name parts, with shell wildcards: `q_proj`, `layers.3`, `mlp` and
    `layers.*.mlp` all match `model.layers.3.mlp.q_proj` or a module in it; `proj` matches neither.
    Behind `re:` it is a regular expression, as llm-compressor takes it: it is matched from the
    start of the name without the prefix, as in the checkpoint, and means this module alone.
    """
    if pattern.startswith(_REGULAR):
        expression = pattern.removeprefix(_REGULAR)
        return re.match(expression, name.removeprefix(prefix)) is not None
    return any(
        fnmatchcase(name, wider)
        for wider in (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    )


def as_patterns(value: Sequence[str] | str | None) -> tuple[str, ...]:
    """The patterns of an argument, of which a single one may come without a list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def require_matches(
    argument: str,
    patterns: Iterable[str],
    names: Sequence[str],
    prefix: str = "",
    shown: Callable[[str], str] = str,
) -> None:
    """Refuse patterns that match no name; `shown` is how a name is told.

    Raises:
        TargetError: It lists every such pattern with the nearest names, or all those that are no
            regular expressions.
    """
    patterns = list(patterns)
    if malformed := {p: why for p in patterns if (why := _why_malformed(p))}:
        listed = "; ".join(f"{pattern!r} ({why})" for pattern, why in malformed.items())
        raise TargetError(
            f"`{argument}` holds what Python does not read as a regular expression: {listed}. "
            'Write one, such as "re:.*q_proj$", or a name with shell wildcards without `re:`.'
        )
    unknown = [p for p in patterns if not any(matches(name, p, prefix) for name in names)]
    if not unknown:
        return
    names = [shown(name) for name in names]
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    hints = []
    for pattern in unknown:
        near = get_close_matches(pattern, names, n=2, cutoff=0.6)
        near += get_close_matches(pattern.rsplit(".", 1)[-1], parts, n=3, cutoff=0.4)
        hints.append(f"{pattern!r} (nearest names: {', '.join(near) or ', '.join(parts[:12])})")
    raise TargetError(f"`{argument}` matched nothing in the model: {'; '.join(hints)}.")


def without_numbers(text: str) -> str:
    """A name, or a reason, in which each number is `*`: what is alike is then the same."""
    return re.sub(r"\b\d+\b", "*", text)


def _why_malformed(pattern: str) -> str | None:
    if pattern.startswith(_REGULAR):
        try:
            re.compile(pattern.removeprefix(_REGULAR))
        except re.error as error:
            return str(error)
    return None
