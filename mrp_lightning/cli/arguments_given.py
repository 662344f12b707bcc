"""The arguments of a command line and of its YAML files, each with the file and line that gave it.

Reading YAML twice is the price of naming a line: jsonargparse keeps no positions.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

import yaml

from mrp_lightning.errors import OptionError

_MOST_VALUES = 100_000
"""Number of values that a file may hold."""
_FILE_OPTION = re.compile(r"-c|--(config|model|data|trainer)")
_GROUPS = ("model", "data", "trainer")
"""The options of a file that may name another file with the options below them."""
_SUFFIXES = (".yaml", ".yml", ".json")


def is_name(value: str) -> bool:
    """Return whether the value of `--model` names a model: neither a configuration nor its file."""
    return bool(value) and not value.endswith(_SUFFIXES) and not value.lstrip().startswith("{")


@dataclass(frozen=True)
class Argument:
    """An option of a command line, or a key or an item of one of its files.

    Attributes:
        path: Its dotted keys, without positions in lists, `init_args` and the subcommand.
        value: The text of its value, empty for a collection.
        origin: The file and the line, such as "run.yaml, line 3: "; empty on the command line.
    """

    path: str
    value: str = ""
    origin: str = ""

    @property
    def leaf(self) -> str:
        """The last key."""
        return self.path.rpartition(".")[2]

    @property
    def file(self) -> str:
        """The file, empty on the command line."""
        return self.origin.rpartition(", line ")[0]


def arguments_given(args: Sequence[str], *, files: bool = True) -> list[Argument]:
    """Return all arguments of a command line in their order, those of a file where it is named.

    Args:
        args: The words of the command line.
        files: Whether `--config` and the groups name files, which are read.

    Raises:
        OptionError: A file is no YAML, holds no keys or one of them twice, or stands for more
            values than fit into memory.
    """
    arguments: list[Argument] = []
    for arg, following in zip_longest(args, args[1:], fillvalue=""):
        option, equals, value = arg.partition("=")
        value = value if equals else following
        match = _FILE_OPTION.fullmatch(option) if files else None
        group = (match[1] or "").removeprefix("config") if match else ""
        if match and Path(value).is_file() and not (group and is_name(value)):
            arguments += _read(Path(value), group, args)
        elif option.startswith("--"):
            path = option[2:].removesuffix("+").replace(".init_args", "")
            arguments.append(Argument(path, value))
    return arguments


def _read(file: Path, group: str, commands: Sequence[str]) -> list[Argument]:
    """Return the arguments of a file.

    A few lines of aliases of aliases stand for more values than fit into any memory, and an alias
    of its own parent for values without end: the number of values is limited.
    """
    try:
        root = yaml.compose(file.read_text("utf-8"), yaml.SafeLoader)
        arguments = list(islice(_walk(root, group, file, commands), _MOST_VALUES + 1))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise OptionError(f"{file}{line}: no YAML, {problem}.") from error
    except RecursionError:
        raise OptionError(f"{file}: its values are nested too deeply, or in themselves.") from None
    if len(arguments) > _MOST_VALUES:
        raise OptionError(f"{file}: its aliases stand for more than {_MOST_VALUES:,} values.")
    if not isinstance(root, yaml.MappingNode):
        content = "nothing" if root is None else f"a {root.id}"
        raise OptionError(
            f"{file}: expected keys with values, such as `seed: 1`. It holds {content}."
        )
    return arguments


def _walk(
    node: yaml.Node | None, path: str, file: Path, commands: Sequence[str]
) -> Iterator[Argument]:
    """Yield each key of a node and below, and each item of a list."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield _argument(path, item, item, file)
            yield from _walk(item, path, file, commands)
    elif isinstance(node, yaml.MappingNode):
        _require_different_keys(node, file)
        # A class comes first, so that its arguments can be checked against it.
        for key, value in sorted(node.value, key=lambda pair: pair[0].value != "class_path"):
            is_transparent = key.value == "init_args" or (not path and key.value in commands)
            below = path if is_transparent else f"{path}.{key.value}".lstrip(".")
            argument = _argument(below, key, value, file)
            yield argument
            yield from _walk(value, below, file, commands)
            if below in _GROUPS and argument.value.endswith(_SUFFIXES):
                other = file.parent / argument.value
                yield from _read(other, below, commands) if other.is_file() else ()


def _require_different_keys(node: yaml.MappingNode, file: Path) -> None:
    """Refuse a key that is given twice: YAML forbids it, but loaders silently take the last one."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and lines.setdefault(key.value, line) != line:
            raise OptionError(
                f"{file}, line {line}: the key `{key.value}` is given twice, first in line "
                f"{lines[key.value]}. Keep one of them, with all that belongs to it."
            )


def _argument(path: str, key: yaml.Node, value: yaml.Node, file: Path) -> Argument:
    text = value.value if isinstance(value, yaml.ScalarNode) else ""
    return Argument(path, text, f"{file}, line {key.start_mark.line + 1}: ")
