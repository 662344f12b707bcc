"""The arguments of public classes, checked by the types that their signatures give."""

import functools
import inspect
import reprlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from mrp_lightning.errors import OptionError

Init = TypeVar("Init", bound=Callable[..., None])
Rule = tuple[str, Callable[[Any], bool]]  # what a value must be, in words, and whether it is
_RULES: dict[Any, Rule] = {
    bool: ("true or false", lambda x: isinstance(x, bool)),
    int: ("a whole number", lambda x: isinstance(x, Integral) and not isinstance(x, bool)),
    float: ("a number", lambda x: isinstance(x, Real) and not isinstance(x, bool)),
    str: ("text", lambda x: isinstance(x, str)),
    PathLike: ("a path", lambda x: isinstance(x, PathLike)),
    NoneType: ("None", lambda x: x is None),
}


def checked(init: Init) -> Init:
    """Let an `__init__` refuse, with an `OptionError`, values that its annotations do not allow.

    An argument that may be of a type without a rule is for the class itself to check.
    """
    signature, hints = inspect.signature(init), functools.cache(get_type_hints)

    @functools.wraps(init)
    def checking(*args: Any, **options: Any) -> None:
        given: dict[str, Any] = {}
        with suppress(TypeError):  # Python explains below what is wrong with the call
            given = signature.bind(*args, **options).arguments
        rules = {name: _rule(hint) for name, hint in hints(init).items() if name in given}
        if wrong := [
            f"`{name}` must be {rule[0]}; got {reprlib.repr(given[name])}."
            for name, rule in rules.items()
            if rule is not None and not rule[1](given[name])
        ]:
            raise OptionError(" ".join(wrong))
        init(*args, **options)

    return checking  # type: ignore[return-value]


def _rule(hint: Any) -> Rule | None:
    kind, parts = get_origin(hint) or hint, [_rule(part) for part in get_args(hint)]
    known = [part for part in parts if part is not None]
    if kind in (Union, UnionType) and known == parts:
        words = " or ".join(words for words, _ in known)
        return words, lambda x: any(fits(x) for _, fits in known)
    if kind in (list, Sequence) and known:
        ((words, fits),) = known
        return f"a list of {words}", lambda x: isinstance(x, list | tuple) and all(map(fits, x))
    return _RULES.get(kind)
