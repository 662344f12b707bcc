"""The wheel, in an environment of its own: it prunes and packs, away from the source tree."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from export.to_sparse import main as to_sparse
from mrp_lightning import CausalLM, __version__
from mrp_sparse import __version__ as runtime_version
from mrp_sparse.kernels import library

for package in ("build", "hatchling", "auditwheel"):
    pytest.importorskip(package, reason="the wheel is built by the extra `dev`")

ROOT = Path(__file__).parents[2]
PACKAGES = ("mrp_lightning", "callbacks", "export")
DATA = {"FORMAT.md", "pyproject.toml", "README.md", "hatch_build.py"}
"""Files of `mrp_sparse/` that are of its distribution, and not of the package."""


COMPILER = """#!/bin/sh
for word; do case $word in *.so) made=$word;; esac; done
cp "{kernels}/$(basename "$made")" "$made" 2>/dev/null || exec {compiler} "$@"
"""
"""Copies the checkout's library where its name, a digest of sources and flags, is the same."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """The wheels by name, each built from its sdist, as `make dist` does."""
    compiler = tmp_path_factory.mktemp("compiler") / "c++"
    known = {"kernels": library.FOLDER, "compiler": os.environ.get("CXX", "g++")}
    compiler.write_text(COMPILER.format(**known))
    compiler.chmod(0o755)
    out = tmp_path_factory.mktemp("dist")
    (recipe,) = re.findall(r"^dist: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.M)
    scripts = sysconfig.get_path("scripts")
    for name, value in (("$(abspath $(BIN))", scripts), ("$(BIN)", scripts), ("$$", "$")):
        recipe = recipe.replace(name, value)
    command = ["sh", "-ec", re.sub(r"\bdist(?=[/ \n])", str(out), recipe)]
    with_it = os.environ | {"CXX": str(compiler)}
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=with_it)
    assert built.returncode == 0, built.stdout + built.stderr
    names = {"mrp_lightning", "mrp_sparse"}
    assert {path.name for path in out.glob("*.tar.gz")} == {
        f"{name}-{__version__}.tar.gz" for name in names
    }
    return {path.name.partition("-")[0]: path for path in out.glob("*.whl")}


def environment(home: Path, *wheels: Path) -> Path:
    """Return the Python of a new environment with these wheels, which finds all else in ours.

    The packages that they need are found by a path file. An editable installation of ours is one,
    too, and those of a directory that is added by another are not read.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    here = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (purelib,) = home.glob("lib/python*/site-packages")
    (purelib / "needed.pth").write_text("\n".join(here))
    pip = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--force-reinstall", *wheels], check=True)
    return python


@pytest.fixture(scope="module")
def python(wheels, tmp_path_factory) -> Path:
    """The Python of an environment with both wheels."""
    return environment(tmp_path_factory.mktemp("clean"), *wheels.values())


@pytest.fixture(scope="module")
def packed(tiny_llama, tmp_path_factory, shortened) -> Path:
    """A model without two of every four weights of each layer, packed; `pruned` lies beside it."""
    root = tmp_path_factory.mktemp("models")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    for name, module in model.named_modules():
        if name.endswith("proj"):
            module.weight.data.view(-1, 4)[:, :2] = 0
    model.save_pretrained(root / "pruned")
    with shortened():
        to_sparse([str(root / "pruned"), "--out", str(root / "packed")])
    return root / "packed"


def run(*command: str | Path) -> str:
    """What a command prints, run without the paths that this process was given.

    It finds no compiler, and no other program.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env=environment | {"PATH": "/nowhere"},
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_all_that_is_needed_is_in_the_wheel(wheels):
    inside = set(zipfile.ZipFile(wheels["mrp_lightning"]).namelist())
    here = [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert "mrp_lightning/embedded/stdlib-llama/model.safetensors" in here
    assert not [name for name in here if name not in inside]
    for path in (ROOT / "configs").rglob("*.yaml"):
        name = path.relative_to(ROOT).as_posix()
        data = f"mrp_lightning-{__version__}.data/data/share/mrp-lightning/{name}"
        assert data in inside
    ours = (*PACKAGES, f"mrp_lightning-{__version__}.d")
    assert all(name.startswith(ours) for name in inside)


def test_the_runtime_is_in_its_own_wheel(wheels):
    inside = set(zipfile.ZipFile(wheels["mrp_sparse"]).namelist())
    here = {
        path.relative_to(ROOT).as_posix()
        for package in ("mrp_ground", "mrp_sparse")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name not in DATA
    } - {f"mrp_sparse/kernels/{library.path().name}"}
    sources = {name for name in here if name.startswith("mrp_sparse/kernels/cpu/")}
    built = f"mrp_sparse/kernels/{library.path().name}"
    assert {"mrp_sparse/kernels/cpu/operators.cpp", "mrp_ground/errors.py"} <= here
    files = {name for name in inside if ".dist-info/" not in name and not name.endswith("/")}
    assert files == (here - sources) | {built}


def test_the_runtime_has_compiled_kernels_and_loads_a_packed_model_by_itself(
    wheels, python, packed, tmp_path, monkeypatch
):
    """It needs no compiler, and nothing that prunes."""
    monkeypatch.chdir(tmp_path)
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", wheels["mrp_sparse"].name)
    code = """
import json, sys
unwanted = ("mrp_lightning", "callbacks", "export", "lightning", "jsonargparse", "rich", "pydantic")
sys.modules.update(dict.fromkeys(unwanted))  # an import of these fails
import mrp_sparse, torch
from mrp_sparse.formats import bitmask
from mrp_sparse.kernels import library, operator
from transformers import AutoModelForCausalLM
weight, x = torch.eye(8, 40).bfloat16(), torch.arange(120.0).view(3, 40).bfloat16()
values, bits = bitmask.pack(weight)
y = operator.linear_bitmask(x, values, bits, bitmask.row_offsets(bits), None)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
layers = sum(isinstance(m, mrp_sparse.Sparse24Linear) for m in model.modules())
written = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)[0].tolist()
print(json.dumps([library.load(), torch.equal(y, x[:, :8]), library.__file__, layers, written]))
"""
    loaded, is_right, file, layers, written = json.loads(run(python, "-c", code, packed))
    assert (loaded, is_right) == (True, True)
    assert Path(file).is_relative_to(python.parents[1])
    model = AutoModelForCausalLM.from_pretrained(packed.with_name("pruned"))
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)
    assert layers == sum(name.endswith("proj") for name, _ in model.named_modules())
    assert written == expected[0].tolist()


