"""What importing costs, and the one way in which imports run: CONTRIBUTING.md shows the order."""

import ast
import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

SHARED = (
    *("errors", "upstream", "environment", "storage"),
    *("devices", "processes", "signals", "terminal"),
)
"""Single modules that all others of their package may use, and that use none of them."""

ORDER = {
    "mrp_lightning": (
        *("upstream", "storage", "solver", "text", "embedded", "models", "targets"),
        *("records", "calibration", "journal", "narrowing", "pruning", "loop", "data"),
        *("distillation", "callbacks", "commands", "experiments"),
    ),
    "mrp_ground": ("errors", "arguments", "json_files", "upstream"),
    "mrp_sparse": ("formats", "kernels", "vllm"),
    "export": ("loading", "conversion", "speed", "gguf"),
    "callbacks": (),
}
"""A folder, or a module, imports only from itself and from those before it."""

PACKAGES = {
    "mrp_ground": {"mrp_ground"},
    "mrp_sparse": {"mrp_sparse", "mrp_ground"},
    "mrp_lightning": {"mrp_lightning", "mrp_sparse", "mrp_ground"},
    "callbacks": {"callbacks", "mrp_lightning"},
    "export": {"export", "mrp_lightning", "mrp_sparse", "mrp_ground"},
}


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything imported, inside functions and for type checking, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they go"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(package: str, path: Path, root: Path) -> list[str]:
    """Imports of a file that go to a later folder, or to a package that it must not know."""
    folders = ORDER[package]
    inside = path.relative_to(root / package).parts
    own = inside[0].removesuffix(".py")
    found = []
    for line, name in imports_of(path):
        top, *rest = name.split(".")
        where = f"{path.relative_to(root)}:{line} imports {name}"
        if top in PACKAGES and top not in PACKAGES[package]:
            found.append(where)
        if top != package:
            continue
        target = rest[0] if rest else ""
        is_folder = target in folders
        if own in folders:
            # The package itself loads lazily what comes later, so nobody inside may ask it.
            allowed = target in SHARED or (
                is_folder and folders.index(target) <= folders.index(own)
            )
        elif own in SHARED:
            allowed = target in SHARED
        else:
            allowed = True  # the package itself, and what is run by name, stand above all folders
        if not allowed:
            found.append(where)
    return found


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    assert not [line for path in files for line in violations(package, path, ROOT)]


@pytest.mark.parametrize("package", ORDER)
def test_every_folder_has_its_place(package):
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")}
    modules = {path.stem for path in (ROOT / package).glob("*.py")}
    assert folders <= set(ORDER[package]) <= folders | modules


@pytest.mark.parametrize(
    ("file", "line", "is_allowed"),
    [
        ("mrp_lightning/solver/a.py", "from mrp_lightning.errors import DataError", True),
        ("mrp_lightning/loop/a.py", "from mrp_lightning.loop.trainer import Trainer", True),
        ("mrp_lightning/text/a.py", "from mrp_lightning.models import loading", False),
        ("mrp_lightning/text/a.py", "def f():\n    import mrp_lightning.loop.trainer", False),
        ("mrp_lightning/pruning/a.py", "from mrp_lightning import __version__", False),
        ("mrp_lightning/storage/files.py", "from mrp_lightning.solver import ranges", False),
        ("mrp_lightning/loop/a.py", "if TYPE_CHECKING:\n    from callbacks import x", False),
        ("callbacks/a.py", "import export", False),
        ("mrp_sparse/kernels/a.py", "import mrp_sparse.packed_linear", False),
        ("mrp_sparse/kernels/a.py", "import mrp_lightning.errors", False),
        ("mrp_sparse/kernels/a.py", "import mrp_ground.errors", True),
        ("mrp_ground/arguments.py", "import mrp_ground.errors", True),
        ("mrp_ground/errors.py", "import mrp_ground.arguments", False),
        ("mrp_ground/arguments.py", "import mrp_sparse", False),
        ("export/loading.py", "from export.speed import measure", False),
        ("export/speed.py", "from export.loading import load", True),
    ],
)
def test_a_wrong_import_would_be_found(file, line, is_allowed, tmp_path):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f"{line}\n" if ":\n" not in line else line)
    assert (not violations(file.split("/")[0], path, tmp_path)) == is_allowed


