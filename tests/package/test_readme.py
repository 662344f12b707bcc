"""What the README shows runs, with a tiny model and text in place of the named ones."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    every = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.M | re.S)
    found = [text for name, text in every if name == language]
    assert found, language
    return found


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "def f(x):\\n    return x\\n"}\n' * 400)
    return tmp_path


def test_python_blocks_run(tiny_llama, here):
    model, matrix = blocks("python")
    model = model.replace('"facebook/opt-125m"', repr(str(tiny_llama)))
    model = model.replace('calibration="c4"', 'train_files="text.jsonl"')
    model = model.replace("num_samples=128", "num_samples=2").replace("=2048", "=64")
    names: dict = {}
    exec(model, names)
    assert names["prune"].report.layers
    assert (here / "runs" / "opt-125m-50" / "pruning_report.json").is_file()
    exec(matrix, names)
    assert (names["solution"].weight == 0).float().mean() == 0.5


def commands() -> list[list[str]]:
    """The words of the lines in blocks of commands, without the comments."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_first_run(tiny_llama, here, capsys):
    from mrp_lightning.commands.main import main

    pytest.importorskip("matplotlib", reason="the page needs the extra `report`")
    ours = [words[1:] for words in commands() if words[0] == "mrp-lightning"]
    prune, report, export = ours
    assert [words[0] for words in ours] == ["prune", "report", "export"]
    prune[prune.index("$MODEL")] = str(tiny_llama)
    main([*prune, "--num-samples=2", "--sequence-length=64", "--accelerator=cpu"])
    printed = capsys.readouterr().out
    shown = [line.split("┃")[1:-1] for line in README.splitlines() if line.startswith("┃")]
    columns = [name.strip() for name in shown[0]]
    assert columns[:4] == ["model", "perplexity @512", "× dense", "weights removed"]
    assert all(word in printed for word in ("50% by JM", *columns[2:]))
    main(report)
    assert Path("runs/first/report.html").is_file()
    main(export)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("bitmask layers", "with zeros", "equal bits"))
    assert Path("runs/first-bitmask/config.json").is_file()


def test_the_model_of_the_first_run_is_found_from_anywhere(here):
    """The assignment of `MODEL` is a command of the shell, and prints the directory of a model."""
    (line,) = [line for line in README.splitlines() if line.startswith("MODEL=")]
    code = line.partition('-c "')[2].partition('")')[0]
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert (Path(printed.strip()) / "config.json").is_file()


def test_the_install_line_stays_in_the_tested_range():
    (line,) = [words for words in commands() if words[:2] == ["pip", "install"]]
    assert line[2:4] == ["-c", "constraints.txt"]
    assert {"--extra-index-url", "./mrp_sparse"} <= set(line)
    (extras,) = [word for word in line if word.startswith(".[")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras[2:-1].split(",")) <= set(project["optional-dependencies"])


def test_the_files_to_read_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \|.*\|(.*)\|$", text, flags=re.M)
    named = [(folder, name) for folder, cell in rows for name in re.findall(r"`(\w+\.py)`", cell)]
    assert len(named) > 15
    for folder, name in named:
        packages = ("mrp_lightning", "mrp_sparse", "mrp_ground", "export")
        paths = [ROOT / package / folder / name for package in packages]
        assert any(path.is_file() for path in paths), (folder, name)


def test_the_tour_names_what_its_files_define():
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("### A tour")[2].partition("## ")[0]
    stops = re.findall(r"^\d\. `(.+?\.py)`:(.*?)(?=^\d\. |\n\n)", text, flags=re.M | re.S)
    assert len(stops) == 6
    for file, seen in stops:
        code = (ROOT / "mrp_lightning" / file).read_text()
        for name in re.findall(r"`(?:\w+\.)*(\w+)`", seen):
            assert name in re.findall(r"\w+", code), (file, name)


def test_the_method_page_names_classes_of_the_solver():
    from mrp_lightning.solver import compensations, hessian, masks

    text = (ROOT / "docs/method.md").read_text()
    paths = re.findall(r"`([A-Z][a-z]\w+(?:\.\w+)?)`", text)
    assert len(paths) > 10
    for path in {*paths} - {"NumericalWarning"}:
        name, _, member = path.partition(".")
        (owner,) = {getattr(m, name) for m in (masks, compensations, hessian) if hasattr(m, name)}
        assert not member or hasattr(owner, member), path


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 125
