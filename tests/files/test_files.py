"""Single files are replaced in one step, and only if they are ours."""

import errno
import os
import re
import signal

import pytest
from faulty import die, in_child
from safetensors import SafetensorError

from mrp_lightning.commands.command import exit_on_mistake
from mrp_lightning.storage import files
from mrp_lightning.storage.files import check_output_file, naming, save_ours, save_text
from mrp_lightning.storage.outputs import save_file


def test_a_text_replaces_another_in_one_step(tmp_path):
    path = tmp_path / "runs" / "report.json"
    save_text(path, "old")
    save_text(path, "new – ")
    assert path.read_text(encoding="utf-8") == "new – "
    (tmp_path / "ordinary").write_text("x")
    assert path.stat().st_mode == (tmp_path / "ordinary").stat().st_mode
    assert list(path.parent.iterdir()) == [path]


def test_a_text_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    with pytest.raises(UnicodeEncodeError):
        save_text(tmp_path / "file", "half \ud800")
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="directory"):
        save_text(tmp_path / "directory", "x")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["directory", "file"]
    monkeypatch.setattr(files, "token_hex", lambda _: "0")
    (tmp_path / ".text.0.partial").symlink_to(tmp_path / "file")  # is not followed
    with pytest.raises(FileExistsError):
        save_text(tmp_path / "text", "x")
    assert (tmp_path / "file").read_text() == "old"


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

    def save_half():
        with save_file(out, argument="--out") as partial:
            partial.write_text("half")
            die()

    assert in_child(save_half) == signal.SIGKILL
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
