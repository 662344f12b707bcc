"""Directories and files are whole or absent, and what they replace is not lost."""

import json
import math
import re
from pathlib import Path

import pytest

from mrp_lightning.files import as_json, check_output_dir, save_directory, save_text


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
    (target / "old").write_text("precious")
    with pytest.raises(failure), save_directory(target, overwrite=True) as staging:
        (staging / "new").write_text("half")
        raise failure
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "old"]


def test_overwrite_replaces_the_whole_directory(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")
    with save_directory(target, overwrite=True) as staging:
        (staging / "new").write_text("y")
    assert [p.name for p in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_output_that_would_cost_data_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    (tmp_path / "empty").mkdir()
    check_output_dir(tmp_path / "empty")
    check_output_dir(tmp_path / "absent" / "below")
    check_output_dir(tmp_path / "full", overwrite=True)
    with pytest.raises(FileExistsError, match=r"`save_dir`: .*full exists and is not empty.*overw"):
        check_output_dir(tmp_path / "full")
    with pytest.raises(FileExistsError, match="`--out`: .*full.*`--overwrite`"):
        check_output_dir(tmp_path / "full", argument="--out")
    with pytest.raises(FileExistsError, match="expected a directory, but .* is a file"):
        check_output_dir(tmp_path / "full" / "x", overwrite=True)


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
    (tmp_path / "model" / "old").write_text("precious")
    break_renames(monkeypatch, count)
    with (
        pytest.raises(OSError, match="rename 2") as caught,
        save_directory(tmp_path / "model", overwrite=True) as staging,
    ):
        (staging / "new").write_text("y")
    return str(caught.value)


def test_what_could_not_be_replaced_is_put_back(tmp_path, monkeypatch):
    replace_with_failures(tmp_path, monkeypatch, 1)
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "old"]


def test_what_cannot_be_put_back_survives_and_is_found(tmp_path, monkeypatch):
    message = replace_with_failures(tmp_path, monkeypatch, 2)
    (kept,) = re.findall(r"is in (\S+): move it to (\S+)\.", message)
    assert (Path(kept[0]) / "old").read_text() == "precious"
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
