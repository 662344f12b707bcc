"""Whether two runs are the same: what of their settings decides the result, and how it differs."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SHA256 = "sha256:"
"""How a digest begins, in place of values that are too long to show."""

WITHOUT_A_SAY = frozenset(
    {
        "enable_progress_bar",
        "journal_beside",
        "offload",
        "overwrite",
        "resume",
        "save_dir",
        "streaming",
    }
)
"""Options that decide where a run is computed and kept, and not what comes out."""


def with_a_say(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide the result, by name or dotted key."""
    return {k: v for k, v in settings.items() if k.rpartition(".")[2] not in WITHOUT_A_SAY}


def differences(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    defaults: Callable[[Iterable[str]], Mapping[str, Any]] = lambda _: {},
) -> list[str]:
    """How the settings of a run differ from those of another, such as "`seed` was 4, is 5".

    Args:
        before: The settings of the run that was there first, of this version or an older one.
        now: Those of the other run.
        defaults: Gives the defaults of the settings that `before` does not have, by name. They were
            not there when it was made: one that has its default now is no difference.
    """
    before, now = with_a_say(before), with_a_say(now)
    added = [name for name in now if name not in before]
    known = defaults(added) if added else {}
    return [
        _difference(name, before.get(name), now.get(name))
        for name in {**before, **now}
        if before.get(name) != now.get(name) and not (name in known and known[name] == now[name])
    ]


def _difference(name: str, was: Any, is_: Any) -> str:
    if all(isinstance(value, str) and value.startswith(SHA256) for value in (was, is_)):
        return f"`{name}` differ"
    return f"`{name}` was {_shown(was)}, is {_shown(is_)}"


def _shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)
