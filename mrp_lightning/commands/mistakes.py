"""Explain mistakes on a command line in one line, with their origin and the nearest name."""

import inspect
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser

from mrp_lightning.commands.arguments_given import Argument
from mrp_lightning.upstream.other_names import options_of

_MODULES = (
    "mrp_lightning.callbacks",
    "callbacks",  # the short name, unless a user's folder has it
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
)
"""The modules whose classes a configuration may name; of equal names, the last is suggested."""
_WORDS = {int: "a whole number", float: "a number", str: "text", type(None): "null"}


def explain(message: str, options: Mapping[str, Any], arguments: Sequence[Argument]) -> str:
    """Return an explanation of jsonargparse's message, or the message with its origin.

    Args:
        message: The message, which contains the names of the options that it concerns.
        options: The types of all options by dotted key.
        arguments: All arguments of the command line and its files.
    """
    named = {word.strip(".-") for word in re.findall(r"[\w.-]+", message)}
    of_groups = re.findall(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message)
    named |= {f"{group}.{option}" for group, option in of_groups}
    # 1. A mistake that the types prove, if the message names its option: it has a line and a
    #    nearest name.
    # 2. A misspelt name of a required option, which the message reports as missing.
    # 3. The message itself, with the origin of the last argument that it names, which overrides the
    #    others.
    for argument, name, problem in _mistakes(options, arguments):
        if name in named or any(word.startswith(f"{name}.") for word in named):
            return f"{argument.origin}{problem}"
    text = _without_jargon(" ".join(message.split()))
    text = text if len(text) < 300 else message  # for a union, the reasons fill several lines
    missing = named - {argument.leaf for argument in arguments}
    for argument in arguments:
        is_known = {argument.path, argument.leaf} & {*named, *options}
        near = get_close_matches(argument.leaf, missing, n=1, cutoff=0.8)
        if near and not is_known:
            hint = f"Did you mean `{near[0]}` by `{argument.leaf}`?"
            return f"{argument.origin}{text}. {hint}"
    about = [a for a in arguments if a.path in named or {*a.path.rsplit(".", 1)} <= named]
    about = [argument for argument in about if argument.value in message] or about
    return f"{about[-1].origin if about else ''}{text}"


def _without_jargon(message: str) -> str:
    """Return jsonargparse's message in the words of a YAML file."""
    message = re.sub(r"Problem with given class_path '[\w.]+': ", "", message)
    message = re.sub(r'Parser key "([\w.]+)"', r"`\1`", message)
    message = re.sub("Expected a <class '(list|dict|str|int|float|bool)'>", _expected, message)
    return re.sub("Expected a dot import path string: ", "expected a mapping. Got value: ", message)


def _expected(kind: re.Match[str]) -> str:
    names = {"list": "a list", "dict": "a mapping", "str": "text", "bool": "true or false"}
    return f"expected {names.get(kind[1], 'a number')}"


def unknown_key(
    options: Iterable[str], arguments: Sequence[Argument], within: Mapping[str, Collection[str]]
) -> str | None:
    """Return the message on the first unknown root key, or key in `within`; `None` for none.

    Args:
        options: The options, with their dashes.
        arguments: All arguments given; root keys are checked in YAML files alone.
        within: The known keys of each nested mapping, by the mapping's dotted key; these are
            checked on the command line, too.
    """
    roots = {name.lstrip("-").removesuffix("+").partition(".")[0]: None for name in options}
    for argument in arguments:
        key = argument.path.partition(".")[0]
        if argument.origin and key not in roots:
            return f"{argument.origin}there is no option `{key}`. {nearest(key, roots)}"
        # The longest, since names in a mapping may have dots: `models.opt` and `models.opt.1`.
        above = [mapping for mapping in within if argument.path.startswith(f"{mapping}.")]
        if above and argument.path not in within:
            mapping = max(above, key=len)
            key = argument.path.removeprefix(f"{mapping}.").partition(".")[0]
            if key not in within[mapping]:
                hint = nearest(key, within[mapping])
                return f"{argument.origin}`{mapping}` has no key `{key}`. {hint}"
    return None


