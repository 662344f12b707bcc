"""Directories and files are whole or absent, and what they replace is not lost."""

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from faulty import in_child
from safetensors import SafetensorError

from mrp_lightning import files, outputs
from mrp_lightning.cli.command import exit_on_mistake
from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.files import (
    MANIFEST,
    check_output_file,
    naming,
    save_ours,
    save_text,
    write_manifest,
)
from mrp_lightning.journal.journal import journal_path
from mrp_lightning.json_files import as_json, read_json
from mrp_lightning.outputs import check_output_dir, require_writable, save_directory, save_file


def test_a_directory_appears_only_when_it_is_whole(tmp_path):
    target = tmp_path / "runs" / "model"
    with save_directory(target) as staging:
        (staging / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert list(target.parent.iterdir()) == [target]


def test_what_is_written_has_ordinary_permissions(tmp_path):
    (tmp_path / "ordinary").mkdir()
    (tmp_path / "ordinary" / "file").write_text("x")
    with save_directory(tmp_path / "saved") as staging:
        (staging / "file").touch(mode=0o600)
    for name in ("", "file"):
        expected = (tmp_path / "ordinary" / name).stat().st_mode
        assert (tmp_path / "saved" / name).stat().st_mode == expected


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_what_was_there(tmp_path, failure):
    target = tmp_path / "model"
    make(target, "config.json")
    with pytest.raises(failure), save_directory(target, overwrite=True) as staging:
        (staging / "new").write_text("half")
        raise failure
    assert content(tmp_path) == ["model", "model/config.json"]


def test_overwrite_replaces_the_whole_directory(tmp_path):
    target = tmp_path / "model"
    make(target, "config.json")
    with save_directory(target, overwrite=True) as staging:
        (staging / "new").write_text("y")
    assert content(tmp_path) == ["model", "model/new"]


def test_output_that_would_cost_data_is_refused(tmp_path):
    make(tmp_path / "full", "config.json")
    (tmp_path / "empty").mkdir()
    check_output_dir(tmp_path / "empty")
    check_output_dir(tmp_path / "absent" / "below")
    check_output_dir(tmp_path / "full", overwrite=True)
    with pytest.raises(FileExistsError, match=r"`save_dir`: .*full exists and is not empty.*overw"):
        check_output_dir(tmp_path / "full")
    with pytest.raises(FileExistsError, match="`--out`: .*full.*`--overwrite`"):
        check_output_dir(tmp_path / "full", argument="--out")
    with pytest.raises(FileExistsError, match="expected a directory, but .* is a file"):
        check_output_dir(tmp_path / "full" / "config.json", overwrite=True)


@pytest.mark.parametrize("below", ["", "model", "runs/model"])
def test_a_file_in_the_way_is_named_before_any_work(tmp_path, below):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        message = f"`--out` .*: expected a directory, but {re.escape(str(tmp_path / name))} is a"
        with pytest.raises(FileExistsError, match=message):
            check_output_dir(tmp_path / name / below, overwrite=True, argument="--out")


def test_a_mount_point_is_refused_as_it_cannot_be_renamed():
    with pytest.raises(FileExistsError, match="`save_dir`: / is a mount point.* in it"):
        check_output_dir("/", overwrite=True)


def break_renames(monkeypatch, count: int) -> None:
    """The first rename is done; the next ones fail."""
    rename = Path.rename
    done: list[Path] = []

    def rename_or_fail(self: Path, target: Path) -> Path:
        done.append(self)
        if 1 < len(done) <= 1 + count:
            raise PermissionError(f"rename {len(done)}")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_or_fail)


def replace_with_failures(tmp_path: Path, monkeypatch, count: int) -> str:
    make(tmp_path / "model", "config.json")
    break_renames(monkeypatch, count)
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


