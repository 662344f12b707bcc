"""`python lab/page.py`: pages about the runs of a sweep of a tiny model."""

import json
import re
import textwrap
from pathlib import Path

import pytest
import yaml

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")
pytest.importorskip("matplotlib", reason="pages need the extra `report`")

import page
from small_sweeps import BASE

from mrp_lightning.commands import numbers
from mrp_lightning.commands.main import main

PAGES = Path(__file__).parents[2] / "lab" / "pages"
TUNED = {
    "method": "JM",
    "target": "dense",
    "tuning": {"epochs": 1, "batch_size": 2},
    "tuning.held_out": 0.5,
}
VARY = {
    "trainer.callbacks.init_args.damping": [0.1, 0.01],
    "model.dtype": ["float32", "bfloat16"],
}


@pytest.fixture
def sweep(tmp_path, monkeypatch, tiny_llama):
    """Make the runs of a sweep, and its page."""
    monkeypatch.chdir(tmp_path)
    lines = (f"value_{i} = compute({i}) + {i * 7}" for i in range(400))
    Path("text.txt").write_text("\n".join(lines))
    Path("base.yaml").write_text(yaml.safe_dump(BASE))

    def make(*options: str, **content) -> str:
        models = {"someone/a model": {"options": {"model.model": str(tiny_llama)}}}
        content = {"base": ["base.yaml"], "models": models, "out": "out"} | content
        Path("sweep.yaml").write_text(yaml.safe_dump(content))
        main(["sweep", "--config=sweep.yaml"])
        page.main(["--sweep=[sweep.yaml]", "--out=docs/page.md", *options])
        return Path("docs/page.md").read_text()

    return make


def test_a_page_shows_methods_claims_blocks_and_texts(sweep):
    runs = {"2:4": ["magnitude", "SS", "SM", "tuned"], "50%": ["SM"]}
    text = sweep("--continuations=true", "--weights=true", runs=runs, recipes={"tuned": TUNED})
    assert "SM is better than SparseGPT" in text
    assert "python -m mrp_lightning sweep --config sweep.yaml" in text
    cells = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| 2:4 |")]
    assert [name for _, name in cells] == ["magnitude", "SparseGPT", "SM", "tuned"]
    directory = Path("out/someone/a model/2of4-tuned-seed0")
    report = json.loads((directory / "pruning_report.json").read_text())
    for block in report["blocks"]:
        errors = map(numbers.relative_loss, (block["error_before"], block["error_after"]))
        assert f"| 2:4, tuned | {block['name']} | {' | '.join(errors)} |" in text
    recorded = json.loads((directory / "evaluation.json").read_text())
    written = recorded["continuations"]["text"]["continuation"].strip("\n")
    assert "2:4 tuned:\n" + textwrap.indent(written, "    ") in text
    assert "Windows of the evaluation text have no BOS before them." in text
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert "page/someone-a-model-perplexity.svg" in pictures
    assert all(Path("docs", picture).is_file() for picture in pictures)
    drawn = Path("docs/page/someone-a-model-perplexity.svg").read_text()
    assert all(f">{name}</text>" in drawn for name in ("magnitude", "SparseGPT", "tuned", "2:4"))
    assert ">50%</text>" not in drawn  # one result is no comparison
    assert ">perplexity above the dense model" in drawn


def test_ablations_are_drawn_over_numbers_alone(sweep):
    text = sweep(runs={"2:4": ["SS", "SM"]}, vary=VARY)
    picture = Path("docs/page/someone-a-model-damping-2of4.svg")
    drawn = picture.read_bytes()
    assert "](page/someone-a-model-damping-2of4.svg)" in text
    assert "Smaller damping is better" in text
    assert not list(picture.parent.glob("*dtype*"))  # values without an order are on no axis
    picture.unlink()
    page.main(["--sweep=[sweep.yaml]", "--out=docs/page.md"])
    assert picture.read_bytes() == drawn


@pytest.mark.parametrize("name", ["page.md", "page/mine.svg"])
def test_pages_of_others_are_refused(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(FileExistsError, match=Path(name).name):
        page.main(["--sweep=[none.yaml]", f"--out={tmp_path}/page.md"])
    assert (tmp_path / name).read_text() == "mine"


def test_a_page_of_no_runs_is_not_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = PAGES.parents[1] / "configs" / "sweeps" / "quickstart.yaml"
    with pytest.raises(SystemExit, match="no finished runs. Run: python -m mrp_lightning sweep"):
        page.main([f"--sweep=[{config}]", "--out=page.md"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", sorted(PAGES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_page_of_results_can_be_made(path):
    content = yaml.safe_load(path.read_text())
    docs_page = page.DocsPage(**content)
    root = PAGES.parents[1]
    assert docs_page.out == f"runs/pages/{path.stem}.md"
    assert all((root / config).is_file() for config in docs_page.sweep)
    results = root / "lab" / "results" / f"{path.stem}.md"
    assert docs_page.title in results.read_text().splitlines()[0]
