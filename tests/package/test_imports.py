"""What importing costs, and in which direction the packages may import each other."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "mrp_lightning": {"mrp_lightning"},
    "callbacks": {"callbacks", "mrp_lightning"},
    "export": {"export", "mrp_lightning"},
}


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
    return modules


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        tops = {module.split(".")[0] for module in imported_modules(path)}
        assert (tops & set(ALLOWED)) <= ALLOWED[package], path


@pytest.mark.parametrize("module", ["solver.pruning", "pruning.sequential"])
def test_solver_and_walk_load_torch_alone(module):
    code = (
        f"import sys, mrp_lightning.{module}; from mrp_lightning import prune_weight;"
        "print([m for m in ('lightning', 'transformers', 'datasets', 'rich') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert shown.stdout.strip() == "[]", shown.stderr


def test_everything_public_is_there():
    import mrp_lightning

    for name in mrp_lightning.__all__:
        assert getattr(mrp_lightning, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = mrp_lightning.nothing
