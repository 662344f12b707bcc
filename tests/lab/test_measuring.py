"""The scripts of lab/benchmarks/ that measure whole runs, and all that waits for a GPU."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import gpu
import pytest
import torch
import whole_run

from mrp_lightning.models.loading import load_model, load_tokenizer
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.sequential import prune_model
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.targets.plan import make_plan
from mrp_lightning.text.windows import Draws, segments_of_text, tokenize

ROOT = Path(__file__).parents[2]


def mean_loss(directory, text):
    """The mean relative loss of the run that the table below is about, without a stopwatch."""
    model = load_model(str(directory), torch.float32)
    draws = Draws(count=3, length=24, seed=0)
    windows = segments_of_text(tokenize(load_tokenizer(str(directory)), text), draws, "")
    settings = Settings(method="SM", pattern="2:4")
    job = Job(
        model=model,
        forward=lambda ids: model(input_ids=ids, use_cache=False),
        batches=list(windows.split(1)),
        plan=make_plan(model, settings.recipe.pattern),
        settings=settings,
    )
    losses = [row.relative_loss for x in prune_model(job) for row in x.pruned_rows]
    return sum(losses) / len(losses)


def table(shown):
    """Return the header and the rows of the one table of a page, as cells."""
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    return header, rows


def test_the_parts_of_a_whole_run_add_up(tiny_llama, tmp_path, monkeypatch, capsys):
    text = " ".join(f"{n} sheep and {n * n} goats" for n in range(300))
    (tmp_path / "text.txt").write_text(text)
    command = "whole_run.py --methods SM --samples 3 --length 24 --dtype float32"
    files = [f"--model={tiny_llama}", f"--text={tmp_path / 'text.txt'}"]
    files += [f"--perplexity={tmp_path / 'text.txt'}"]
    monkeypatch.setattr(sys, "argv", [*command.split(), *files])
    monkeypatch.setattr(logging.root.manager, "disable", 0)
    # The measurement itself: the test below starts the process.
    monkeypatch.setattr(whole_run, "in_a_process", whole_run.run)
    whole_run.main()
    header, (row,) = table(capsys.readouterr().out)
    cells = dict(zip(header, row, strict=True))
    assert cells["method"] == "SM"
    assert float(cells["rel. loss"]) == pytest.approx(mean_loss(tiny_llama, text), rel=1e-2)
    assert 1 < float(cells["perplexity"]) < 1e4
    parts = list(cells.values())[3:-3]
    total = float(cells["all CPU s"])
    assert sum(float(cell or 0) for cell in parts) == pytest.approx(total, abs=0.05 * len(parts))


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "OUT", tmp_path)
    monkeypatch.setattr(gpu, "PARTS", {})
    return gpu.PARTS


def test_a_part_is_written_as_it_comes_and_stopped_in_time(parts, tmp_path):
    endless = "import time; print('one row', flush=True); time.sleep(1000)"
    parts["endless"] = lambda: [["-c", endless], ["-c", "print('never')"]]
    assert not gpu.run("endless", [], limit=1.0)
    page = (tmp_path / "endless.md").read_text()
    assert re.search(r"\none row\n\nStopped after 1 s", page)
    assert "\nnever" not in page
    assert page.endswith("Not run: the part had used up its 1 s.\n")


def test_a_part_that_fails_is_told(parts, tmp_path):
    parts["mixed"] = lambda: [["-c", "raise SystemExit(3)"], ["-c", "import sys; print(sys.argv)"]]
    assert not gpu.run("mixed", ["--more"])
    page = (tmp_path / "mixed.md").read_text()
    assert "Status 3" in page
    assert "['-c', '--more']" in page
    parts["good"] = lambda: [["-c", ""]]
    assert gpu.run("good", [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "walk-SM", "--limit", "60"])
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["walk"], "walk: expected tests, speed, torchao"),
        (["torchao", "solver", "--skip"], "need the name of one part"),
    ],
)
def test_parts_and_options_that_do_not_fit_are_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert message in capsys.readouterr().err


def test_every_part_names_files_that_are_there():
    named = [argument for make in gpu.PARTS.values() for command in make() for argument in command]
    scripts = {argument for argument in named if argument.endswith(".py")}
    assert {"lab/benchmarks/solver.py", "tests/solver/test_gpu.py"} <= scripts
    assert all((ROOT / script).is_file() for script in scripts)


def small_command(part, model):
    """The first command of a part, at small sizes on the CPU."""
    small = {"cuda": "cpu", "4096": "64", "128": "2", "2048": "16", "--shape": "--model"}
    small |= {"llama2-7b": str(model)}
    return [small.get(argument, argument) for argument in gpu.PARTS[part]()[0]]


def run(*command):
    folders = os.pathsep.join([str(ROOT), str(ROOT / "lab" / "benchmarks")])
    options = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}}
    options |= {"capture_output": True, "text": True, "check": True}
    return subprocess.run([sys.executable, *command], **options)


def check(shown):
    header, rows = table(shown)
    assert len(rows) >= 1
    assert all(len(row) == len(header) for row in rows)


WITHOUT = """
import json, runpy, sys
sys.modules["jsonargparse"] = None
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        print(error, file=sys.stderr)
"""


def test_speed_and_solver_need_no_package_that_reads_command_lines(tiny_llama):
    commands = [small_command("solver", tiny_llama)]
    if not torch.cuda.is_available():
        commands += gpu.PARTS["speed"]()[:1]
    ended = run("-c", WITHOUT, json.dumps(commands))
    check(ended.stdout)
    if len(commands) > 1:
        assert "speed is measured on a CUDA device, and this machine has none" in ended.stderr


def test_the_commands_of_a_walk_run(tiny_llama, tmp_path):
    (tmp_path / "text.txt").write_text("one two three four " * 100)
    command = small_command("walk-bits", tiny_llama)
    # A real start: the script starts processes of its own, which a fork cannot.
    check(run(*command, "--text", str(tmp_path / "text.txt"), "--blocks", "1").stdout)
