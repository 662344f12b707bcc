"""`lab/engines.py`: the rows of runs in engines, in the table of the evidence."""

from pathlib import Path

import engines
import pytest

COMMAND = "python -m mrp_lightning sweep --config x.yaml --only "


def row(form: str, method: str = "", engine: str = "", speed: str = "", run: str = "m-t/r"):
    keys = {"model": "m", "format": form, "method": method, "seed": "", "text": "t"}
    return keys | {"tokens_per_second": speed, "engine": engine, "command": COMMAND + run}


def test_a_run_is_found_by_its_command_and_not_by_the_end_of_a_name():
    rows = [row("dense", run="m-t/dense"), row("50%", "SM", run="other-m-t/r"), row("50%", "SM")]
    assert engines.row_of(rows, Path("kept/m-t/r")) is rows[2]
    with pytest.raises(SystemExit, match="0 rows of m-t/s"):
        engines.row_of(rows, Path("kept/m-t/s"))


def test_a_row_comes_after_its_run_and_replaces_an_older_measurement(tmp_path):
    rows = [row("dense"), row("50%", "SM"), row("50%", "SM", "vLLM", "1.0"), row("70%", "SM")]
    made = [row("dense", "", "vLLM", "2.0"), row("50%", "SM", "vLLM", "3.0")]
    engines.write_rows(tmp_path / "table.csv", engines.with_rows(rows, made))
    read = engines.read_rows(tmp_path / "table.csv")
    assert [(each["format"], each["tokens_per_second"]) for each in read] == [
        ("dense", ""), ("dense", "2.0"), ("50%", ""), ("50%", "3.0"), ("70%", "")
    ]  # fmt: skip
