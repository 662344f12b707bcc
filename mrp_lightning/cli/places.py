"""Where in its YAML files a command line says something."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

_MOST_VALUES = 100_000
"""How many values a file may hold."""
_FILE_OPTION = re.compile(r"-c|--(config|model|data|trainer)")


@dataclass(frozen=True)
class Mention:
    """A word of a YAML file: a key, or a value that is no collection.

    Attributes:
        path: The dotted keys above it, without positions in lists and `init_args`.
        word: The word.
        place: The file and the line.
    """

    path: str
    word: str
    place: str


def mentions(args: Sequence[str]) -> Iterator[Mention]:
    """All words of the YAML files that a command line names; those that are no YAML have none."""
    for group, file in _files(args):
        try:
            root = yaml.compose(file.read_text("utf-8"), yaml.SafeLoader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
            continue
        if root is not None:
            yield from _walk(root, [group] if group else [], file, set())


def place_of(args: Sequence[str], word: str, within: str = "") -> str | None:
    """Where a word stands, the last place if there are several; `None` if it is in no file.

    Args:
        args: The command line.
        word: A key or a value.
        within: Dotted keys, one after the other, that must stand above it.
    """
    found = [
        mention.place
        for mention in mentions(args)
        if mention.word == word and f".{within}".rstrip(".") in f".{mention.path}"
    ]
    return found[-1] if found else None


def not_yaml(args: Sequence[str]) -> str | None:
    """Which of the files cannot be taken as YAML, where and why; `None` if all can.

    A few lines of aliases of aliases stand for more values than fit into any memory, and an alias
    of what it stands in for values without end: what reads the file would not come back.
    """
    for _, file in _files(args):
        try:
            root = yaml.compose(file.read_text("utf-8"), yaml.SafeLoader)
            count = 0 if root is None else _count(root, {})
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = f", line {mark.line + 1}" if mark else ""
            return f"{file}{line}: no YAML, {error.problem or error.context}"
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            return f"{file}: no YAML, {error}"
        except RecursionError:
            return f"{file}: its values are nested too deeply, or in themselves"
        if count > _MOST_VALUES:
            return f"{file}: its aliases stand for {count:.0e} values, more than {_MOST_VALUES:,}"
    return None


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """The number of values in a node and below, those that aliases stand for each time."""
    if id(node) not in counted:
        below = node.value if isinstance(node, yaml.CollectionNode) else []
        pairs = isinstance(node, yaml.MappingNode)
        items = [item for pair in below for item in pair] if pairs else below
        counted[id(node)] = 1 + sum(_count(item, counted) for item in items)
    return counted[id(node)]


def _files(args: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """The files, each with the group of options that it is for, empty for all."""
    for arg, following in zip(args, [*args[1:], ""], strict=True):
        option, equals, value = arg.partition("=")
        if known := _FILE_OPTION.fullmatch(option):
            file = Path(value if equals else following)
            if file.is_file():
                group = known[1] or "config"
                yield ("" if group == "config" else group), file


def _walk(node: yaml.Node, path: list[str], file: Path, seen: set[int]) -> Iterator[Mention]:
    """What stands in a node and below; what has several names by aliases, under the first one."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.ScalarNode):
        yield Mention(".".join(path), node.value, f"{file}, line {node.start_mark.line + 1}")
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _walk(item, path, file, seen)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _walk(key, path, file, seen)
            below = [] if key.value == "init_args" else [str(key.value)]
            yield from _walk(value, path + below, file, seen)