def test_a_text_replaces_another_in_one_step(tmp_path):
    path = tmp_path / "runs" / "report.json"
    save_text(path, "old")
    save_text(path, "new – ")
    assert path.read_text(encoding="utf-8") == "new – "
    (tmp_path / "ordinary").write_text("x")
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    assert list(path.parent.iterdir()) == [path]


def test_a_text_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        save_text(tmp_path / "file", "half \ud800")
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        save_text(tmp_path / "directory", "x")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["directory", "file"]
    assert (tmp_path / "file").read_text() == "old"


def test_json_has_no_numbers_that_json_lacks():
    content = {"a": [1.5, math.inf], "b": (math.nan, {"c": -math.inf}), "d": [True, None, "NaN"]}
    text = as_json(content)
    assert json.loads(text) == {
        "a": [1.5, None],
        "b": [None, {"c": None}],
        "d": [True, None, "NaN"],
    }
    assert text.endswith("}\n")
    with pytest.raises(TypeError):
        as_json({"path": Path("x")})


OURS = ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "evaluation.json")


def put(directory: Path, *names: str) -> None:
    """Files of somebody."""
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("precious")


def make(directory: Path, *names: str) -> None:
    """A directory that we wrote."""
    put(directory, *names)
    write_manifest(directory)


def content(directory: Path) -> list[str]:
    """The names of all that is there but for manifests."""
    found = (p.relative_to(directory).as_posix() for p in directory.rglob("*"))
    return sorted(name for name in found if Path(name).name != MANIFEST)


@pytest.mark.parametrize(
    "others",
    [
        (".git/HEAD",),
        ("src/thesis.txt",),
        ("notes/model.safetensors",),
        ("README.md",),
        ("models/a/b/weights.safetensors",),
        ("report-figures/holiday/pic.png",),
        ("adapter.safetensors",),
        tuple(f"photo{i}.png" for i in range(9)),
    ],
    ids=lambda names: names[0],
)
def test_overwrite_never_costs_what_is_not_ours(others, tmp_path):
    make(tmp_path / "proj", *OURS)
    put(tmp_path / "proj", *others)
    before = content(tmp_path / "proj")
    with pytest.raises(
        FileExistsError, match=r"did not write, or .*, so it is not replaced"
    ) as caught:
        check_output_dir(tmp_path / "proj", overwrite=True)
    assert sum(name in str(caught.value) for name in others) == min(len(others), 5)
    assert not any(f" {name}" in str(caught.value) for name in OURS)
    with (
        pytest.raises(FileExistsError),
        save_directory(tmp_path / "proj", overwrite=True) as staging,
    ):
        (staging / "x").touch()
    assert content(tmp_path / "proj") == before


def test_what_appeared_meanwhile_is_not_replaced_either(tmp_path):
    make(tmp_path / "model", *OURS)
    with (
        pytest.raises(FileExistsError, match=r"thesis\.txt"),
        save_directory(tmp_path / "model", overwrite=True),
    ):
        put(tmp_path / "model", "thesis.txt")
    assert "thesis.txt" in content(tmp_path / "model")


def test_an_empty_directory_of_others_counts_too(tmp_path):
    make(tmp_path / "model", *OURS)
    (tmp_path / "model" / "data").mkdir()
    with pytest.raises(FileExistsError, match="replaced: data"):
        check_output_dir(tmp_path / "model", overwrite=True)


@pytest.mark.parametrize("change", ["edited", "link", "directory", "pipe"])
def test_what_was_changed_since_is_not_replaced(change, tmp_path):
    model, file = tmp_path / "model", tmp_path / "model" / "README.md"
    make(model, *OURS, "1_Pooling/config.json", "README.md")
    check_output_dir(model, overwrite=True)
    file.unlink()
    if change == "edited":
        file.write_text("Precious")
    elif change == "link":
        (tmp_path / "same").write_text("precious")
        file.symlink_to(tmp_path / "same")
    elif change == "directory":
        put(file, "x")
    else:
        os.mkfifo(file)
    with pytest.raises(FileExistsError, match=r"replaced: README\.md"):
        check_output_dir(model, overwrite=True)


