"""Names of files, classes, extras and versions that a page shows are those of the code."""

import re
import shlex
import tomllib
from pathlib import Path

from mrp_lightning import errors
from mrp_lightning.solver import compensations, hessian, masks

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_the_files_to_read_exist():
    rows = re.findall(r"^\| `(\w+)/` \|.*\|(.*)\|$", CONTRIBUTING, flags=re.M)
    named = [(folder, name) for folder, cell in rows for name in re.findall(r"`(\w+\.py)`", cell)]
    assert len(named) > 15
    for folder, name in named:
        packages = ("mrp_lightning", "mrp_sparse", "mrp_ground", "export")
        assert any((ROOT / package / folder / name).is_file() for package in packages), name


def test_the_tour_names_what_its_files_define():
    tour = CONTRIBUTING.partition("### A tour")[2].partition("## ")[0]
    stops = re.findall(r"^\d\. `(.+?\.py)`:(.*?)(?=^\d\. |\n\n)", tour, flags=re.M | re.S)
    assert len(stops) == 6
    for file, text in stops:
        code = (ROOT / "mrp_lightning" / file).read_text()
        for name in re.findall(r"`(?:\w+\.)*(\w+)`", text):
            assert name in re.findall(r"\w+", code), (file, name)


def test_the_page_of_the_method_names_classes_of_the_solver():
    text = (ROOT / "docs/method.md").read_text("utf-8")
    paths = {*re.findall(r"`([A-Z][a-z]\w+(?:\.\w+)?)`", text)} - {"NumericalWarning"}
    assert len(paths) > 8
    for path in paths:
        name, _, member = path.partition(".")
        (owner,) = {getattr(m, name) for m in (masks, compensations, hessian) if hasattr(m, name)}
        assert not member or hasattr(owner, member), path


def test_the_errors_of_the_reference_exist():
    text = (ROOT / "docs/reference.md").read_text("utf-8")
    named = set(re.findall(r"`(\w+(?:Error|Warning))`", text)) - {"FileExistsError"}
    assert len(named) > 8
    assert all(hasattr(errors, name) for name in named)


def test_the_line_that_installs_names_extras_and_the_tested_versions():
    text = (ROOT / "README.md").read_text("utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^pip install .*$", text, flags=re.M)
    words = shlex.split(line, comments=True)
    assert words[2:4] == ["-c", "constraints.txt"]
    (extras,) = [word for word in words if word.startswith(".[")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[2:-1].split(",")) <= set(project["optional-dependencies"])


def test_the_readme_names_the_two_commands_that_set_up_a_checkout():
    readme, makefile = ((ROOT / name).read_text("utf-8") for name in ("README.md", "Makefile"))
    for target in ("quickstart", "test"):
        assert f"`make {target}`" in readme
        assert re.search(rf"^{target}:", makefile, flags=re.M)
