"""What is wrong on a command line, in a line with its place and the nearest name.

jsonargparse's words change with its versions. Only the names in them are used: each is looked up in
what the user gave and in what there is. The words are told as they are where no name is wrong.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser

from mrp_lightning.cli.given import Given

_PLACES = ("callbacks", "lightning.pytorch.callbacks", "lightning.pytorch.loggers")
"""The modules whose classes a configuration names, as a rule."""


def explain(message: str, options: Sequence[str], given: Sequence[Given]) -> str:
    """Say what is wrong with one of the options, which are dotted keys, and where it was given."""
    named = {word.strip(".-") for word in re.findall(r"[\w.-]+", message)}
    for one, name, wrong, known in _wrong_names(options, given):
        if name in named or any(word.startswith(f"{name}.") for word in named):
            return f"{one.place}{wrong}. {_meant(name, known)}"
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


def _wrong_names(
    options: Sequence[str], given: Iterable[Given]
) -> Iterator[tuple[Given, str, str, list[str]]]:
    """Each name that does not exist, what to say of it, and those that there are."""
    groups = {name.rpartition(".")[0] for name in options if not name.endswith(".help")}
    classes: dict[str, Any] = {}  # by the option that takes them
    for one in given:
        above = [one.path[: dot.start()] for dot in re.finditer(r"\.", one.path)]
        owner = next((key for key in reversed(above) if key in classes), None)
        taker = one.path.removesuffix(".class_path")
        if taker != one.path or (one.value and f"{taker}.help" in options):
            classes[taker], reason, known = _class(one.value)
            if classes[taker] is None:
                yield one, one.value, f"`{taker}`: no class `{one.value}`{reason}", known
        elif owner is not None and inspect.isclass(classes[owner]):
            argument = one.path.removeprefix(f"{owner}.").partition(".")[0]
            known = ArgumentParser().add_class_arguments(classes[owner], fail_untyped=False)
            wrong = f"`{owner}`: {classes[owner].__name__} has no argument `{argument}`"
            if argument not in known:
                yield one, argument, wrong, known
        elif one.path not in {*options, *groups} and not {*above} & {*options} - groups:
            owner = one.path.rpartition(".")[0]
            siblings = [name for name in options if name.rpartition(".")[0] == owner]
            yield one, one.path, f"there is no option `{one.path}`", siblings or [*options]


def _class(path: str) -> tuple[Any, str, list[str]]:
    """A class or `None`, why its module cannot be imported, and those that may be meant."""
    module, _, name = path.rpartition(".")
    places = [import_module(place) for place in _PLACES]
    if module:
        try:
            places = [import_module(module)]
        except (ImportError, TypeError) as error:
            near = [f"{place.__name__}.{name}" for place in places if hasattr(place, name)]
            return None, f": {error}", near
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
