"""What a process imports first decides how Python reads its types."""

import subprocess
import sys

import pytest

_ASK = """
import sys
from mrp_lightning.commands.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 2, end.code
assert "rich" in sys.modules
from typing import get_args, get_type_hints
from lightning.pytorch import Trainer
print(get_args(get_type_hints(Trainer.__init__)["limit_test_batches"])[0].__name__)
"""
_SWEEP = """
base: []
models: {tiny: {options: {model.model: tiny}}}
runs: {"50%": [SM]}
"""


def test_one_batch_is_not_all_batches_in_a_sweep(tmp_path):
    # A process of its own: in this one Lightning has been imported long ago. It ends where a file
    # is in its way, after what it needs was loaded.
    (tmp_path / "sweep.yaml").write_text(f"{_SWEEP}out: {tmp_path}\n")
    (tmp_path / "results.csv").write_text("not of a sweep")
    command = [sys.executable, "-c", _ASK, "sweep", f"--config={tmp_path / 'sweep.yaml'}"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "results.csv" in asked.stderr
    assert asked.stdout.split()[-1:] == ["int"]


_HEAVY = {"transformers", "lightning", "datasets", "lm_eval", "pandas", "matplotlib", "torchao"}
_LIST = """
import sys
from mrp_lightning.commands.main import main
try:
    main(sys.argv[1:])
finally:
    print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], [], ["predict"], ["predict", "x.yaml"], ["sweep"], ["no"]],
    ids=" ".join,
)
def test_help_and_mistakes_wait_for_no_library_that_they_do_not_need(args):
    command = [sys.executable, "-c", _LIST, *args]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    loaded = set(ended.stderr.splitlines()[-1].split())
    assert "torch" in loaded
    assert not loaded & _HEAVY


@pytest.mark.parametrize(
    "args",
    [
        ["layers", "--help"],
        ["layers"],
        ["zeroshot", "--help"],
        ["report", "--hel"],
        ["prune", "--help"],
        ["prune"],
        ["sweep", "--help"],
        ["sweep", "--onyl=x"],
    ],
    ids=" ".join,
)
def test_a_command_loads_what_it_needs_once_its_options_are_right(args):
    command = [sys.executable, "-c", _LIST, *args]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not set(ended.stderr.splitlines()[-1].split()) & _HEAVY


@pytest.mark.parametrize("module", ["to_sparse", "generate", "benchmark", "to_gguf"])
def test_the_commands_of_export_do_so_too(module):
    code = (
        f"from export.{module} import main;{_LIST.replace('from mrp_lightning.commands.main', '#')}"
    )
    command = [sys.executable, "-c", code, "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--" in ended.stdout
    assert not set(ended.stderr.splitlines()[-1].split()) & _HEAVY
