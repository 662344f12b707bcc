"""A mistake on a command line is reported in a line, with its place and the nearest name."""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from itertools import islice, zip_longest
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from mrp_lightning.errors import OptionError
from mrp_lightning.upstream.other_names import options_of

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


_PLACES = (
    "mrp_lightning.callbacks",
    "callbacks",  # the same by a shorter name, unless a folder of the user's has it
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
)
"""The modules whose classes a configuration names, as a rule; of two names the later is told."""


def explain(message: str, options: Mapping[str, Any], given: Sequence[Given]) -> str:
    """Say what is wrong with one of the options, and where it was given.

    Options are types by dotted key.
    """
    named = {word.strip(".-") for word in re.findall(r"[\w.-]+", message)}
    for one, name, wrong in _mistakes(options, given):
        if name in named or any(word.startswith(f"{name}.") for word in named):
            return f"{one.place}{wrong}"
    text = " ".join(message.split())
    text = text if len(text) < 300 else message  # what several types find wrong has lines
    missing = named - {one.leaf for one in given}
    for one in given:
        is_known = {one.path, one.leaf} & {*named, *options}
        if not is_known and (near := get_close_matches(one.leaf, missing, n=1, cutoff=0.8)):
            return f"{one.place}{text}. Did you mean `{near[0]}` by `{one.leaf}`?"
    about = [one for one in given if one.path in named or {*one.path.rsplit(".", 1)} <= named]
    about = [one for one in about if one.value in message] or about
    return f"{about[-1].place if about else ''}{text}"


def unknown_key(options: Iterable[str], given: Sequence[Given]) -> str | None:
    """Say which first key of a YAML file is that of no option, `None` if all are; with its place.

    Options are named as on the command line.
    """
    known = {name.lstrip("-").removesuffix("+").partition(".")[0]: None for name in options}
    for one in given:
        key = one.path.partition(".")[0]
        if one.place and key not in known:
            return f"{one.place}there is no option `{key}`. {_meant(key, known)}"
    return None


def _mistakes(
    options: Mapping[str, Any], given: Iterable[Given]
) -> Iterator[tuple[Given, str, str]]:
    """Each name that does not exist and each value of another type, and what to say of it."""
    groups = {name.rpartition(".")[0] for name in options if not name.endswith(".help")}
    classes: dict[str, Any] = {}  # by the option that takes them
    for one in given:
        above = [one.path[: dot.start()] for dot in re.finditer(r"\.", one.path)]
        owner = next((key for key in reversed(above) if key in classes), None)
        taker = one.path.removesuffix(".class_path")
        is_text = "text" in _words(options.get(taker))  # of a model its name, say
        if taker != one.path or (one.value and f"{taker}.help" in options and not is_text):
            classes[taker], reason, known = _class(one.value)
            if classes[taker] is None:
                wrong = f"`{taker}`: no class `{one.value}`{reason}. {_meant(one.value, known)}"
                yield one, one.value, wrong
        elif owner is not None and inspect.isclass(classes[owner]):
            argument = one.path.removeprefix(f"{owner}.").partition(".")[0]
            parser = ArgumentParser()
            known = parser.add_class_arguments(classes[owner], fail_untyped=False)
            if argument not in known:
                wrong = f"`{owner}`: {classes[owner].__name__} has no argument `{argument}`"
                meant = _meant(argument, known) if known else "It takes none: leave this out."
                yield one, argument, f"{wrong}. {meant}"
            elif argument == one.leaf:
                kind = options_of(parser).get(f"--{argument}")
                yield from ((one, argument, wrong) for wrong in _wrong_value(one, kind))
        elif one.path in options:
            yield from ((one, one.path, wrong) for wrong in _wrong_value(one, options[one.path]))
        elif one.path not in groups and not {*above} & {*options} - groups:
            owner = one.path.rpartition(".")[0]
            siblings = [name for name in options if name.rpartition(".")[0] == owner]
            wrong = f"there is no option `{one.path}`. {_meant(one.path, siblings or options)}"
            yield one, one.path, wrong


def _wrong_value(one: Given, kind: Any) -> Iterator[str]:
    """Say what was expected in place of a value that is not of its type; nothing of one that is."""
    (item, *_) = get_args(kind) if get_origin(kind) is list else (None,)
    if inspect.isclass(item) and issubclass(item, PathLike):  # its paths are beside its file
        folder = Path(one.place.rpartition(", line ")[0]).parent
        if one.value and not Path(folder, one.value).is_file():
            yield f"`{one.path}`: there is no file {one.value}."
        return
    expected = list(dict.fromkeys(_words(kind)))
    if not one.value or not all(expected) or _is_of(one.value, kind):
        return
    *most, last = expected
    words = f"{', '.join(most)} or {last}" if most else last
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", one.value)
    step = f" Write {float(share[1]) / 100:g}." if share and "a number" in expected else ""
    yield f"`{one.path}`: expected {words}. Got {one.value}.{step}"


def _is_of(value: str, kind: Any) -> bool:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    try:
        parser.parse_args([f"--value={value}"])
    except ArgumentError:
        return False
    return True


_TYPES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


def _words(kind: Any) -> Iterator[str]:
    """The names of a type, or of all that it is made of; empty for what has none."""
    if get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _words(one)
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif kind is bool:
        yield from ("true", "false")
    elif inspect.isclass(kind):
        yield _TYPES.get(kind) or f"a {kind.__name__} with its arguments"
    else:
        yield "a list" if inspect.isclass(get_origin(kind)) else ""


def _class(path: str) -> tuple[Any, str, list[str]]:
    """A class or `None`, why its module cannot be imported, and those that may be meant."""
    module, _, name = path.rpartition(".")
    places = [import_module(place) for place in _PLACES]
    if module:
        elsewhere = [f"{place.__name__}.{name}" for place in places if hasattr(place, name)]
        try:
            places = [import_module(module)]
        except (ImportError, TypeError) as error:
            return None, f": {error}", elsewhere
        if elsewhere and not hasattr(places[0], name):
            return None, "", elsewhere
    found = [getattr(place, name) for place in places if hasattr(place, name)]
    classes = [
        f"{place.__name__}.{key}"
        for place in places
        for key, value in vars(place).items()
        if inspect.isclass(value)
    ]
    return found[0] if found else None, "", classes


def _meant(name: str, known: Iterable[str]) -> str:
    """Which of the known names is meant, by their last parts."""
    leaves = {key.rpartition(".")[2]: key for key in known}
    if not leaves:
        return "Name one that Python finds from here."
    leaf = name.rpartition(".")[2]
    abbreviated = [key for key in leaves if key.startswith(leaf)]
    if near := abbreviated if len(abbreviated) == 1 else get_close_matches(leaf, leaves, n=1):
        return f"Did you mean `{leaves[near[0]]}`?"
    return f"Expected one of {', '.join(leaves.values())}."
