"""What jsonargparse says of a configuration, in a line with the name that may have been meant."""

import inspect
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from difflib import get_close_matches

_KEY = re.compile(r'Parser key "([\w.]+)"')
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)':\n( +.*(?:\n {8}.*)*)")
_BARE_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_OPTION = re.compile(r"(?:option|Option|arguments:) '?(?:--)?([\w.]+)")

_PLACES = ("callbacks", "lightning.pytorch.callbacks")
"""The modules whose classes a configuration names, as a rule."""


def explain(message: str, parser: ArgumentParser) -> str:
    """Make one line of a message, if it is about a name.

    Args:
        message: What jsonargparse says; where a value may have several types, with what each of
            them found wrong.
        parser: The parser of the command, which knows its options.

    Returns:
        The key, what is wrong with it, and the nearest name that exists. Other mistakes are told
        in jsonargparse's words.
    """
    key = _KEY.search(message)
    where = f"`{key[1]}`: " if key else ""
    if problem := _CLASS.search(message):
        return where + _explain_class(problem[1], " ".join(problem[2].split()))
    if bare := _BARE_CLASS.search(message):
        return f"{where}expected a class with its module, `{_PLACES[0]}.{bare[1]}`. Got {bare[1]}."
    option = _OPTION.search(message)
    if option and key is None and "before subcommand" not in message:
        return _explain_option(option[1], parser)
    lines = message.splitlines()
    return message if len(lines) > 2 else " ".join(message.split())


def _explain_class(path: str, problem: str) -> str:
    """Explain a class that does not exist, or an argument that it does not have."""
    module, _, name = path.rpartition(".")
    there = sys.modules.get(module)
    if there is None:
        return f"`class_path: {path}`: {problem}.{_did_you_mean(module, _PLACES)}"
    kind = getattr(there, name, None)
    if kind is None:
        classes = [key for key, value in vars(there).items() if inspect.isclass(value)]
        meant = _did_you_mean(name, classes, prefix=f"{module}.")
        return f"`class_path: {path}`: {module} has no {name}.{meant}"
    if option := _OPTION.match(problem):
        meant = _did_you_mean(option[1], _arguments(kind))
        return f"{path} has no argument `{option[1]}`.{meant}"
    return f"{path}: {problem}"


def _explain_option(option: str, parser: ArgumentParser) -> str:
    """Explain an option that the command does not have."""
    known = [action.dest for action in parser._actions]
    group, _, leaf = option.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == group]
    if siblings:
        meant = _did_you_mean(leaf, siblings, prefix=f"{group}." if group else "")
    else:
        meant = _did_you_mean(option, known)
    return f"there is no option `{option}`.{meant}"


def _arguments(kind: type) -> list[str]:
    """The arguments of a class, also those that it passes on to its bases."""
    names = {
        name: None
        for base in inspect.getmro(kind)
        if "__init__" in vars(base)
        for name, argument in inspect.signature(vars(base)["__init__"]).parameters.items()
        if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
    }
    return [name for name in names if name != "self"]


def _did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    known = list(known)
    near = get_close_matches(name, known, n=1)
    if near:
        return f" Did you mean `{prefix}{near[0]}`?"
    return f" Expected one of {', '.join(prefix + key for key in known)}."
