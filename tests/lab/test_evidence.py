"""`python lab/evidence.py`: the runs of a tiny model, its table, and its page."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
import yaml

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")
pytest.importorskip("matplotlib", reason="pages need the extra `report`")

import evidence

from mrp_lightning.commands.main import main
from mrp_lightning.experiments.sweep import read_sweep

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "data.num_samples": 4,
    "data.sequence_length": 32,
    "data.calibration": "text.txt",
    "data.evaluation": {"words": "text.txt"},
    "trainer.limit_test_batches": 2,
}


PROGRAM = "import time; x = bytearray(200_000_000); time.sleep(1); raise SystemExit(3)"


def run_here(arguments):
    """The command of a run in this process, which is started already."""
    assert arguments[:2] == ["-m", "mrp_lightning"]
    try:
        main(arguments[2:])
    except SystemExit as ended:
        return ended.code, 0
    return 0, 123_000_000


@pytest.fixture
def command(tmp_path, monkeypatch, tiny_llama):
    """The arguments of a page about one model, in two sizes that differ by name alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evidence, "run_alone", run_here)
    Path("text.txt").write_text("\n".join(f"value_{i} = compute({i})" for i in range(400)))
    options = {**OPTIONS, "model.model": str(tiny_llama)}
    sweep = {
        "base": [str(ROOT / "configs/sweeps/local.yaml")],
        "models": {name: {"options": options} for name in ("small-words", "large-words")},
        "runs": {"2:4": ["magnitude", "SS"]},
        "seeds": [0, 1],
        "out": "out",
    }
    page = {
        "sweep": ["sweep.yaml"],
        "title": "A title",
        "description": "A protocol.",
        "order": ["*/2of4-magnitude", "large-*/*-seed*"],
        "models": {
            "small": {"weights": 1e6, "grid": "Q4_0", "note": "."},
            "large": {"weights": 1e7, "grid": "bfloat16", "note": "."},
        },
        "table": "evidence.csv",
        "page": "evidence.md",
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    Path("page.yaml").write_text(yaml.safe_dump(page))
    return ["--config=page.yaml"]


def test_runs_become_rows_and_are_not_repeated_on_another_machine(command):
    evidence.main([*command, "--limit=3"])
    rows = pd.read_csv("evidence.csv", dtype=str, keep_default_na=False)
    assert tuple(rows) == evidence.COLUMNS
    assert list(rows["model"]) == ["small", "small", "large"]
    for _, row in rows.iterrows():
        name = "dense" if row["format"] == "dense" else "2of4-magnitude"
        scores = json.loads(Path(f"out/{row['model']}-words/{name}/evaluation.json").read_text())
        assert float(row["perplexity"]) == pytest.approx(
            scores["perplexity"]["words"]["perplexity"], abs=1e-4
        )
        assert row["peak_memory_mb"] == "123"
        assert row["bits_on_disk"] == ("16" if name == "dense" else "9")
    shutil.rmtree("out")
    evidence.main([*command, "--limit=1"])
    assert not Path("out/small-words").exists()
    evidence.main([*command, "--limit=0"])
    page = Path("evidence.md").read_text()
    assert "A protocol." in page
    assert "* large-words: 2" in page, "SparseGPT with two seeds waits"
    assert "2:4 by magnitude, 10 million weights" in page
    assert Path("evidence.svg").read_text().startswith("<?xml")


def test_a_process_gives_its_status_and_its_peak_of_memory():
    status, peak = evidence.run_alone(["-c", PROGRAM])
    assert status == 3
    assert 200e6 < peak < 300e6


def test_a_run_that_fails_is_named_and_the_others_are_made(command):
    Path("text.txt").rename("elsewhere.txt")
    with pytest.raises(SystemExit, match="1 runs failed: small-words/dense"):
        evidence.main([*command, "--limit=1"])
    assert not Path("evidence.csv").exists()


def test_kept_runs_are_those_of_the_evidence(monkeypatch):
    monkeypatch.chdir(ROOT)
    evidence_alone = "--config=configs/sweeps/evidence.yaml"
    kept = read_sweep([evidence_alone, "--config=configs/sweeps/evidence_kept.yaml"])
    assert kept.save_checkpoints
    assert kept.out == "runs/kept"
    assert kept.trials == read_sweep([evidence_alone]).trials


def test_the_committed_table_and_page_fit_the_sweep(monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(["--config=configs/sweeps/evidence.yaml"])
    names = {tuple(evidence.key_of(trial).values()) for trial in sweep.trials}
    models = yaml.safe_load(Path("lab/evidence.yaml").read_text())["models"]
    assert {name for name, *_ in names} == set(models)
    rows = evidence.read_table(Path("lab/results/evidence.csv"))
    made = rows[rows["engine"] == ""]
    assert tuple(rows) == evidence.COLUMNS
    assert {tuple(row) for row in made[evidence.KEY[:-1]].to_numpy()} <= names
    assert not made.duplicated(evidence.KEY).any()
