"""A follower is imported right after the module that it extends."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from mrp_ground.upstream import import_after


@pytest.fixture
def table(tmp_path: Path, monkeypatch):
    """A table that is there once its file is right, and plug-ins that ask for it."""
    (tmp_path / "some_table.py").write_text("raise RuntimeError('not yet')")
    (tmp_path / "some_plugins.py").write_text("import some_table; some_table.entered.append(1)")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "some_table.py"
    for name in ("some_table", "some_plugins", "others"):
        sys.modules.pop(name, None)


def test_plug_ins_follow_the_table_once(table):
    finders = [*sys.meta_path]
    import_after("some_table", "some_plugins")
    import_after("some_table", "some_plugins")
    assert "some_plugins" not in sys.modules
    with pytest.raises(RuntimeError, match="not yet"):
        import_module("some_table")
    table.write_text("entered = []")
    module = import_module("some_table")
    assert module.entered == [1]
    assert sys.meta_path == finders
    assert module.__loader__ is module.__spec__.loader
    assert Path(module.__loader__.get_filename()) == table
    import_after("some_table", "some_plugins")  # both are there: nothing is left to do
    assert sys.meta_path == finders


def test_plug_ins_that_fail_are_asked_for_again(table):
    finders = [*sys.meta_path]
    plugins = table.with_name("some_plugins.py")
    works = plugins.read_text()
    plugins.write_text("raise RuntimeError('not yet')")
    table.write_text("entered = []")
    import_after("some_table", "some_plugins")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not yet"):
            import_module("some_table")
    plugins.write_text(works)
    assert import_module("some_table").entered == [1]
    assert sys.meta_path == finders


def test_a_table_that_is_there_gets_its_plug_ins_at_once(table):
    table.write_text("entered = []")
    module = import_module("some_table")
    import_after("some_table", "some_plugins")
    assert module.entered == [1]


def test_without_transformers_nothing_is_in_the_way(table):
    table.unlink()
    import_after("some_table", "some_plugins")
    with pytest.raises(ModuleNotFoundError):
        import_module("some_table")


def test_a_table_may_have_two_followers(table):
    table.with_name("others.py").write_text("import some_table; some_table.entered.append(2)")
    import_after("some_table", "some_plugins")
    import_after("some_table", "others")
    table.write_text("entered = []")
    assert sorted(import_module("some_table").entered) == [1, 2]
