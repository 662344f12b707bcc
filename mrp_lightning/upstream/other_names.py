"""Names that huggingface_hub, gguf, jsonargparse and argparse keep to themselves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def hub_away() -> Iterator[None]:
    """Let what loads from the hub look only into its cache, as with `HF_HUB_OFFLINE=1`.

    Seen in huggingface_hub 2.4 and datasets 5.2, which read the variable when they are imported,
    and otherwise try each file for 24 s. In its place: `local_files_only` of `load_dataset`, once
    it asks nothing.
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
    """A reader of a GGUF file that stops where the file ends.

    Seen in gguf 0.19. Its own reads on behind the end, value after value, as often as the header
    says: for ever, if it says a number that is large enough. In its place: `GGUFReader`, once it
    raises there.
    """
    from gguf import GGUFReader

    class Bounded(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **more: Any) -> Any:
            values = super()._get(offset, dtype, count, *order, **more)
            if len(values) < count:
                raise ValueError(f"it ends before the {int(count):,} values at byte {offset:,}")
            return values

    return Bounded(file)


def take_alone(parser: Any, group: str, key: str, is_value: Callable[[str], bool]) -> None:
    """Let `--group VALUE`, and `group: VALUE` in YAML, stand for the option `group.key`.

    Seen in jsonargparse 4.53, where the option of a group names a file of what is in the group. In
    its place: a public way to let it take anything else.

    Args:
        parser: The parser, to which the group was added with `sub_configs`.
        group: The name of a group of options.
        key: The one that the value is of.
        is_value: Whether a text is such a value, and not the name of a file or the text of one.
    """
    (action,) = (each for each in parser._actions if each.dest == group)
    load = action._load_config

    def load_or_take(value: Any, *more: Any) -> Any:
        return load({key: value} if isinstance(value, str) and is_value(value) else value, *more)

    action._load_config = load_or_take


def options_of(parser: Any) -> dict[str, Any]:
    """The options that a parser knows, with their dashes, and the type of each.

    Seen in Python 3.11, and in jsonargparse 4.53, whose parser is one of argparse. A message names
    the option that a mistyped one is nearest to. In its place: a public list of a parser's actions.
    """
    return {
        name: getattr(action, "_typehint", action.type)
        for action in parser._actions
        for name in action.option_strings
    }


def option_named(parser: Any, argument: str) -> str | None:
    """Return the option, or the word, by which a parser takes an argument; `None` if it does not.

    Seen in Python 3.11. A message names the option of a command for what its code calls by another
    name. In its place: a public list of a parser's actions.
    """
    for action in parser._actions:
        if action.dest == argument:
            return str((*action.option_strings, action.metavar)[0])
    return None
