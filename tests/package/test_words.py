"""The names in the code say what they hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOUSES = ("mrp_ground", "mrp_lightning", "mrp_sparse", "export", "callbacks")
NO_NAMES = {"found", "before", "what", "mine", "place", "beside", "given", "told", "tell", "say"}
NO_NAMES |= {"ours", "theirs", "hush", "let_go", "tmp", "temp", "data2", "stuff", "thing"}
NO_OPENERS = ("What", "Those", "That", "Which", "Whose", "How", "Where", "When")


def trees(*more: str) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the parsed files of the product, and of other folders."""
    for house in (*HOUSES, *more):
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
        if name.strip("_").lower() in NO_NAMES
    ]
    assert not wrong, "\n".join(wrong)


def docstrings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each docstring, those below attributes and constants included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                    yield statement.lineno, text


def test_docstrings_open_with_a_verb_or_a_noun():
    wrong = [
        f"{file}:{line}: {text.splitlines()[0]}"
        for file, tree in trees("lab")
        for line, text in docstrings_of(tree)
        if text.split()[0].rstrip(",") in NO_OPENERS
    ]
    assert not wrong, "\n".join(wrong)
