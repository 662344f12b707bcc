"""transformers learns the packed formats, in whichever order it and we are imported."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from mrp_sparse import registration
from mrp_sparse.formats.packed_format import NOTE

TEACH = "import export"
READ = "from transformers import AutoModelForCausalLM"
LOAD = (
    "import sys; model = AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
    "print(type(model.model.layers[0].mlp.up_proj).__name__)"
)


@pytest.mark.parametrize(
    "order",
    [(TEACH, READ), (READ, TEACH), ("import transformers", "import mrp_sparse", READ)],
)
def test_from_pretrained_knows_the_formats_in_any_order_of_imports(order, exports, tmp_path):
    packed = exports("packed", tmp_path).packed
    command = [sys.executable, "-c", ";".join([*order, LOAD]), str(packed)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert shown.stdout.split() == ["Sparse24Linear"], shown.stderr
    assert "UNEXPECTED" not in shown.stderr


@pytest.fixture
def table(tmp_path: Path, monkeypatch):
    """A table that is there once its file is right, and plug-ins that ask for it."""
    (tmp_path / "some_table.py").write_text("raise RuntimeError('not yet')")
    (tmp_path / "some_plugins.py").write_text("import some_table; some_table.entered.append(1)")
    monkeypatch.setattr(registration, "_TABLE", "some_table")
    monkeypatch.setattr(registration, "_PLUGINS", "some_plugins")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "some_table.py"
    for name in ("some_table", "some_plugins"):
        sys.modules.pop(name, None)


def test_plug_ins_follow_the_table_once(table):
    finders = [*sys.meta_path]
    registration.register()
    registration.register()
    assert "some_plugins" not in sys.modules
    with pytest.raises(RuntimeError, match="not yet"):
        import_module("some_table")
    table.write_text("entered = []")
    module = import_module("some_table")
    assert module.entered == [1]
    assert sys.meta_path == finders
    assert module.__loader__ is module.__spec__.loader
    assert Path(module.__loader__.get_filename()) == table
    registration.register()  # both are there: nothing is left to do
    assert sys.meta_path == finders


def test_a_table_that_is_there_gets_its_plug_ins_at_once(table):
    table.write_text("entered = []")
    module = import_module("some_table")
    registration.register()
    assert module.entered == [1]


def test_without_transformers_nothing_is_in_the_way(table):
    table.unlink()
    registration.register()
    with pytest.raises(ModuleNotFoundError):
        import_module("some_table")


def test_without_the_runtime_transformers_shows_what_to_install(exports, tmp_path):
    packed = exports("packed", tmp_path).packed
    code = (
        "from transformers import AutoModelForCausalLM as M\n"
        f"try: M.from_pretrained({str(packed)!r})\n"
        "except RuntimeError: raise SystemExit(3)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 3
    assert re.search(rf"^{NOTE} +\| UNEXPECTED", ended.stderr, flags=re.M)
