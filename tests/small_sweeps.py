"""Sweeps of a tiny model, as a user starts them."""

from pathlib import Path

import pytest
import yaml
from quiet import QUIET

BASE = {
    "data": {
        "train_files": ["text.txt"],
        "eval_files": ["text.txt"],
        "num_samples": 4,
        "sequence_length": 32,
        "batch_size": 2,
    },
    "trainer": {**QUIET, "callbacks": [{"class_path": "callbacks.MRPCallback"}]},
}

RECIPES = """
recipes:
  tuned: {method: JM, target: dense, tuning: {epochs: 1, batch_size: 2}, tuning.held_out: 0.5}
  SM+dense: {method: SM, target: dense}
runs: {"2:4": [SM, tuned, SM+dense]}
seeds: [0]
"""


@pytest.fixture
def here(tmp_path, monkeypatch, tiny_llama) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(f"value_{i} = compute({i}) + {i * 7}" for i in range(400))
    Path("text.txt").write_text(lines)
    Path("base.yaml").write_text(yaml.safe_dump(BASE))
    sweep = {
        "base": ["base.yaml"],
        "models": {"tiny": {"options": {"model.model": str(tiny_llama)}}},
        "runs": {"2:4": ["magnitude", "SS", "SM"], "50%": ["SM"]},
        "seeds": [0, 1],
        "out": "out",
    }
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    return tmp_path


def run_sweep(*more: str) -> None:
    from mrp_lightning.commands.main import main  # needs the extra `cli`

    main(["sweep", "--config=sweep.yaml", *more])


def rewrite(path: str, *changed: tuple[str, str]) -> None:
    text = Path(path).read_text()
    for change in changed:
        text = text.replace(*change)
    Path(path).write_text(text)
