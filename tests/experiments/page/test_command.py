"""`python -m mrp_lightning report`: what it refuses, what it replaces."""

import pytest

pytest.importorskip("matplotlib")

from mrp_lightning.commands.main import main as command_line
from mrp_lightning.errors import FormatError
from mrp_lightning.experiments.report import main
from mrp_lightning.storage.files import MANIFEST


def test_the_command_line_knows_it(tmp_path, save_run, capsys):
    save_run(tmp_path)
    command_line(["report", str(tmp_path)])
    assert "1 run: " in capsys.readouterr().out
    assert (tmp_path / "report.html").is_file()


def test_no_runs_says_what_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no pruning_report.json and no evaluation.json"):
        main([str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="is no directory"):
        main([str(tmp_path / "none")])


def test_hidden_directories_are_passed_over(tmp_path, save_run):
    save_run(tmp_path / ".run.partial")
    with pytest.raises(FileNotFoundError, match="no pruning_report"):
        main([str(tmp_path)])


def test_files_that_cannot_be_read_are_named(tmp_path, save_run, save_perplexity):
    save_run(tmp_path / "run")
    path = tmp_path / "run" / "pruning_report.json"
    whole = path.read_text()
    damaged = {
        whole[:100]: r"run/pruning_report.json is not JSON",
        whole.replace('"2:4"', '"2"'): "run/pruning_report.json .*\n.*`config`: .*pattern",
    }
    for text, message in damaged.items():
        path.write_text(text)
        with pytest.raises(FormatError, match=message):
            main([str(tmp_path)])
    assert not (tmp_path / "report.html").exists()
    path.write_text(whole)
    (tmp_path / "run" / "evaluation.json").write_text("{")
    with pytest.raises(FormatError, match=r"run/evaluation.json is not JSON"):
        main([str(tmp_path)])


def test_a_page_is_written_again_and_other_files_are_not(tmp_path, save_run):
    save_run(tmp_path / "run")
    out = tmp_path / "pages" / "page.html"
    options = [str(tmp_path / "run"), "--out", str(out)]
    main(options)
    main([*options, "--title", "Second"])
    assert "<title>Second</title>" in out.read_text()
    out.write_text("mine")
    with pytest.raises(FileExistsError, match=r"was changed since .*--overwrite"):
        main(options)
    assert out.read_text() == "mine"
    main([*options, "--overwrite"])
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert sorted(p.name for p in out.parent.iterdir()) == [MANIFEST, "page.html"]


def test_out_is_no_directory(tmp_path, save_run):
    save_run(tmp_path)
    with pytest.raises(FileExistsError, match="expected a file"):
        main([str(tmp_path), "--out", str(tmp_path)])