@pytest.mark.parametrize("damage", ["[]", "{", '{"files": 5}', None])
def test_without_a_manifest_nothing_is_replaced(damage, tmp_path):
    make(tmp_path / "model", *OURS)
    manifest = tmp_path / "model" / MANIFEST
    manifest.unlink() if damage is None else manifest.write_text(damage)
    with pytest.raises(FileExistsError, match=r"config\.json, evaluation\.json") as caught:
        check_output_dir(tmp_path / "model", overwrite=True)
    assert ("an older version may have written it" in str(caught.value)) == (damage is None)


def test_what_is_added_later_is_ours_too_and_what_is_changed_is_not(tmp_path):
    make(tmp_path / "model", "README.md")
    save_ours(tmp_path / "model" / "evaluation.json", "{}", adds=True)
    save_ours(tmp_path / "model" / "README.md", "with a perplexity", adds=True)
    make(tmp_path / "model" / "report-figures", "a.png")
    check_output_dir(tmp_path / "model", overwrite=True)
    (tmp_path / "model" / "README.md").write_text("mine")
    save_ours(tmp_path / "model" / "README.md", "mine, and a perplexity", adds=True)
    with pytest.raises(FileExistsError, match=r"replaced: README\.md \(changed\)\. Name"):
        check_output_dir(tmp_path / "model", overwrite=True)


def test_a_single_file_is_replaced_only_if_it_is_ours(tmp_path):
    file = tmp_path / "page.md"
    save_ours(file, "page")
    check_output_file(file, "page")
    file.write_text("mine")
    with pytest.raises(FileExistsError, match=r"`page`: .*page\.md exists and was changed since"):
        check_output_file(file, "page")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(FileExistsError, match="was changed since"):
        check_output_file(file, "page")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="is not known to be written by mrp-lightning"):
        check_output_file(tmp_path / "link", "page")
    with pytest.raises(FileExistsError, match="is a directory"):
        check_output_file(tmp_path, "page")


@pytest.mark.parametrize("overwrite", [False, True])
def test_places_that_are_needed_are_refused(overwrite, tmp_path, monkeypatch):
    work, source = tmp_path / "home" / "work", tmp_path / "models" / "source"
    work.mkdir(parents=True)
    source.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    wrong = {".": "is the working", "..": "holds the working", str(source): "is the source"}
    wrong[str(tmp_path / "models")] = "holds the source"
    for path, message in wrong.items():
        with pytest.raises(FileExistsError, match=f"`save_dir`: .* {message}"):
            check_output_dir(path, overwrite=overwrite, sources=[source])
    check_output_dir("runs/x", sources=[source])
    check_output_dir(tmp_path / "models" / "source-pruned", sources=[source])


