"""What a process imports first decides how Python reads its types."""

import json
import subprocess
import sys

from mrp_lightning.commands import main as command_line

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


_HEAVY = {
    *("torch", "transformers", "lightning", "datasets", "lm_eval", "pandas", "matplotlib"),
    *("torchao", "mrp_sparse"),
}
_NAMES = [*command_line._COMMANDS]
_COMMANDS = [
    *([], ["--help"], ["--version"], ["no"]),
    *([name, *option] for name in _NAMES for option in ([], ["--help"], ["--no=x"])),
    ["prune", "tiny", "--sparsty=0.5"],
]
"""Command lines that end in 0.3 s; torch alone takes more than one."""
_RUN = """
import json, sys
from mrp_lightning.commands.main import main
loaded = {}
for args in json.loads(sys.argv[1]):
    try:
        main(args)
    except SystemExit:
        pass
    loaded[" ".join(args)] = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps(loaded), file=sys.stderr)
"""


def test_help_and_mistakes_wait_for_no_library_that_they_do_not_need():
    command = [sys.executable, "-c", _RUN, json.dumps(_COMMANDS)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = json.loads(ended.stderr.splitlines()[-1])
    assert len(loaded) == len(_COMMANDS)
    for args, modules in loaded.items():
        assert "mrp_lightning" in modules  # the list is whole
        assert not {*modules} & _HEAVY, args
