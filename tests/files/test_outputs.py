"""A directory is written aside, and moved into place when it is whole; no crash costs anything."""

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from faulty import at_call, changed, die, in_child
from owned_files import OURS, content, make, put
from warm import Piped

from mrp_lightning.storage import files, outputs
from mrp_lightning.storage.files import MANIFEST, save_text
from mrp_lightning.storage.outputs import check_output_dir, require_writable, save_directory


def test_a_directory_appears_when_it_is_whole_with_ordinary_permissions(tmp_path):
    put(tmp_path / "ordinary", "file")
    target = tmp_path / "runs" / "model"
    with save_directory(target) as staging:
        (staging / "file").touch(mode=0o600)
        (staging / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert list(target.parent.iterdir()) == [target]
    for name in ("", "file"):
        expected = (tmp_path / "ordinary" / name).stat().st_mode
        assert (target / name).stat().st_mode == expected


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_what_was_there(tmp_path, failure):
    target = tmp_path / "model"
    make(target, "config.json")
    with pytest.raises(failure), save_directory(target, overwrite=True) as staging:
        (staging / "new").write_text("half")
        raise failure
    assert content(tmp_path) == ["model", "model/config.json"]


def replace_with_failures(tmp_path: Path, monkeypatch, count: int) -> str:
    """The first rename is done; the next ones fail."""
    make(tmp_path / "model", "config.json")
    rename, done = Path.rename, list[Path]()

    def rename_or_fail(self: Path, target: Path) -> Path:
        done.append(self)
        if 1 < len(done) <= 1 + count:
            raise PermissionError(f"rename {len(done)}")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_or_fail)
    with (
        pytest.raises(OSError, match="rename 2") as caught,
        save_directory(tmp_path / "model", overwrite=True) as staging,
    ):
        (staging / "new").write_text("y")
    return str(caught.value)


def test_what_could_not_be_replaced_is_put_back(tmp_path, monkeypatch):
    replace_with_failures(tmp_path, monkeypatch, 1)
    assert content(tmp_path) == ["model", "model/config.json"]


def test_what_cannot_be_put_back_survives_and_is_found(tmp_path, monkeypatch):
    message = replace_with_failures(tmp_path, monkeypatch, 2)
    (kept,) = re.findall(r"is in (\S+): move it to (\S+)\.", message)
    assert (Path(kept[0]) / "config.json").read_text() == "precious"
    assert kept[1] == str(tmp_path / "model")
    assert "rename 3" in message


def test_a_link_is_followed(tmp_path):
    make(tmp_path / "disk" / "model", *OURS)
    link = tmp_path / "model"
    link.symlink_to(tmp_path / "disk" / "model")
    with save_directory(link, overwrite=True) as staging:
        (staging / "new").touch()
    assert link.is_symlink()
    assert content(tmp_path / "disk" / "model") == ["new"]


WRITER = """
import sys, time
from pathlib import Path
from mrp_lightning.storage.outputs import save_directory

target, name, count, delay = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
rename = Path.rename

def slow(self, to):
    time.sleep(delay)
    return rename(self, to)

Path.rename = slow
for number in range(count):
    with save_directory(target, overwrite=True) as staging:
        (staging / "whole").write_text(f"{name} {number}")
        if not number:
            print("writing", flush=True)
        time.sleep(delay)
"""


def writer(*options: Any) -> Piped:
    """A process that replaces a directory, and is slow to rename."""
    return Piped(["-c", WRITER, *options])


def test_a_second_writer_waits_for_the_first(tmp_path):
    make(tmp_path / "model", "old")
    first = writer(tmp_path / "model", "first", 1, 0.5)
    assert first.stdout.readline() == "writing\n"
    with pytest.raises(FileExistsError, match="another process is writing"):
        check_output_dir(tmp_path / "model", overwrite=True)
    with save_directory(tmp_path / "model", overwrite=True) as staging:
        assert first.wait(30) == 0
        assert (tmp_path / "model" / "whole").read_text() == "first 0"
        (staging / "whole").write_text("second")
    assert content(tmp_path) == ["model", "model/whole"]
    assert (tmp_path / "model" / "whole").read_text() == "second"


