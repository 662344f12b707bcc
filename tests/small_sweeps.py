"""Sweeps of a tiny model, as a user starts them; one of them is made once and copied."""

import shutil
from pathlib import Path

import pytest
import yaml
from quiet import QUIET

BASE = {
    "data": {
        "train_files": ["text.txt"],
        "eval_files": ["test.txt"],
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


def run_sweep(*more: str) -> None:
    from mrp_lightning.commands.main import main  # needs the extra `cli`

    main(["sweep", "--config=sweep.yaml", *more])


def rewrite(path: str, *changed: tuple[str, str]) -> None:
    text = Path(path).read_text()
    for change in changed:
        text = text.replace(*change)
    Path(path).write_text(text)


def write_files(directory: Path, model: Path) -> None:
    """A sweep, and all that its runs read."""
    lines = "\n".join(f"value_{i} = compute({i}) + {i * 7}" for i in range(80))
    for name in ("text.txt", "test.txt"):
        (directory / name).write_text(lines)
    shutil.copytree(model, directory / "model")
    (directory / "base.yaml").write_text(yaml.safe_dump(BASE))
    sweep = {
        "base": ["base.yaml"],
        "models": {"tiny": {"options": {"model.model": "model"}}},
        "runs": {"2:4": ["magnitude", "SS", "SM"], "50%": ["SM"]},
        "seeds": [0, 1],
        "out": "out",
    }
    (directory / "sweep.yaml").write_text(yaml.safe_dump(sweep))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> Path:
    """The files of a sweep, in the working directory."""
    write_files(tmp_path, tiny_llama)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """The directory of a sweep that made four runs, with their models; not to be changed."""
    directory = tmp_path_factory.mktemp("sweep")
    write_files(directory, tiny_llama)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        run_sweep("--save_checkpoints=true", "--only=tiny/2of4-[Sm][Ma]*")
    return directory


@pytest.fixture
def finished(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these runs, in the working directory."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
