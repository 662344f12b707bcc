"""The arguments of public classes and functions, checked by the types in their signatures."""

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints, overload

from mrp_ground.errors import OptionError

Function = TypeVar("Function", bound=Callable[..., Any])
_Rule = tuple[str, Callable[[Any], bool]]  # the allowed values in words, and their test
_RULES: dict[Any, _Rule] = {
    bool: ("true or false", lambda x: isinstance(x, bool)),
    int: ("a whole number", lambda x: isinstance(x, Integral) and not isinstance(x, bool)),
    float: ("a number", lambda x: isinstance(x, Real) and not isinstance(x, bool)),
    str: ("text", lambda x: isinstance(x, str)),
    PathLike: ("a path", lambda x: isinstance(x, PathLike)),
    NoneType: ("None", lambda x: x is None),
}
_MANY = {"a whole number": "whole numbers", "a number": "numbers"}


@overload
def checked(function: Function, /) -> Function: ...
@overload
def checked(*, errors: Mapping[str, type[ValueError]]) -> Callable[[Function], Function]: ...
def checked(
    function: Function | None = None, /, *, errors: Mapping[str, type[ValueError]] | None = None
) -> Any:
    """Make a function or the constructor of a class raise for arguments of the wrong types.

    The types are those of the annotations, and the error lists all such arguments. An argument is
    not checked if its annotation has a part without a rule, such as a mapping or a callable. A
    class is changed in place.

    Args:
        function: The function or class, where this is a decorator without parentheses.
        errors: The classes of the errors of some arguments, by name. The error is of such a class
            if only arguments of this class are wrong; else it is an `OptionError`.
    """
    if function is None:
        return functools.partial(_checked, errors=errors or {})
    return _checked(function, errors={})


def _checked(function: Function, *, errors: Mapping[str, type[ValueError]]) -> Function:
    if inspect.isclass(function):
        function.__init__ = _checked(function.__init__, errors=errors)  # type: ignore[method-assign]
        return function
    signature = inspect.signature(function)

    @functools.cache  # at the first call, when all names of the annotations exist
    def rules() -> dict[str, _Rule]:
        hints = get_type_hints(function)
        made = {name: _rule(hints[name]) for name in signature.parameters if name in hints}
        return {name: rule for name, rule in made.items() if rule is not None}

    @functools.wraps(function)
    def checking(*args: Any, **options: Any) -> Any:
        bound: dict[str, Any] = {}
        with suppress(TypeError):  # the call itself fails below, with Python's own message
            bound = signature.bind(*args, **options).arguments
        if wrong := {
            name: f"`{name}` must be {rule[0]}; got {reprlib.repr(bound[name])}."
            f"{_next_step(rule, bound[name])}"
            for name, rule in rules().items()
            if name in bound and not rule[1](bound[name])
        }:
            kinds = {errors.get(name, OptionError) for name in wrong}
            raise (kinds.pop() if len(kinds) == 1 else OptionError)(" ".join(wrong.values()))
        return function(*args, **options)

    return checking  # type: ignore[return-value]


def _rule(hint: Any, *, in_list: bool = False) -> _Rule | None:
    """Return the rule of an annotation, or `None`; items of lists have only those of `_RULES`."""
    hint = hint.__bound__ if isinstance(hint, TypeVar) else hint
    if isinstance(hint, list):  # the arguments of a callable
        return None
    kind = get_origin(hint) or hint
    parts = [_rule(part, in_list=kind in (list, Sequence)) for part in get_args(hint)]
    known_parts = [part for part in parts if part is not None]
    if kind in (Union, UnionType) and known_parts == parts:
        words = " or ".join(words for words, _ in known_parts)
        return words, lambda x: any(fits(x) for _, fits in known_parts)
    if kind in (list, Sequence) and known_parts:
        ((words, fits),) = known_parts
        return (
            f"a list of {_MANY.get(words, words)}",
            lambda x: isinstance(x, list | tuple) and all(map(fits, x)),
        )
    if kind in _RULES or in_list or hint is Any or not inspect.isclass(hint):
        return _RULES.get(kind)
    article = "an" if hint.__name__[0] in "AEIOU" else "a"
    return f"{article} {hint.__name__}", lambda x: isinstance(x, hint)


def _next_step(rule: _Rule, value: Any) -> str:
    """Return a hint if a Tensor can be made of a value, else ""."""
    if not rule[0].startswith("a Tensor"):
        return ""
    if hasattr(value, "hessian"):
        return " Give what its `hessian()` returns."
    if hasattr(value, "weight"):
        return " Give its `weight`."
    return " `torch.from_numpy` makes a tensor of it." if hasattr(value, "__array__") else ""


def is_number(value: object) -> TypeGuard[float]:
    """Return whether the value is a finite real number; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object) -> TypeGuard[int]:
    """Return whether the value is an `int` ≥ 1; a bool or a NumPy integer is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