@functools.cache
def modules() -> dict[str, Path]:
    """All modules of all packages, by their full names."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in paths]
    names = [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]
    return dict(zip(names, paths, strict=True))


@functools.cache
def needs(name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Our modules that a module imports, and the other packages, inside functions, too.

    What is imported for type checking alone is not needed, nor what a package loads lazily.
    """
    known = modules()
    parts = name.split(".")
    ours, others = {".".join(parts[:n]) for n in range(1, len(parts))}, set()
    tree = ast.parse(known[name].read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        or (isinstance(node, ast.FunctionDef) and node.name == "__getattr__")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            full = f"{base}{alias.name}"
            own = next((n for n in (full, base.rstrip(".")) if n in known), None)
            if own is None:
                others.add(full.partition(".")[0])
            else:
                ours.add(own)
    return frozenset(ours), frozenset(others)


def closure(start: str) -> tuple[set[str], set[str]]:
    """All of our modules, and all other packages, that a module needs in the end."""
    ours, others, waiting = set(), set(), [start]
    while waiting:
        if (name := waiting.pop()) not in ours:
            ours.add(name)
            waiting += needs(name)[0]
            others |= needs(name)[1]
    return ours, others


HEAVY = {"lightning", "jsonargparse", "rich", "pydantic", "filelock", "datasets", "yaml", "pandas"}


def test_the_runtime_needs_neither_the_others_nor_their_packages():
    for name in modules():
        if name.partition(".")[0] == "mrp_sparse":
            ours, others = closure(name)
            assert {module.partition(".")[0] for module in ours} <= PACKAGES["mrp_sparse"], name
            assert not others & HEAVY, name


def test_pruning_needs_no_runtime_of_packed_models():
    """It is imported once a checkpoint names a format that it loads."""
    ours = [name for name in modules() if name.partition(".")[0] == "mrp_lightning"]
    needing = [name for name in ours if any(m.startswith("mrp_sparse") for m in needs(name)[0])]
    assert needing == ["mrp_lightning.models.checkpoint"]


def test_packing_a_checkpoint_needs_no_part_that_prunes():
    ours, _ = closure("export.to_sparse")
    rooms = {module.partition(".")[2].partition(".")[0] for module in ours}
    assert not rooms & {"pruning", "calibration", "journal", "loop", "data", "callbacks"}
    assert len(ours) <= 110


def test_the_solver_needs_no_other_room():
    for name in modules():
        if name.startswith("mrp_lightning.solver."):
            ours, others = closure(name)
            rooms = {module.split(".")[1] for module in ours if module.count(".") > 1}
            assert rooms <= {"solver", "upstream", "formats", "kernels"}, name
            assert not others & HEAVY, name


STEPS = {
    "package": "import mrp_lightning",
    "floor": f"import {', '.join(name for name in modules() if name.startswith('mrp_ground.'))}",
    "solver": "import mrp_lightning.pruning.sequential; from mrp_lightning import prune_weight",
    "command": """
from mrp_lightning.environment import without_noise
with without_noise(): from transformers import LlamaForCausalLM
""",
}
_TAKE = """
import json, logging, pkgutil, sys, warnings
from importlib import import_module

def watch(owner, name):
    method = getattr(owner, name)
    def watched(*args, **kwargs):
        caller = sys._getframe(1).f_globals["__name__"]
        if is_import and caller.partition(".")[0] in packages:
            changes.append(f"{caller}: {name}{args}")
        return method(*args, **kwargs)
    setattr(owner, name, watched)

for name in ("filterwarnings", "simplefilter"):
    watch(warnings, name)
for name in ("setLevel", "addFilter", "addHandler", "removeHandler"):
    watch(logging.Logger, name)
changes, loaded = [], {}
steps, packages = json.loads(sys.argv[1])
for step, code in steps.items():
    finders, is_import = [*sys.meta_path], step != "command"
    exec(code)
    loaded[step] = [[*sys.modules], sys.meta_path == finders]
print("all steps are taken", file=sys.stderr)
import lightning.pytorch
shown_by, is_import = (warnings.showwarning, warnings.formatwarning), True
imported = 0
for package in packages:
    for module in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
        if not module.name.endswith("__main__"):
            try:
                import_module(module.name)
                imported += 1
            except ImportError:  # vLLM is not installed everywhere
                pass
if shown_by != (warnings.showwarning, warnings.formatwarning):
    changes.append("how warnings are shown")
print(json.dumps([loaded, changes, imported]))
"""


@pytest.fixture(scope="module")
def process() -> tuple[dict[str, Any], list[str], int]:
    """Take `STEPS`, which write nothing, in a process of its own, and then import every module."""
    command = [sys.executable, "-c", _TAKE, json.dumps([STEPS, [*PACKAGES]])]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert ended.stderr.startswith("all steps are taken\n")
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def loaded(process) -> dict[str, set[str]]:
    """The modules after each of `STEPS`."""
    after, *_ = process
    assert all(after[step][1] for step in ("package", "floor")), "Python's finders are changed"
    return {step: {*names} for step, (names, _) in after.items()}


def test_importing_changes_no_other_packages_messages(process):
    _, changes, imported = process
    assert changes == []
    assert imported > 150


def test_the_package_waits_with_all_that_takes_time(loaded):
    """In 0.05 s; torch alone takes more than one."""
    assert not loaded["package"] & {"torch", "numpy", "mrp_sparse", *HEAVY}


def test_the_ground_floor_does_nothing_at_import(loaded):
    added = loaded["floor"] - loaded["package"]
    floor = {name for name in loaded["floor"] if name.startswith("mrp_ground.")}
    assert len(floor) == len(ORDER["mrp_ground"])
    assert not [name for name in added if name.startswith(("mrp_sparse", "mrp_lightning"))]


def test_solver_and_walk_load_torch_alone(loaded):
    assert not loaded["solver"] & {"lightning", "transformers", "datasets", "rich"}


def test_a_command_that_loads_torchao_leaves_the_terminal_alone(loaded):
    """transformers loads it where it is installed, whether anybody uses it or not."""
    assert ("torchao" in loaded["command"]) == bool(importlib.util.find_spec("torchao"))


def test_everything_public_is_there():
    import mrp_lightning

    for name in mrp_lightning.__all__:
        assert getattr(mrp_lightning, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = mrp_lightning.nothing
