"""The names in the code say what they hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOUSES = ("mrp_lightning", "mrp_sparse", "export", "callbacks")
NO_NAMES = {"found", "before", "what", "mine", "place", "beside", "given", "told", "tell", "say"}
NO_NAMES |= {"hush", "let_go", "tmp", "temp", "data2", "stuff", "thing"}
NO_OPENERS = ("What", "Those", "That")


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """The files of the product, parsed."""
    for house in HOUSES:
        for file in (ROOT / house).rglob("*.py"):
            yield file.relative_to(ROOT), ast.parse(file.read_text("utf-8"))


def names_of(node: ast.AST) -> Iterator[str]:
    """The names that a node defines or uses as its own."""
    match node:
        case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
            yield name
        case ast.ClassDef(name=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
            yield name


def test_names_are_nouns_of_what_they_hold():
    wrong = [
        f"{file}:{node.lineno}: {name}"
        for file, tree in trees()
        for node in ast.walk(tree)
        for name in names_of(node)
        if name.strip("_") in NO_NAMES
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_open_with_a_verb_or_a_noun():
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = [
        f"{file}: {text.splitlines()[0]}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if text.split()[0] in NO_OPENERS
    ]
    assert not wrong, "\n".join(wrong)
