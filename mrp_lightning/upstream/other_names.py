"""Private names of huggingface_hub, gguf, jsonargparse and argparse."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def hub_away() -> Iterator[None]:
    """Restrict libraries to the hub's cache in this context, as `HF_HUB_OFFLINE=1` does.

    Seen in huggingface_hub 2.4 and datasets 5.2, which read the variable when they are imported,
    and otherwise retry each file for 24 s. Replacement: `local_files_only` of `load_dataset`, once
    it makes no request.
    """
    import datasets.config
    import huggingface_hub.constants

    modules: tuple[Any, ...] = (huggingface_hub.constants, datasets.config)
    were_offline = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, is_offline in zip(modules, were_offline, strict=True):
            module.HF_HUB_OFFLINE = is_offline


def bounded_gguf(file: Path) -> Any:
    """Return a reader of a GGUF file that raises at the end of the file.

    Seen in gguf 0.19, whose reader goes on past the end, value after value, as often as the header
    says, which a large number makes endless. It slices a memory map for each of a vocabulary's
    tokens, which takes three times as long as slices of an array. Replacement: `GGUFReader`, once
    it does neither.
    """
    import numpy as np
    from gguf import GGUFReader

    class Bounded(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> Any:
            if type(self.data) is np.memmap:
                self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
            values = super()._get(offset, dtype, count, *order, **more)
            if len(values) < count:
                raise ValueError(f"it ends before the {int(count):,} values at byte {offset:,}")
            return values

    return Bounded(file)


def take_alone(parser: Any, group: str, key: str, is_value: Callable[[str], bool]) -> None:
    """Let `--group VALUE`, and `group: VALUE` in YAML, set the option `group.key`.

    Seen in jsonargparse 4.53, where the option of a group only takes a file with the group's
    content. Replacement: a public way to accept other values.

    Args:
        parser: The parser, to which the group was added with `sub_configs`.
        group: The name of a group of options.
        key: The option of the group that gets the value.
        is_value: Returns whether a string is such a value, not the name or the content of a file.
    """
    (action,) = (each for each in parser._actions if each.dest == group)
    load = action._load_config

    def load_or_take(value: Any, *more: Any) -> Any:
        return load({key: value} if isinstance(value, str) and is_value(value) else value, *more)

    action._load_config = load_or_take


def options_of(parser: Any) -> dict[str, Any]:
    """Return the options of a parser, with their dashes, and the type of each.

    Seen in Python 3.11, and in jsonargparse 4.53, whose parser is a subclass. Messages name the
    option nearest to a mistyped one. Replacement: a public list of a parser's actions.
    """
    return {
        name: getattr(action, "_typehint", action.type)
        for action in parser._actions
        for name in action.option_strings
    }


def option_named(parser: Any, argument: str) -> str | None:
    """Return the option or positional name of an argument in a parser; `None` if there is none.

    Seen in Python 3.11. Messages name a command's option for an argument with another name in the
    code. Replacement: a public list of a parser's actions.
    """
    for action in parser._actions:
        if action.dest == argument:
            return str((*action.option_strings, action.metavar)[0])
    return None