def test_a_link_is_followed(tmp_path):
    make(tmp_path / "disk" / "model", *OURS)
    link = tmp_path / "model"
    link.symlink_to(tmp_path / "disk" / "model")
    with save_directory(link, overwrite=True) as staging:
        (staging / "new").touch()
    assert link.is_symlink()
    assert content(tmp_path / "disk" / "model") == ["new"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_where_nothing_can_be_made_is_told_before_any_work():
    with pytest.raises(PermissionError, match="`save_dir`: /proc/x cannot be made in /proc"):
        check_output_dir("/proc/x")


def test_a_disk_that_is_too_full_is_told_before_any_work(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    check_output_dir(tmp_path / "x", num_bytes=free // 2)
    with pytest.raises(OptionError, match=r"will take .* GB, but the disk has .* GB left"):
        check_output_dir(tmp_path / "x", num_bytes=2 * free)


WRITER = """
import sys, time
from pathlib import Path
from mrp_lightning.outputs import save_directory

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


def writer(target: Path, name: str, count: int, delay: float) -> subprocess.Popen[str]:
    """A process that replaces a directory, and is slow to rename."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target), name, str(count), str(delay)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    return process


def test_a_second_writer_waits_for_the_first(tmp_path):
    make(tmp_path / "model", "old")
    first = writer(tmp_path / "model", "first", 1, 0.7)
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
    writers = [writer(tmp_path / "model", name, 25, 0) for name in ("a", "b")]
    ended = [process.communicate(timeout=120) for process in writers]
    assert [process.returncode for process in writers] == [0, 0], ended
    assert content(tmp_path) == ["model", "model/whole"]
    assert (tmp_path / "model" / "whole").read_text() in ("a 24", "b 24")


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


def test_what_stands_where_the_lock_is_to_be_is_named(tmp_path):
    (tmp_path / ".model.lock").mkdir()
    for write in (check_output_dir, lambda path: save_directory(path).__enter__()):
        with pytest.raises(PermissionError, match=r"cannot be locked by \S+\.model\.lock"):
            write(tmp_path / "model")


def test_another_programs_lock_of_that_name_stays(tmp_path):
    (tmp_path / ".model.lock").write_text("pid 5")
    with save_directory(tmp_path / "model") as staging:
        (staging / "a").touch()
    assert (tmp_path / ".model.lock").read_text() == "pid 5"


@pytest.mark.parametrize(
    ("name", "message"),
    [("a" * 245, "a name of 245 bytes, more"), ("a" * 300 + "/x", "300 bytes"), ("a\0b", "a NUL")],
)
def test_names_that_cannot_be_are_told_before_any_work(name, message, tmp_path):
    for check in (check_output_dir, journal_path):
        with pytest.raises(OptionError, match=message):
            check(f"{tmp_path}/{name}")


def test_a_link_that_leads_nowhere_is_called_so(tmp_path):
    (tmp_path / "model").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="model is a link that leads nowhere"):
        check_output_dir(tmp_path / "model")


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
    deleted = done.index(("delete", aside.parent))
    assert placed < done.index(("flush", tmp_path), placed) < deleted
    assert not any(word == "delete" and path == aside.parent for word, path in done[:deleted])


def test_a_text_and_new_directories_are_on_the_disk(done, tmp_path):
    save_text(tmp_path / "a" / "b" / "text", "x")
    words = [(word, path.name) for word, path in done]
    (partial,) = (name for word, name in words if name.endswith(".partial") and word == "flush")
    assert {("flush", tmp_path), ("flush", tmp_path / "a")} <= {*done}
    order = [("flush", partial), ("rename", "text"), ("flush", "b")]
    assert [step for step in words if step in order] == order


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "token_hex", lambda _: "0")
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".text.0.partial").symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError):
        save_text(tmp_path / "text", "x")
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("mode", [0o700, 0o2750, 0o775])
def test_a_directory_keeps_its_mode(mode, tmp_path):
    make(tmp_path / "model", "old")
    (tmp_path / "model").chmod(mode)
    with save_directory(tmp_path / "model", overwrite=True) as staging:
        (staging / "new").touch()
    assert (tmp_path / "model").stat().st_mode & 0o7777 == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("where", ["sticky", "read-only"])
def test_what_another_user_owns_is_refused_before_work(where):
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        model = Path(parent) / "model"
        make(model, "old")
        Path(parent).chmod(0o1777 if where == "sticky" else 0o777)
        model.chmod(0o777 if where == "sticky" else 0o555)
        if where == "read-only":
            os.chown(model, 65534, 65534)

        def check() -> str:
            os.setresuid(65534, 65534, 65534)
            with pytest.raises(PermissionError, match="cannot be replaced") as caught:
                check_output_dir(model, overwrite=True)
            return str(caught.value)

        assert "sticky bit" in in_child(check)


