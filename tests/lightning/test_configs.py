"""Every YAML file is read by the real command line, with a tiny model in place of the named one."""

from pathlib import Path

import pytest

from callbacks import MRPCallback
from mrp_lightning.cli import PruningCLI

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
MODELS = sorted((CONFIGS / "models").glob("*.yaml"))
PATTERNS = sorted((CONFIGS / "patterns").glob("*.yaml"))
DATA = sorted((CONFIGS / "data").glob("*.yaml"))
WHOLE = [CONFIGS / "quickstart.yaml", *sorted((CONFIGS / "train").glob("*.yaml"))]


def cli(*args: str | Path) -> PruningCLI:
    return PruningCLI([str(arg) for arg in args], run=False)


def test_every_file_is_covered_here():
    assert sorted([*MODELS, *PATTERNS, *DATA, *WHOLE]) == sorted(CONFIGS.rglob("*.yaml"))
    assert {path.stem for path in MODELS} >= {
        "opt-125m",
        "llama-2-7b",
        "bloom-560m",
        "mamba-130m",
    }
    assert all([PATTERNS, DATA, WHOLE])


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda path: path.stem)
@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.stem)
def test_a_model_and_a_pattern_make_a_run(model, pattern, tiny_llama, tmp_path):
    made = cli(
        *("--config", model, "--config", pattern, "--model.model", tiny_llama),
        *("--trainer.callbacks.init_args.save_dir", tmp_path / "out"),
    )
    (pruning,) = [c for c in made.trainer.callbacks if isinstance(c, MRPCallback)]
    assert pruning.save_dir is not None
    assert made.datamodule.sequence_length == 2048
    assert made.datamodule.dataset is not None
    named = PruningCLI.__name__ and made.config.model.model
    assert named == str(tiny_llama)


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_a_whole_run(path, tiny_llama):
    tokenizer = "--model.tokenizer", tiny_llama
    made = cli("--config", path, "--model.model", tiny_llama, *tokenizer)
    assert made.trainer.callbacks


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_data(path, tiny_llama):
    assert cli("--data", path, "--model.model", tiny_llama).datamodule.num_samples > 0
