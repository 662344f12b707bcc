"""Outputs that cannot be written, or would cost what is not ours, are refused before any work."""

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from faulty import in_child
from owned_files import OURS, content, make, put

from mrp_lightning.errors import OptionError
from mrp_lightning.journal.journal import journal_path
from mrp_lightning.storage.files import MANIFEST, save_ours
from mrp_lightning.storage.outputs import check_output_dir, save_directory


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
        kind = "a file" if name == "file" else "a link that leads nowhere"
        message = (
            f"`--out` .*: expected a directory, but {re.escape(str(tmp_path / name))} is {kind}"
        )
        with pytest.raises(FileExistsError, match=message):
            check_output_dir(tmp_path / name / below, overwrite=True, argument="--out")


def test_a_mount_point_is_refused_as_it_cannot_be_renamed():
    with pytest.raises(FileExistsError, match="`save_dir`: / is a mount point.* in it"):
        check_output_dir("/", overwrite=True)


@pytest.mark.parametrize(
    "others",
    [
        (".git/HEAD",),
        ("README.md",),
        ("models/a/b/weights.safetensors",),
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
    with pytest.raises(FileExistsError), save_directory(tmp_path / "proj", overwrite=True):
        pytest.fail("it was replaced")
    assert content(tmp_path / "proj") == before


def test_what_appeared_meanwhile_is_not_replaced_either(tmp_path):
    """An empty directory of others counts, too."""
    make(tmp_path / "model", *OURS)
    with (
        pytest.raises(FileExistsError, match=r"thesis\.txt"),
        save_directory(tmp_path / "model", overwrite=True),
    ):
        put(tmp_path / "model", "thesis.txt")
    (tmp_path / "model" / "thesis.txt").unlink()
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
    with pytest.raises(FileExistsError, match=r"config\.json, evaluation\.json"):
        check_output_dir(tmp_path / "model", overwrite=True)


def test_what_is_added_later_is_ours_too_and_what_is_changed_is_not(tmp_path):
    make(tmp_path / "model", "README.md")
    save_ours(tmp_path / "model" / "evaluation.json", "{}", adds=True)
    save_ours(tmp_path / "model" / "README.md", "longer", adds=True)
    make(tmp_path / "model" / "report-figures", "a.png")
    check_output_dir(tmp_path / "model", overwrite=True)
    (tmp_path / "model" / "README.md").write_text("mine")
    save_ours(tmp_path / "model" / "README.md", "mine, and more", adds=True)
    with pytest.raises(FileExistsError, match=r"replaced: README\.md \(changed\)\. Name"):
        check_output_dir(tmp_path / "model", overwrite=True)


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


def test_a_disk_that_is_too_full_is_told_before_any_work(tmp_path):
    if Path("/proc/self").exists():  # where nothing can be made
        with pytest.raises(PermissionError, match="`save_dir`: /proc/x cannot be made in /proc"):
            check_output_dir("/proc/x")
    free = shutil.disk_usage(tmp_path).free
    check_output_dir(tmp_path / "x", num_bytes=free // 2)
    with pytest.raises(OptionError, match=r"will take .* GB, but the disk has .* GB left"):
        check_output_dir(tmp_path / "x", num_bytes=2 * free)


def test_what_stands_where_the_lock_is_to_be_is_named(tmp_path):
    (tmp_path / ".model.lock").mkdir()
    for write in (check_output_dir, lambda path: save_directory(path).__enter__()):
        with pytest.raises(PermissionError, match=r"cannot be locked by \S+\.model\.lock"):
            write(tmp_path / "model")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/tmp/" + "a" * 245, "a name of 245 bytes, more"),
        ("a" * 300 + "/x", "300 bytes"),
        ("", "'' cannot be a path"),
        ("a\0b", "a NUL"),
        ("~no_such_user/x", r"'~no_such_user/x' begins with the home directory"),
    ],
)
def test_names_that_cannot_be_are_told_before_any_work(path, message):
    for check in (check_output_dir, journal_path):
        with pytest.raises(OptionError, match=message):
            check(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_read_only_directory_is_refused_before_work():
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        model = Path(parent) / "model"
        make(model, "old")
        Path(parent).chmod(0o777)
        model.chmod(0o555)
        os.chown(model, 65534, 65534)

        def check() -> str:
            os.setresuid(65534, 65534, 65534)
            with pytest.raises(PermissionError, match="cannot be replaced") as caught:
                check_output_dir(model, overwrite=True)
            return str(caught.value)

        assert "may not be written" in in_child(check)


def test_a_deleted_working_directory_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for path in ("model", tmp_path / "model"):
        with pytest.raises(FileNotFoundError, match="the working directory was deleted"):
            check_output_dir(path)
