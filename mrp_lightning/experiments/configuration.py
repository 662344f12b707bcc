"""What decides the result of a run: its configuration, and whether another one is the same."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningCLI

BAR = "trainer.enable_progress_bar"
_WITHOUT_A_SAY = re.compile(
    rf"{re.escape(BAR)}|model\.streaming|trainer\.callbacks\.\d+\.init_args\.resume"
)
"""Options without a say in the result."""


def described(cli: LightningCLI) -> dict[str, Any]:
    """The configuration of a command line by dotted key, with its defaults."""
    return dict(_flatten(_nested(cli, cli.config)))


def difference(before: Mapping[str, Any], cli: LightningCLI) -> str:
    """How a command line differs from a configuration, such as "`data.seed` was 4, is 5".

    An option that `before` does not have was not there when it was described. If it has its default
    now, it is no difference.

    Args:
        before: What `described` gave; older versions left out what is `None`.
        cli: The command line.
    """
    now = described(cli)
    keys = [key for key in {**before, **now} if not _WITHOUT_A_SAY.fullmatch(key)]
    changed = [key for key in keys if before.get(key) != now.get(key)]
    defaults = _defaults(cli, {key for key in changed if key not in before})
    changed = [key for key in changed if key not in defaults or defaults[key] != now[key]]
    return "; ".join(f"`{key}` was {before.get(key)}, is {now.get(key)}" for key in changed)


def _defaults(cli: LightningCLI, keys: set[str]) -> dict[str, Any]:
    """What some options are without being given, beside the others as they are.

    Those of a callback, say, are found by parsing what names it.
    """
    if not keys:
        return {}
    parser, given = cli.parser, _without(_nested(cli, cli.config), keys)
    exits, parser.exit_on_error = parser.exit_on_error, False
    try:
        found = _nested(cli, parser.parse_object(given))
    except ArgumentError:
        return {}  # one of them has no default
    finally:
        parser.exit_on_error = exits
    return {key: value for key, value in _flatten(found) if key in keys}


def _nested(cli: LightningCLI, config: Any) -> dict[str, Any]:
    nested: dict[str, Any] = json.loads(cli.parser.dump(config, format="json", skip_unset=False))
    return nested


def _flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    parts = dict(_parts(values, prefix))
    if not parts:
        yield prefix, values
    for key, value in parts.items():
        yield from _flatten(value, key)


def _without(values: Any, keys: set[str], prefix: str = "") -> Any:
    """Nested values without some; what held nothing else becomes `None`, and is left out."""
    if prefix in keys:
        return None
    if not (parts := dict(_parts(values, prefix))):
        return values
    kept = [_without(value, keys, key) for key, value in parts.items()]
    if isinstance(values, list):
        return [value for value in kept if value is not None] or None
    found = zip(values, parts.values(), kept, strict=True)
    return {name: now for name, was, now in found if now is not None or was is None} or None


def _parts(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The values in a mapping, or in a list of mappings, by dotted key."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield f"{prefix}.{key}" if prefix else key, value
    elif isinstance(values, list) and any(isinstance(value, dict) for value in values):
        for index, value in enumerate(values):
            yield f"{prefix}.{index}", value
