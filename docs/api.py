"""`python docs/api.py` writes docs/api.md, the public names and their docstrings.

`python docs/api.py --check` fails where the page is not current.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docstring_parser import Docstring, DocstringStyle, parse

PAGE = Path(__file__).with_name("api.md")
COMMAND = "python docs/api.py"
ROOT = Path(__file__).parents[1]
PACKAGES = {
    "mrp_lightning": "One matrix, a whole model, and what it is calibrated on.",
    "callbacks": "What Lightning's trainer takes; `mrp_lightning.callbacks` is the same.",
    "export": "Packed checkpoints.",
}


def page() -> str:
    """All of the page."""
    parts = [
        "# API",
        f"Made from the docstrings by `{COMMAND}`. A weight is (rows, columns): output and input "
        "features.",
    ]
    for name, what in PACKAGES.items():
        package = importlib.import_module(name)
        parts += [f"## `{name}`", what]
        errors = []
        for public in sorted(package.__all__, key=lambda n: (n.endswith(("Error", "Warning")), n)):
            thing = getattr(package, public)
            if inspect.isclass(thing) and issubclass(thing, BaseException):
                errors.append(f"* `{public}` ({thing.__base__.__name__}): {inspect.getdoc(thing)}")
            else:
                parts += [f"### `{public}`", *_entry(public, thing)]
        if errors:
            parts += ["### Errors and warnings", "\n".join(errors)]
    return "\n\n".join(parts) + "\n"


def _entry(name: str, thing: Any) -> Iterator[str]:
    yield f"```python\n{_signature(name, thing)}\n```"
    yield from _documented(parse(inspect.getdoc(thing) or "", DocstringStyle.GOOGLE))
    if inspect.isclass(thing):
        for method, function in _own_methods(thing):
            yield f"#### `{name}.{method}`"
            yield f"```python\n{_signature(method, function)}\n```"
            yield from _documented(parse(inspect.getdoc(function) or "", DocstringStyle.GOOGLE))


def _signature(name: str, thing: Any) -> str:
    """The call with one argument a line where it is long, without the types' module names."""
    signature = inspect.signature(thing)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    shown, after_star = [], False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            after_star = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not after_star:
            shown.append("*")
            after_star = True
        shown.append(_parameter(parameter))
    returns = signature.return_annotation
    is_function = not inspect.isclass(thing) and returns is not inspect.Signature.empty
    arrow = f" -> {inspect.formatannotation(returns)}" if is_function else ""
    line = f"{name}({', '.join(shown)}){_short(arrow)}"
    if len(line) <= 90:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in shown), f"){_short(arrow)}"])


def _parameter(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_short(inspect.formatannotation(parameter.annotation))}"
    if parameter.default is not parameter.empty:
        text += f" = {parameter.default!r}"
    prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    return prefix + text


def _short(annotation: str) -> str:
    """Types by their own names: `Any` for `typing.Any`."""
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", annotation).replace("'", "")


def _documented(doc: Docstring) -> Iterator[str]:
    if doc.description:
        yield doc.description.strip()
    for title, kind in (("Arguments", "param"), ("Attributes", "attribute")):
        listed = [p for p in doc.params if p.args[0] == kind]
        if listed:
            yield f"{title}:"
            yield "\n".join(f"* `{p.arg_name}`: {_one_line(p.description)}" for p in listed)
    if doc.returns and doc.returns.description:
        verb = "Yields" if doc.returns.is_generator else "Returns"
        yield f"{verb}: {_one_line(doc.returns.description)}"
    if doc.raises:
        yield "Raises:"
        yield "\n".join(f"* `{r.type_name}`: {_one_line(r.description)}" for r in doc.raises)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _own_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods that no class of another library has: not the hooks that Lightning calls."""
    foreign = {name for base in kind.__mro__ if not _is_ours(base) for name in vars(base)}
    for base in kind.__mro__:
        if not _is_ours(base):
            continue
        for name, value in vars(base).items():
            is_method = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
            if not name.startswith("_") and is_method and name not in foreign:
                foreign.add(name)
                yield name, getattr(kind, name)


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] in PACKAGES


def main(args: list[str]) -> None:
    """Write the page, or check that it is current."""
    sys.path.insert(0, str(ROOT))  # the packages beside this page, not installed ones
    text = page()
    if "--check" not in args:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text("utf-8") != text:
        raise SystemExit(f"docs/api.md is not current: run `{COMMAND}`.")


if __name__ == "__main__":
    main(sys.argv[1:])