def test_the_wheel_prunes_and_packs_in_another_directory(
    python, packed, tiny_llama, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    configs = python.parents[1] / "share" / "mrp-lightning" / "configs"
    Path("text.txt").write_text("def f(x):\n    return x + 1\n" * 400)
    data = ["--data.train_files=[text.txt]", "--data.num_samples=2", "--data.sequence_length=32"]
    quiet = ["--trainer.logger=false", "--trainer.accelerator=cpu"]
    config = f"--config={configs}/patterns/2of4.yaml"
    save = "--trainer.callbacks.init_args.save_dir=pruned"
    predict = ["predict", config, f"--model.model={tiny_llama}", save, *data, *quiet]
    # A project may have a folder `export` of its own, which Python finds first.
    Path("export").mkdir()
    Path("export/__init__.py").write_text("raise SystemExit('this is mine')\n")
    # All in one process: what is imported takes longer than what is done.
    code = (
        "import mrp_lightning, shutil; print(mrp_lightning.__file__);"
        "from mrp_lightning.embedded import STDLIB_LLAMA; print(STDLIB_LLAMA);"
        f"print(mrp_lightning.CausalLM({str(packed)!r}).model);"
        "shutil.rmtree('export');"
        "from mrp_lightning.commands.main import main;"
        f"main({predict!r}); main(['export', 'pruned'])"
    )
    shown = run(python, "-c", code)
    assert "Sparse24Linear" in shown
    package, model = map(Path, shown.splitlines()[:2])
    assert package.is_relative_to(python.parents[1])
    assert model.is_relative_to(package.parent)
    report = json.loads(Path("pruned/pruning_report.json").read_text())
    assert report["versions"]["mrp_lightning"] == __version__
    assert report["totals"]["sparsity"] == pytest.approx(0.5, abs=1e-3)
    assert not report["totals"]["skipped"]
    assert "Sparse24Linear" in str(CausalLM("pruned-sparse24").model)


def test_the_command_is_installed(python):
    assert "export" in run(python.with_name("mrp-lightning"), "--help")


def test_the_version_is_said_once_and_told_elsewhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ == runtime_version
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert newest
    assert newest[1] == __version__


def test_the_page_of_versions_tells_those_that_are_pinned():
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line
    )
    page = (ROOT / "docs" / "questions.md").read_text()
    for package in ("torch", "transformers", "lightning", "torchao"):
        (version,) = re.findall(
            rf"^\| {package}(?: \(extra\))? \| ([\d.]+) \| \D*[\d.]+", page, flags=re.M
        )[:1]
        assert version == pinned[package], package
