"""The parser of YAML files and of arguments of classes: jsonargparse's, and stricter YAML."""

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader, set_parsing_settings

from mrp_lightning.errors import OptionError
from mrp_lightning.upstream.other_names import take_strings

# Reading attribute docstrings, which `Settings` has, takes half a second: for help only.
_WANTS_HELP = any(arg == "-h" or "help" in arg for arg in sys.argv)
set_parsing_settings(docstring_parse_attribute_docstrings=_WANTS_HELP)

_SUFFIXES = (".yaml", ".yml", ".json")
_OF_CLASS = re.compile(r"\n( *)- (Problem with given class_path .*(?:\n\1  .*)*)")


class Parser(ArgumentParser):
    """jsonargparse's parser, which raises its errors as `OptionError` and takes no abbreviations.

    An abbreviation may become ambiguous in a later version.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def add_class_arguments(self, *args: Any, **kwargs: Any) -> list[str]:
        """Add the arguments of a class; those that take a string read no file of that name."""
        added: list[str] = super().add_class_arguments(*args, **kwargs)
        take_strings(self)
        return added

    def parse_args(self, args: Any = None, *more: Any, **kwargs: Any) -> Namespace:  # type: ignore[override]
        """Parse a command line; raise an `OptionError` also for a file that is no text."""
        try:
            return super().parse_args(args, *more, **kwargs)
        except UnicodeDecodeError as error:
            words = [word.rpartition("=")[2] for word in (sys.argv[1:] if args is None else args)]
            files = ", ".join(word for word in words if word.endswith(_SUFFIXES))
            raise OptionError(f"{files}, or a file named there, is no UTF-8: {error}.") from error

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise an `OptionError` with jsonargparse's message in a line."""
        if not self.exit_on_error:  # an inner parser, whose outer parser reports
            super().error(message, ex)
        # It lists what each type of a value says of it; if a class was named, its own word counts.
        if of_class := _OF_CLASS.search(message):
            message = f"{message.splitlines()[0]} {of_class[2]}"
        raise OptionError(" ".join(message.split())) from ex


class _StrictLoader(yaml.SafeLoader):
    """A loader that refuses equal keys of a mapping, which YAML forbids."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
            problem = f"keys that are given twice: {', '.join(twice)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML document without tags that call anything.

    Raises:
        YAMLError: It is no YAML, has a mapping with equal keys, or is nested too deeply.
    """
    try:
        return yaml.load(text, _StrictLoader)
    except RecursionError:
        raise yaml.YAMLError("its values are nested too deeply") from None


_load_as_before = get_loader("yaml")


def _load(text: str) -> Any:
    load_yaml(text)
    return _load_as_before(text)


set_loader("yaml", _load, exceptions=(yaml.YAMLError,))


def is_name(value: str) -> bool:
    """Return whether a value of `--model` names a model, and is no configuration or its file."""
    return bool(value) and not value.endswith(_SUFFIXES) and not value.lstrip().startswith("{")


def keys_given(args: Sequence[str], group: str) -> list[tuple[str, str]]:
    """List the keys of a group of options that a command line and its files give, in their order.

    Each stands beside its origin: the name of a file, or "" for the command line itself. Of nested
    keys the first counts. jsonargparse reads the files later, and reports what is wrong with them.
    """
    keys: list[tuple[str, str]] = []
    # A value may follow `=` or be the next word.
    for word, following in zip_longest(args, args[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        value = value if equals else following
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
            if name in ("--config", "-c"):
                content = load_yaml(Path(value).read_text("utf-8"))
                for key, section in content.items() if isinstance(content, dict) else ():
                    keys += _keys_of(group, str(key), section, value)
            elif name.startswith("--"):
                keys += _keys_of(group, name.removeprefix("--"), value, "")
    return keys


def _keys_of(group: str, name: str, value: Any, origin: str) -> list[tuple[str, str]]:
    """List the keys of one value, which may be YAML or a file relative to its origin."""
    first, *rest = name.replace(".init_args.", ".").split(".")
    if first != group:
        return []
    if rest:
        return [(origin, rest[0])]
    if isinstance(value, str) and value.endswith(_SUFFIXES):
        origin = str(Path(origin).parent / value)
        value = load_yaml(Path(origin).read_text("utf-8"))
    elif isinstance(value, str) and not is_name(value):
        value = load_yaml(value)
    return [(origin, str(key)) for key in value] if isinstance(value, dict) else []