def test_two_writers_at_once_lose_nothing(tmp_path):
    writers = [writer(tmp_path / "model", name, 12, 0) for name in ("a", "b")]
    ended = [process.communicate() for process in writers]
    assert [process.returncode for process in writers] == [0, 0], ended
    assert content(tmp_path) == ["model", "model/whole"]
    assert (tmp_path / "model" / "whole").read_text() in ("a 11", "b 11")


def test_what_a_killed_process_left_is_removed_and_what_is_not_ours_stays(tmp_path):
    target = tmp_path / "model"
    killed = writer(target, "killed", 1, 60)
    assert killed.stdout.readline() == "writing\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    put(tmp_path / ".model.mine.staging", "thesis.txt")
    make(tmp_path / "elsewhere", "data")
    (tmp_path / ".model.link.staging").symlink_to(tmp_path / "elsewhere")
    others = [".model.link.staging", ".model.mine.staging", "elsewhere"]
    assert len(list(tmp_path.iterdir())) == 2 + len(others)  # the lock and the staging
    with save_directory(tmp_path / "other"):
        pass
    assert len(list(tmp_path.glob(".model.*.staging"))) == 3  # they belong to another name
    with save_directory(target) as staging:
        (staging / "whole").touch()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, "model", "other"])
    assert content(tmp_path / "elsewhere") == ["data"]


def kill_after(renames: int, target: Path) -> None:
    """Replace a directory in a process that is killed after some renames of the replacement."""

    def replace() -> None:
        with save_directory(target, overwrite=True) as staging:
            (staging / "new").write_text("y")

    with changed((Path, "rename", at_call(renames, None, die))):
        assert in_child(replace) == signal.SIGKILL


@pytest.mark.parametrize("restores", [check_output_dir, save_directory])
def test_what_a_killed_process_moved_aside_is_put_back(restores, tmp_path):
    target = tmp_path / "model"
    make(target, "old")
    kill_after(1, target)
    assert not target.exists()
    with pytest.raises(FileExistsError, match="not empty"):  # as before the kill
        if restores is check_output_dir:
            check_output_dir(target)
        else:
            save_directory(target).__enter__()
    assert (target / "old").read_text() == "precious"
    with save_directory(target, overwrite=True) as staging:
        (staging / "new").touch()
    assert content(tmp_path) == ["model", "model/new"]


def test_what_a_killed_process_may_have_replaced_stays_and_is_named(tmp_path, caplog):
    """The only copy of the old content, if others made the directory after the kill."""
    target = tmp_path / "model"
    make(target, "old")
    kill_after(1, target)
    (aside,) = tmp_path.glob(".model.*.old")
    make(target, "evaluation.json")
    with save_directory(target, overwrite=True):
        pass
    assert (aside / "model" / "old").read_text() == "precious"
    assert f"{aside / 'model'} still holds what {target} held before" in caplog.text


@pytest.mark.parametrize("renames", [2, 3])
def test_a_kill_after_the_replacement_costs_nothing(renames, tmp_path):
    target = tmp_path / "model"
    make(target, "old")
    kill_after(renames, target)
    assert content(target) == ["new"]
    with save_directory(target, overwrite=True) as staging:
        (staging / "newer").touch()
    assert content(target) == ["newer"]
    left = [path for path in tmp_path.iterdir() if path != target]
    assert [path.suffix for path in left] == ([".old"] if renames == 2 else [])


def test_what_was_replaced_is_named_if_the_replacement_is_not_on_the_disk(
    tmp_path, monkeypatch, caplog
):
    target, flush = tmp_path / "model", files.flush

    def fail_at_the_end(path: Path) -> None:
        if path == tmp_path and (target / "new").exists():
            raise OSError(5, "Input/output error", str(path))
        flush(path)

    make(target, "old")
    monkeypatch.setattr(outputs, "flush", fail_at_the_end)
    with (
        pytest.raises(OSError, match="Input/output"),
        save_directory(target, overwrite=True) as staging,
    ):
        (staging / "new").touch()
    (old,) = tmp_path.glob(".model.*.old/model")
    assert (old / "old").read_text() == "precious"
    assert f"{old} still holds what {target} held before" in caplog.text