def test_a_deleted_working_directory_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for path in ("model", tmp_path / "model"):
        with pytest.raises(FileNotFoundError, match="the working directory was deleted"):
            check_output_dir(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[1]", "expected a JSON object, got a list"),
    ],
)
def test_json_that_cannot_be_read_is_named(tmp_path, content, said):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(FormatError, match=said) as error:
        read_json(tmp_path / "a.json", "make it again")
    assert str(tmp_path / "a.json") in str(error.value)
    assert str(error.value).endswith("Delete it, or make it again.")


def test_json_of_another_version_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"format_version": 2}')
    assert read_json(tmp_path / "a.json", "make it again", 2) == {"format_version": 2}
    with pytest.raises(FormatError, match=r"`format_version` is 2, but .* reads 1\. Use the"):
        read_json(tmp_path / "a.json", "make it again", 1)


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_file_stays_ours_wherever_its_replacement_is_killed(moves, tmp_path, monkeypatch):
    """Of the manifest, the file, and the manifest again, only the first moves are done."""
    save_ours(tmp_path / "scores.json", "old")
    done = []

    def move(partial, path):
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(path)
        whole(partial, path)

    whole = files.move_durably
    monkeypatch.setattr(files, "move_durably", move)
    with pytest.raises(KeyboardInterrupt):
        save_ours(tmp_path / "scores.json", "new")
    monkeypatch.undo()
    (tmp_path / ".scores.json.0123abcd.partial").write_text("of a killed process")
    assert (tmp_path / "scores.json").read_text() == ("new" if moves == 2 else "old")
    assert files.not_ours(tmp_path) == []
    save_ours(tmp_path / "scores.json", "newer")
    assert files.not_ours(tmp_path) == []
    (tmp_path / "scores.json").write_text("old")
    assert files.not_ours(tmp_path) == ["scores.json (changed)"]


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    out = tmp_path / "model.gguf"
    code = (
        "import os, pathlib, signal\n"
        "from mrp_lightning.outputs import save_file\n"
        f"with save_file(pathlib.Path({str(out)!r}), argument='--out') as partial:\n"
        "    partial.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    (tmp_path / ".model.gguf.12345678.probe").mkdir()
    assert len(list(tmp_path.glob(".model.gguf.*.staging"))) == 1
    with save_file(out, argument="--out") as partial:
        partial.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert out.read_text() == "whole"


def test_an_error_of_a_full_disk_names_the_file_and_the_next_step(tmp_path, monkeypatch, capsys):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit), exit_on_mistake():
        save_text(tmp_path / "a.txt", "a")
    shown = capsys.readouterr().err
    assert re.fullmatch(
        rf"error: {tmp_path}/\.a\.txt\.\w+\.partial cannot be written: No space left on device. "
        r"Make room there, or name a directory on another disk.\n",
        shown,
    )
    assert not [*tmp_path.iterdir()]


def test_a_short_write_of_numpy_names_the_file(tmp_path):
    with pytest.raises(OSError, match="4096 requested and 0 written") as raised, naming(tmp_path):
        raise OSError("4096 requested and 0 written")
    assert raised.value.filename == str(tmp_path)
    with pytest.raises(OSError, match=f"serializing.*{tmp_path}"), naming(tmp_path):
        raise SafetensorError("Error while serializing: no space left")
    with pytest.raises(FileExistsError) as raised, naming(tmp_path):
        raise FileExistsError("as it is")
    assert raised.value.filename is None


def test_leftovers_of_a_power_cut_are_removed(tmp_path):
    staging = tmp_path / ".out.abcdefgh.staging"
    (staging).mkdir()
    (staging / "..mrp_files.json.0123abcd.partial").write_text("{")  # never renamed
    (tmp_path / ".out.abcdefgh.probe").mkdir()
    users = tmp_path / ".out.notes.staging"
    users.mkdir()
    (users / "notes.txt").write_text("mine")
    with save_directory(tmp_path / "out"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"out", users.name}
    (tmp_path / ".out.abcdefgh.probe").mkdir()
    require_writable(tmp_path / "out", "out")
    assert not (tmp_path / ".out.abcdefgh.probe").exists()
