"""Choosing modules by name."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from mrp_lightning.errors import TargetError


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern means this module, or one that holds it.

    A pattern is a run of whole name parts, with shell wildcards: `q_proj`, `layers.3`, `mlp` and
    `layers.*.mlp` all match `model.layers.3.mlp.q_proj` or a module in it; `proj` matches neither.
    """
    return any(
        fnmatchcase(name, wider)
        for wider in (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    )


def as_patterns(value: Sequence[str] | str | None) -> tuple[str, ...]:
    """The patterns of an argument, of which a single one may come without a list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def require_matches(argument: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse patterns that match no name.

    Raises:
        TargetError: It lists every such pattern with the nearest names.
    """
    unknown = [p for p in patterns if not any(matches(name, p) for name in names)]
    if not unknown:
        return
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    hints = []
    for pattern in unknown:
        near = get_close_matches(pattern, names, n=2, cutoff=0.6)
        near += get_close_matches(pattern.rsplit(".", 1)[-1], parts, n=3, cutoff=0.4)
        hints.append(f"{pattern!r} (nearest names: {', '.join(near) or ', '.join(parts[:12])})")
    raise TargetError(f"`{argument}` matched nothing in the model: {'; '.join(hints)}.")