def _mistakes(
    options: Mapping[str, Any], arguments: Iterable[Argument]
) -> Iterator[tuple[Argument, str, str]]:
    """Yield each argument that does not exist or has a wrong type, its name, and the problem."""
    groups = {name.rpartition(".")[0] for name in options if not name.endswith(".help")}
    classes: dict[str, Any] = {}  # by option: the class of the object that it takes
    for argument in arguments:
        path = argument.path
        above = [path[: dot.start()] for dot in re.finditer(r"\.", path)]
        # The innermost class decides: an argument of a callback may be an object with arguments of
        # its own.
        owner = next((key for key in reversed(above) if key in classes), None)
        taker = path.removesuffix(".class_path")
        kind = options.get(taker)
        takes_object = f"{taker}.help" in options and get_origin(kind) is not dict
        takes_object = takes_object and "text" not in _words(kind)
        if taker != path or (argument.value and takes_object):
            classes[taker], reason, known = _class(argument.value)
            if classes[taker] is None:
                problem = f"`{taker}`: no class `{argument.value}`{reason}. "
                yield argument, argument.value, problem + nearest(argument.value, known)
        elif owner is not None and inspect.isclass(classes[owner]):
            name = path.removeprefix(f"{owner}.").partition(".")[0]
            parser = ArgumentParser()
            known = parser.add_class_arguments(classes[owner], fail_untyped=False)
            if name not in known:
                problem = f"`{owner}`: {classes[owner].__name__} has no argument `{name}`. "
                hint = nearest(name, known) if known else "It takes none: leave this out."
                yield argument, name, problem + hint
            elif name == argument.leaf and (
                problem := _wrong_value(argument, options_of(parser).get(f"--{name}"))
            ):
                yield argument, name, problem
        elif path in options:
            if problem := _wrong_value(argument, options[path]):
                yield argument, path, problem
        elif path not in groups and not {*above} & {*options} - groups:
            parent = path.rpartition(".")[0]
            siblings = [name for name in options if name.rpartition(".")[0] == parent]
            hint = nearest(path, siblings or options)
            if "trainer.callbacks" in options and path in _arguments_of_callback():
                hint = (
                    f"It is one of the callback: `--trainer.callbacks.{path}`, behind "
                    "`--trainer.callbacks=MRPCallback`. `mrp-lightning prune` has it as it is."
                )
            yield argument, path, f"there is no option `{path}`. {hint}"


def _arguments_of_callback() -> list[str]:
    """Return the names of the arguments of the callback that prunes."""
    callback, _, _ = _class("MRPCallback")
    return ArgumentParser().add_class_arguments(callback, fail_untyped=False)


def _wrong_value(argument: Argument, kind: Any) -> str:
    """Return the problem of a value that is not of its type, or names no file, else ""."""
    path, value = argument.path, argument.value
    (item, *_) = get_args(kind) if get_origin(kind) is list else (None,)
    if inspect.isclass(item) and issubclass(item, PathLike):  # relative to its file
        is_missing = value and not Path(Path(argument.file).parent, value).is_file()
        return f"`{path}`: there is no file {value}." if is_missing else ""
    words = list(dict.fromkeys(_words(kind)))
    # A type without a word for it cannot be explained, and is left to jsonargparse's own message.
    if not value or not all(words) or _is_of(value, kind):
        return ""
    expected = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value)
    meant = f"{float(percent[1]) / 100:g}" if percent else value.replace(",", ".")
    is_meant = percent or re.fullmatch(r"\d+,\d+", value)
    hint = f" Write {meant}." if is_meant and "a number" in words else ""
    return f"`{path}`: expected {expected}. Got {value}.{hint}"


def _is_of(value: str, kind: Any) -> bool:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    try:
        parser.parse_args([f"--value={value}"])
    except ArgumentError:
        return False
    return True


def _words(kind: Any) -> Iterator[str]:
    """Yield the names of a type, or of the members of a union; "" for a type without one."""
    if get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _words(member)
    elif get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif kind is bool:
        yield from ("true", "false")
    elif inspect.isclass(kind):
        yield _WORDS.get(kind) or f"a {kind.__name__} with its arguments"
    else:
        collection = "a mapping" if get_origin(kind) is dict else "a list"
        yield collection if inspect.isclass(get_origin(kind)) else ""


def _class(path: str) -> tuple[Any, str, list[str]]:
    """Return a class or `None`, the reason why its module fails or "", and names to suggest."""
    module, _, name = path.rpartition(".")
    modules = [import_module(known) for known in _MODULES]
    if module:
        # The last part of a path is often right and its module wrong, so that the name is looked up
        # in the known modules as well.
        elsewhere = [f"{known.__name__}.{name}" for known in modules if hasattr(known, name)]
        try:
            modules = [import_module(module)]
        except (ImportError, TypeError) as error:
            return None, f": {error}", elsewhere
        if elsewhere and not hasattr(modules[0], name):
            return None, "", elsewhere
    classes = {
        f"{each.__name__}.{key}": value
        for each in modules
        for key, value in vars(each).items()
        if inspect.isclass(value)
    }
    match = next((getattr(each, name) for each in modules if hasattr(each, name)), None)
    return match, "", list(classes)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint: the known name whose last part is nearest, else all known names, if any."""
    leaves = {key.rpartition(".")[2]: key for key in names}
    if not leaves:
        return "Name one that Python finds from here."
    leaf = name.rpartition(".")[2]
    abbreviated = [key for key in leaves if key.startswith(leaf)]
    if matches := abbreviated if len(abbreviated) == 1 else get_close_matches(leaf, leaves, n=1):
        return f"Did you mean `{leaves[matches[0]]}`?"
    return f"Expected one of {', '.join(leaves.values())}."
