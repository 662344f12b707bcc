"""What jsonargparse says of a configuration, in a line with the name that may have been meant."""

import inspect
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from mrp_lightning.cli.places import mentions, not_yaml, place_of

_KEY = re.compile(r'Parser key "([\w.]+)"')
_CLASS = re.compile(r"Problem with given class_path '([\w.]+)':\n( +.*(?:\n {8}.*)*)")
_BARE_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_OPTION = re.compile(r"(?:option|Option|arguments:) '?(?:--)?([\w.]+)")
_REQUIRED = re.compile(r"arguments are required: (?:--)?([\w.]+)")

_PLACES = ("callbacks", "lightning.pytorch.callbacks")
"""The modules whose classes a configuration names, as a rule."""


def explain(message: str, parser: ArgumentParser, args: Sequence[str] = ()) -> str:
    """Make one line of a message, if it is about a name.

    Args:
        message: What jsonargparse says; where a value may have several types, with what each of
            them found wrong.
        parser: The parser of the command, which knows its options.
        args: The command line, whose YAML files may hold the mistake.

    Returns:
        The file and the line, the key, what is wrong with it, and the nearest name that exists.
        Other mistakes are told in jsonargparse's words.
    """
    if broken := not_yaml(args):
        return f"{broken}."
    key = _KEY.search(message)
    group = key[1] if key else ""
    text, word, within = _explain(message, parser, group)
    if required := _REQUIRED.search(text):
        near = _mentioned_instead(args, required[1], group)
        return f"{text}.{near}" if near else text
    option, _, leaf = group.rpartition(".")
    place = (word and place_of(args, word, within)) or (leaf and place_of(args, leaf, option))
    return f"{place}: {text}" if place else text


def _explain(message: str, parser: ArgumentParser, group: str) -> tuple[str, str, str]:
    """What is wrong, the word that is, and the keys above it."""
    where = f"`{group}`: " if group else ""
    if problem := _CLASS.search(message):
        text, word = _explain_class(problem[1], " ".join(problem[2].split()))
        return where + text, word, group
    if bare := _BARE_CLASS.search(message):
        name = bare[1]
        text = f"{where}expected a class with its module, `{_PLACES[0]}.{name}`. Got {name}."
        return text, name, group
    option = _OPTION.search(message)
    if option and not group and "before subcommand" not in message:
        return _explain_option(option[1], parser)
    lines = message.splitlines()
    return message if len(lines) > 2 else " ".join(message.split()), "", ""


def _mentioned_instead(args: Sequence[str], name: str, group: str) -> str:
    """Where a file has a name that is nearly one that it lacks."""
    above, _, leaf = name.rpartition(".")
    within = ".".join(filter(None, (group, above)))
    near = {m.word: m.place for m in mentions(args) if m.path.startswith(within)}
    meant = get_close_matches(leaf, [word for word in near if word != leaf], n=1)
    return f" {near[meant[0]]}, has `{meant[0]}`." if meant else ""


def _explain_class(path: str, problem: str) -> tuple[str, str]:
    """Explain a class that does not exist, or an argument that it does not have; and which word."""
    module, _, name = path.rpartition(".")
    there = sys.modules.get(module)
    if there is None:
        near = get_close_matches(module, _PLACES, n=1)
        meant = f"Did you mean `{near[0]}`?" if near else "Name one that Python finds from here."
        return f"`class_path: {path}`: {problem}. {meant}", path
    kind = getattr(there, name, None)
    if kind is None:
        classes = [key for key, value in vars(there).items() if inspect.isclass(value)]
        meant = _did_you_mean(name, classes, prefix=f"{module}.")
        return f"`class_path: {path}`: {module} has no {name}.{meant}", path
    if option := _OPTION.match(problem):
        meant = _did_you_mean(option[1], _arguments(kind))
        return f"{path} has no argument `{option[1]}`.{meant}", option[1]
    return f"{path}: {problem}", ""


def _explain_option(option: str, parser: ArgumentParser) -> tuple[str, str, str]:
    """Explain an option that the command does not have; and which word, and the keys above it."""
    known = [action.dest for action in parser._actions]
    group, _, leaf = option.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == group]
    text = f"there is no option `{option}`."
    if siblings:
        meant = _did_you_mean(leaf, siblings, prefix=f"{group}." if group else "")
        return text + meant, leaf, group
    return text + _did_you_mean(option, known), option.partition(".")[0], ""


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
    abbreviated = [key for key in known if key.startswith(name)]
    near = abbreviated if len(abbreviated) == 1 else get_close_matches(name, known, n=1)
    if near:
        return f" Did you mean `{prefix}{near[0]}`?"
    return f" Expected one of {', '.join(prefix + key for key in known)}."
