"""What a process imports first decides how Python reads its types."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from mrp_lightning.commands import main as command_line
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.environment import _PACKAGES

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
_PRUNE = ["prune", str(STDLIB_LLAMA), "--sparsity=0.5"]
_ABSENT = {
    "there is no directory ./absent": ["prune", "./absent", "--sparsity=0.5"],
    "there is no file absent.gguf": ["prune", "absent.gguf", "--sparsity=0.5"],
    "holds no config.json": ["layers", "."],
    "no such file: absent.txt": [*_PRUNE, "--text=absent.txt"],
    "`--text`: the text has 14 bytes": [*_PRUNE, "--text=short.txt"],
    "`--text`: full.jsonl, line 1 is no object": [*_PRUNE, "--text=full.jsonl"],
    "`--out`: .*full exists": [*_PRUNE, "--out=full"],
    "`RUN`: there is no directory no-run": ["distill", "no-run"],
    "`CKPT`: there is no directory": ["export", "absent"],
    "`--out`: .*full exists and is not empty": ["export", "full", "--out=full"],
    "`RUN`: there is no directory absent": ["gguf", "absent"],
    "`--like`: there is no file": ["gguf", "full", "--like=absent.gguf"],
    "`--out` names a file that ends in .gguf": ["gguf", "full", "--out=x"],
    "`DIR`: there is no directory": ["generate", "absent", "--prompt=a"],
    "`--compare`: there is no directory": ["generate", "full", "--prompt=a", "--compare=absent"],
}
"""Commands that name what is not there, or too short, or in the way, by their message."""
_COMMANDS = [
    *([], ["--help"], ["--version"], ["no"]),
    *([name, *option] for name in _NAMES for option in ([], ["--help"], ["--no=x"])),
    ["prune", "tiny", "--sparsty=0.5"],
    *_ABSENT.values(),
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


def test_help_and_mistakes_wait_for_no_library_that_they_do_not_need(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "short.txt").write_text("two words and\n")
    (tmp_path / "full.jsonl").write_text("[]\n")
    command = [sys.executable, "-c", _RUN, json.dumps(_COMMANDS)]
    options = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path}
    ended = subprocess.run(command, **options)
    loaded = json.loads(ended.stderr.splitlines()[-1])
    assert len(loaded) == len(_COMMANDS)
    for args, modules in loaded.items():
        assert "mrp_lightning" in modules  # the list is whole
        assert not {*modules} & _HEAVY, args
    for message in _ABSENT:
        assert re.search(message, ended.stderr), (message, ended.stderr)
    assert "Traceback" not in ended.stderr


_WITHOUT = """
import json, sys
from mrp_lightning.commands.main import main
for packages, args, _ in json.loads(sys.argv[1]):
    sys.modules.update(dict.fromkeys(packages))
    try:
        main(args)
    except SystemExit as end:
        assert end.code == 2, args
    assert "torch" not in sys.modules, args
    for name in packages:
        del sys.modules[name]
"""
_MISSING = [
    (["gguf"], [*_PRUNE, "--gguf=out.gguf"], "gguf"),
    (["accelerate"], ["prune", "model.gguf", "--sparsity=0.5"], "gguf"),
    (["gguf", "accelerate"], ["layers", "model.gguf"], "gguf"),
    (["gguf"], ["gguf", "run"], "gguf"),
    (["datasets"], [*_PRUNE, "--text=table.csv"], "data"),
    (["torchao"], ["export", "run", "--format=torchao"], "torchao"),
    (["lm_eval"], ["zeroshot", "--model", str(STDLIB_LLAMA)], "zeroshot"),
    (["matplotlib"], ["report", "run"], "report"),
]
"""Packages that are missing, a command that needs them, and the extra that has them."""


def test_a_missing_package_is_found_before_work_with_the_command_that_installs_it(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("model.gguf", "table.csv"):
        (tmp_path / name).write_text("text")
    command = [sys.executable, "-c", _WITHOUT, json.dumps(_MISSING)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for line, (packages, _, extra) in zip(ended.stderr.splitlines(), _MISSING, strict=True):
        assert f"({', '.join(packages)}): pip install" in line
        assert line.endswith(f"[{extra}]'")


def test_the_packages_of_an_extra_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    of_project = project["project"]["optional-dependencies"]
    for name, modules in _PACKAGES.items():
        required = {re.split(r"[>=<\[]", line)[0].replace("-", "_") for line in of_project[name]}
        assert required == {*modules}
