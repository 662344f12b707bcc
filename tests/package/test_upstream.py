"""Private names of other packages are used in the modules for them, and nowhere else."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mrp_ground", "mrp_sparse", "mrp_lightning", "callbacks", "export")
PLACES = ("mrp_lightning/upstream/", "mrp_sparse/upstream.py", "mrp_ground/upstream.py")

ALLOWED = {
    ("os", "_exit"): "Python documents it",
    ("self", "_generate_state_key"): "Lightning's guide has callbacks name their state by it",
    ("super()", "_apply"): "an override stands in its class",
    ("super()", "_load_from_state_dict"): "an override stands in its class",
    ("super()", "_parse_ckpt_path"): "an override stands in its class",
    ("torch", "_inductor"): "PyTorch's guide to AOTInductor compiles and loads by it",
}
"""Owners and names that may be used elsewhere, and why."""

NAMED_ACCESS = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(tree: ast.AST) -> Iterator[str]:
    """Private names that a file gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_own = isinstance(node, ast.Name) or ast.unparse(node.value) in ("self", "cls")
            if is_own:
                yield node.id if isinstance(node, ast.Name) else node.attr


def used(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, owner and name of each private name that a file imports, or asks an object for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for name in (*str(node.module).split("."), *(alias.name for alias in node.names)):
                yield node.lineno, str(node.module), name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((node.lineno, alias.name, part) for part in alias.name.split("."))
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in NAMED_ACCESS:
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield node.lineno, ast.unparse(node.args[0]), str(name.value)


def foreign(files: dict[str, str]) -> list[str]:
    """Uses of private names that no file of ours defines; those of `super()` are foreign, too."""
    trees = {path: ast.parse(text) for path, text in files.items()}
    own = {name for tree in trees.values() for name in defined(tree) if is_private(name)}
    return [
        f"{path}:{line} uses {owner}.{name}"
        for path, tree in trees.items()
        for line, owner, name in used(tree)
        if is_private(name)
        and (name not in own or owner == "super()")
        and (owner, name) not in ALLOWED
    ]


def test_private_names_of_others_stand_in_one_room():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    room = {path: files.pop(path) for path in list(files) if path.startswith(PLACES)}
    assert foreign(room)  # which shows that they would be found
    assert not foreign(files)


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("from torch import _C", True),
        ("import torch._C", True),
        ("from torch._C import x", True),
        ("model.config._attn_implementation", True),
        ("getattr(model, '_orig_mod', model)", True),
        ("class A(B):\n    def _run(self):\n        super()._run()", True),
        ("self._get(1)", True),
        ("class A:\n    def f(self, other):\n        self._sum = other._sum", False),
        ("def _f(): ...\nmodule._f()", False),
        ("os._exit(1)", False),
        ("x.__dict__; _ = y._; z.shape", False),
    ],
)
def test_a_private_name_would_be_found(text, is_found):
    assert bool(foreign({"a.py": text})) == is_found
