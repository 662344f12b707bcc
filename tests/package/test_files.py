"""Directories and files are whole or absent, and what they replace is not lost."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.files import check_output_dir, save_directory, save_text
from mrp_lightning.json_files import as_json, read_json


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
    target.mkdir()
    (target / "config.json").write_text("precious")
    with pytest.raises(failure), save_directory(target, overwrite=True) as staging:
        (staging / "new").write_text("half")
        raise failure
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "config.json"]


def test_overwrite_replaces_the_whole_directory(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("x")
    with save_directory(target, overwrite=True) as staging:
        (staging / "new").write_text("y")
    assert [p.name for p in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_output_that_would_cost_data_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("x")
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
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("precious")
    break_renames(monkeypatch, count)
    with (
        pytest.raises(OSError, match="rename 2") as caught,
        save_directory(tmp_path / "model", overwrite=True) as staging,
    ):
        (staging / "new").write_text("y")
    return str(caught.value)


def test_what_could_not_be_replaced_is_put_back(tmp_path, monkeypatch):
    replace_with_failures(tmp_path, monkeypatch, 1)
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "config.json"]


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


def make(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("precious")


def content(directory: Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*"))


@pytest.mark.parametrize(
    "others",
    [
        (".git/HEAD",),
        ("src/thesis.txt",),
        ("notes/model.safetensors",),
        ("README.md",),
        ("adapter.safetensors", *OURS),
        tuple(f"photo{i}.png" for i in range(9)),
    ],
    ids=lambda names: names[0],
)
def test_overwrite_never_costs_what_is_not_ours(others, tmp_path):
    make(tmp_path / "proj", *OURS, *others)
    before = content(tmp_path / "proj")
    with pytest.raises(FileExistsError, match=r"did not write, so it is not replaced") as caught:
        check_output_dir(tmp_path / "proj", overwrite=True)
    assert sum(name in str(caught.value) for name in others) >= min(len(set(others) - {*OURS}), 5)
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
        make(tmp_path / "model", "thesis.txt")
    assert "thesis.txt" in content(tmp_path / "model")


def test_an_empty_directory_of_others_counts_too(tmp_path):
    make(tmp_path / "model", *OURS)
    (tmp_path / "model" / "data").mkdir()
    with pytest.raises(FileExistsError, match="replaced: data"):
        check_output_dir(tmp_path / "model", overwrite=True)


def test_what_a_report_lists_is_ours(tmp_path):
    make(tmp_path / "model", *OURS, "1_Pooling/config.json", "README.md", "LICENSE")
    listed = {"files": ["1_Pooling/config.json", "LICENSE"]}
    (tmp_path / "model" / "export_report.json").write_text(json.dumps(listed))
    (tmp_path / "model" / "README.md").write_text("Pruned with mrp-lightning.")
    check_output_dir(tmp_path / "model", overwrite=True)
    (tmp_path / "model" / "export_report.json").write_text('{"files": 5}')
    with pytest.raises(FileExistsError, match=r"replaced: 1_Pooling/config\.json, LICENSE\."):
        check_output_dir(tmp_path / "model", overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_places_that_are_needed_are_refused(overwrite, tmp_path, monkeypatch):
    work, source = tmp_path / "home" / "work", tmp_path / "models" / "source"
    work.mkdir(parents=True)
    source.mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    wrong = {".": "is the working", "..": "holds the working", str(source): "is what is read"}
    wrong[str(tmp_path / "models")] = "holds what is read"
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


HALF = """
import sys, time
from mrp_lightning.files import save_directory
with save_directory(sys.argv[1]) as staging:
    (staging / "half").write_text("x" * 1000)
    print("writing", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_is_removed_and_that_of_a_live_one_is_not(tmp_path):
    root = str(Path(__file__).parents[2])
    target = tmp_path / "model"

    def writer() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HALF, str(target)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": root},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        return process

    killed, alive = writer(), writer()
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(list(tmp_path.iterdir())) == 2
        with save_directory(target) as staging:
            (staging / "whole").touch()
        (left,) = [path for path in tmp_path.iterdir() if path != target]
        assert (left / "half").exists()
    finally:
        alive.kill()
        alive.wait()
    with save_directory(tmp_path / "other"):
        pass
    assert left.exists()  # it belongs to another name


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