def test_another_programs_lock_of_that_name_stays(tmp_path):
    (tmp_path / ".model.lock").write_text("pid 5")
    with save_directory(tmp_path / "model") as staging:
        (staging / "a").touch()
    assert (tmp_path / ".model.lock").read_text() == "pid 5"


@pytest.mark.parametrize("when", ["written", "renamed"])
def test_a_staging_that_is_deleted_by_others_costs_nothing(when, tmp_path, monkeypatch):
    rename = Path.rename

    def rename_what_is_gone(self: Path, target: Path) -> Path:
        if self.suffix == ".staging":
            shutil.rmtree(self)
        return rename(self, target)

    make(tmp_path / "model", "old")
    if when == "renamed":
        monkeypatch.setattr(Path, "rename", rename_what_is_gone)
    with (
        pytest.raises(OSError, match="No such file"),
        save_directory(tmp_path / "model", overwrite=True) as staging,
    ):
        if when == "written":
            shutil.rmtree(staging)
    assert content(tmp_path) == ["model", "model/old"]


@pytest.fixture
def done(monkeypatch) -> list[tuple[str, Path]]:
    """What is done to the disk, in its order: files flushed, renamed to, and deleted."""
    done: list[tuple[str, Path]] = []
    flush, rename, replace, unlink = files.flush, Path.rename, Path.replace, Path.unlink
    rmtree = shutil.rmtree

    def told(word: str, function, which: int = 0):
        def call(*args, **kwargs):
            done.append((word, Path(args[which])))
            return function(*args, **kwargs)

        return call

    for module in (files, outputs):
        monkeypatch.setattr(module, "flush", told("flush", flush))
    monkeypatch.setattr(Path, "rename", told("rename", rename, 1))
    monkeypatch.setattr(Path, "replace", told("rename", replace, 1))
    monkeypatch.setattr(Path, "unlink", told("delete", unlink))
    monkeypatch.setattr(shutil, "rmtree", told("delete", rmtree))
    return done


def test_all_is_on_the_disk_before_what_was_there_goes(done, tmp_path):
    target = tmp_path / "model"
    make(target, "old")
    done.clear()
    with save_directory(target, overwrite=True) as staging:
        put(staging, "a", "b/c")
        done.clear()
    placed = done.index(("rename", target))
    flushed = {path for word, path in done[:placed] if word == "flush"}
    assert flushed >= {staging, *(staging / name for name in ("a", "b", "b/c", MANIFEST))}
    (aside,) = (path for word, path in done if word == "rename" and path.parent.suffix == ".old")
    assert done.index(("rename", aside)) < done.index(("flush", aside.parent)) < placed
    deleted = done.index(("rename", staging))  # whose content may be deleted
    assert placed < done.index(("flush", tmp_path), placed) < deleted
    assert not {("delete", path) for path in (aside, aside.parent, staging)} & {*done[:deleted]}


def test_a_text_and_new_directories_are_on_the_disk(done, tmp_path):
    save_text(tmp_path / "a" / "b" / "text", "x")
    words = [(word, path.name) for word, path in done]
    (partial,) = (name for word, name in words if name.endswith(".partial") and word == "flush")
    assert {("flush", tmp_path), ("flush", tmp_path / "a")} <= {*done}
    order = [("flush", partial), ("rename", "text"), ("flush", "b")]
    assert [step for step in words if step in order] == order


@pytest.mark.parametrize("mode", [0o700, 0o2775])
def test_a_directory_keeps_its_mode(mode, tmp_path):
    make(tmp_path / "model", "old")
    (tmp_path / "model").chmod(mode)
    with save_directory(tmp_path / "model", overwrite=True) as staging:
        (staging / "new").touch()
    assert (tmp_path / "model").stat().st_mode & 0o7777 == mode


def test_leftovers_of_a_power_cut_are_removed(tmp_path):
    staging = tmp_path / ".out.abcdefgh.staging"
    (staging).mkdir()
    (staging / "..mrp_files.json.0123abcd.partial").write_text("{")  # never renamed
    users = tmp_path / ".out.notes.staging"
    users.mkdir()
    (users / "notes.txt").write_text("mine")
    with save_directory(tmp_path / "out"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"out", users.name}
    require_writable(tmp_path / "new", "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out", users.name}
