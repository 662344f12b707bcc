"""A command line and its YAML files, as a list of all that they give, and where they give it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

import yaml

from mrp_lightning.errors import OptionError

_MOST_VALUES = 100_000
"""How many values a file may hold."""
_FILE_OPTION = re.compile(r"-c|--(config|model|data|trainer)")
_GROUPS = ("model", "data", "trainer")
"""The options of a file that may name another file with what is below them."""
_SUFFIXES = (".yaml", ".yml", ".json")


def is_name(value: str) -> bool:
    """Whether the value of `--model` is that of a model: no configuration, and no file of one."""
    return bool(value) and not value.endswith(_SUFFIXES) and not value.lstrip().startswith("{")


@dataclass(frozen=True)
class Given:
    """An option of a command line, or a key or an item of one of its files.

    Attributes:
        path: Its dotted keys, without positions in lists, `init_args` and the subcommand.
        value: The text of its value, empty for a collection.
        place: The file and the line, such as "run.yaml, line 3: "; empty on the command line.
    """

    path: str
    value: str = ""
    place: str = ""

    @property
    def leaf(self) -> str:
        """The last key."""
        return self.path.rpartition(".")[2]


def given(args: Sequence[str], *, files: bool = True) -> list[Given]:
    """All that a command line says, in its order; what a file says stands where its name does.

    Raises:
        OptionError: A file is no YAML, holds no keys or one of them twice, or stands for more
            values than fit into memory.
    """
    found: list[Given] = []
    for arg, following in zip_longest(args, args[1:], fillvalue=""):
        option, equals, value = arg.partition("=")
        value = value if equals else following
        known = _FILE_OPTION.fullmatch(option) if files else None
        group = "" if known is None or known[1] in (None, "config") else known[1]
        if known and Path(value).is_file() and not (group and is_name(value)):
            found += _read(Path(value), group, args)
        elif option.startswith("--"):
            found.append(Given(option[2:].removesuffix("+").replace(".init_args", ""), value))
    return found


def _read(file: Path, group: str, commands: Sequence[str]) -> list[Given]:
    """List all that a file gives.

    A few lines of aliases of aliases stand for more values than fit into any memory, and an alias
    of what it stands in for values without end: what reads the file would not come back.
    """
    try:
        root = yaml.compose(file.read_text("utf-8"), yaml.SafeLoader)
        found = list(islice(_walk(root, group, file, commands), _MOST_VALUES + 1))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise OptionError(f"{file}{line}: no YAML, {problem}.") from error
    except RecursionError:
        raise OptionError(f"{file}: its values are nested too deeply, or in themselves.") from None
    if len(found) > _MOST_VALUES:
        raise OptionError(f"{file}: its aliases stand for more than {_MOST_VALUES:,} values.")
    if not isinstance(root, yaml.MappingNode):
        kinds = {yaml.SequenceNode: "a list", yaml.ScalarNode: "one value"}
        got = next((name for kind, name in kinds.items() if isinstance(root, kind)), "nothing")
        raise OptionError(f"{file}: expected keys with values, such as `seed: 1`. It holds {got}.")
    return found


def _walk(
    node: yaml.Node | None, path: str, file: Path, commands: Sequence[str]
) -> Iterator[Given]:
    """Each key of a node and below, and each item of a list."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield _said(path, item, item, file)
            yield from _walk(item, path, file, commands)
    elif isinstance(node, yaml.MappingNode):
        _require_different_keys(node, file)
        # A class comes before its arguments, so that what reads these knows whose they are.
        for key, value in sorted(node.value, key=lambda pair: pair[0].value != "class_path"):
            is_transparent = key.value == "init_args" or (not path and key.value in commands)
            below = path if is_transparent else f"{path}.{key.value}".lstrip(".")
            said = _said(below, key, value, file)
            yield said
            yield from _walk(value, below, file, commands)
            if below in _GROUPS and said.value.endswith(_SUFFIXES):
                other = file.parent / said.value
                yield from _read(other, below, commands) if other.is_file() else ()


def _require_different_keys(node: yaml.MappingNode, file: Path) -> None:
    """YAML forbids a key twice, but what reads it silently takes the last one."""
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and lines.setdefault(key.value, line) != line:
            raise OptionError(
                f"{file}, line {line}: the key `{key.value}` is given twice, first in line "
                f"{lines[key.value]}. Keep one of them, with all that belongs to it."
            )


def _said(path: str, key: yaml.Node, value: yaml.Node, file: Path) -> Given:
    text = value.value if isinstance(value, yaml.ScalarNode) else ""
    return Given(path, text, f"{file}, line {key.start_mark.line + 1}: ")
