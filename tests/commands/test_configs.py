"""Every YAML file is read by the real command line, with a tiny model in place of the named one."""

import shutil
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from callbacks import MRPCallback, SaveModel
from mrp_lightning.commands.lightning_cli import PruningCLI, _LightningParser
from mrp_lightning.commands.prune import _RECIPES
from mrp_lightning.loop.causal_lm import CausalLM

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
MODELS = sorted((CONFIGS / "models").glob("*.yaml"))
PATTERNS = sorted((CONFIGS / "patterns").glob("*.yaml"))
DATA = sorted((CONFIGS / "data").glob("*.yaml"))
TRAIN = sorted((CONFIGS / "train").glob("*.yaml"))


def cli(*args: str | Path) -> PruningCLI:
    return PruningCLI([str(arg) for arg in args], run=False)


def test_every_file_is_covered_here():
    elsewhere = {"paper", "sweeps", "zeroshot"}  # tests/{experiments,zeroshot} read them
    found = [path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in elsewhere]
    recipes = [CONFIGS / "recipes" / f"{name}.yaml" for name in _RECIPES]
    assert sorted([*MODELS, *PATTERNS, *DATA, *TRAIN, *recipes]) == sorted(found)
    assert {path.stem for path in MODELS} >= {"opt-125m", "llama-2-7b", "bloom-560m", "mamba-130m"}
    assert all([PATTERNS, DATA])


@pytest.mark.parametrize(
    ("model", "pattern"),
    list(islice(zip(cycle(MODELS), cycle(PATTERNS)), max(len(MODELS), len(PATTERNS)))),
    ids=lambda path: path.stem,
)
def test_a_model_and_a_pattern_make_a_run(model, pattern, tiny_llama, tmp_path):
    made = cli(
        *("--config", model, "--config", pattern, "--model.model", tiny_llama),
        *("--trainer.callbacks.init_args.save_dir", tmp_path / "out"),
    )
    (pruning,) = [c for c in made.trainer.callbacks if isinstance(c, MRPCallback)]
    assert pruning.save_dir is not None
    assert made.datamodule.sequence_length == 2048
    assert made.datamodule.calibration == ("lambada" if "mamba" in model.stem else "c4")
    assert list(made.datamodule.evaluation) == ["wikitext2", "ptb", "c4"]
    assert made.trainer.limit_test_batches == 1.0, "all windows, no more and no fewer"


@pytest.mark.parametrize("name", _RECIPES)
def test_a_recipe_is_that_of_prune(name, tiny_llama):
    made = cli(
        *("--config", CONFIGS / "recipes" / f"{name}.yaml", "--model.model", tiny_llama),
        "--trainer.callbacks.init_args.pattern=2:4",
    )
    (pruning,) = [c for c in made.trainer.callbacks if isinstance(c, MRPCallback)]
    assert pruning.state_key == MRPCallback(pattern="2:4", **_RECIPES[name]).state_key
    assert f"{name}.yaml" in (ROOT / "docs" / "methods.md").read_text()


@pytest.mark.parametrize(
    "family",
    [path for path in TRAIN if path.stem not in ("text", "finetune", "distill")],
    ids=lambda path: path.stem,
)
def test_training_a_family(family, tiny_llama, tmp_path):
    made = cli(
        *("--config", CONFIGS / "train" / "text.yaml", "--config", family),
        *("--model.tokenizer", tiny_llama),
        *("--trainer.callbacks.init_args.save_dir", tmp_path / "out"),
    )
    assert made.model.model.config.model_type == family.stem
    assert made.trainer.max_steps >= 400
    assert any(isinstance(callback, SaveModel) for callback in made.trainer.callbacks)


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_data(path, tiny_llama):
    made = cli("--data", path, "--model.model", tiny_llama)
    assert (made.datamodule.num_samples, made.datamodule.sequence_length) == (128, 2048)


def test_fine_tuning_keeps_the_zeros(tiny_llama, tmp_path):
    pruned, tuned = tmp_path / "pruned", tmp_path / "tuned"
    shutil.copytree(tiny_llama, pruned)
    tensors = load_file(pruned / "model.safetensors")
    zeros = {}
    for name, tensor in tensors.items():
        if "proj" in name:
            tensor.view(-1, 4)[:, :2] = 0
            zeros[name] = tensor == 0
    save_file(tensors, pruned / "model.safetensors", {"format": "pt"})
    (tmp_path / "text.txt").write_text("import this\n" * 4000)
    made = cli(
        *("--config", CONFIGS / "train" / "finetune.yaml", "--model.model", pruned),
        *("--data.train_files", tmp_path / "text.txt", "--data.sequence_length", 64),
        *("--trainer.max_steps", 3, "--model.warmup_steps", 1),
        *("--trainer.callbacks.init_args.save_dir", tuned),
    )
    made.trainer.fit(made.model, made.datamodule)
    after = load_file(tuned / "model.safetensors")
    assert all(torch.equal(after[name] == 0, kept) for name, kept in zeros.items())
    assert not any(torch.equal(after[name], tensors[name].bfloat16()) for name in zeros)


def test_the_file_of_a_model_is_named_and_not_read_as_yaml(tmp_path):
    """jsonargparse would read a checkpoint of 1 GB as text, at every parse."""
    file = tmp_path / "model.gguf"
    file.write_text("{vocab_size: 7}")
    parser = _LightningParser()
    parser.add_lightning_class_args(CausalLM, "model")
    assert parser.parse_args([f"--model.model={file}"]).model.model == str(file)


def test_distillation_keeps_the_zeros(tiny_llama, tmp_path):
    student = tmp_path / "student"
    shutil.copytree(tiny_llama, student)
    tensors = load_file(student / "model.safetensors")
    zeros = {
        name: torch.rand_like(tensor) < 0.5 for name, tensor in tensors.items() if "proj" in name
    }
    save_file(
        tensors | {name: tensors[name].masked_fill(zero, 0) for name, zero in zeros.items()},
        student / "model.safetensors",
        {"format": "pt"},
    )
    out = tmp_path / "out"
    made = PruningCLI(
        [
            *("fit", "--config", str(CONFIGS / "train/distill.yaml"), "--trainer.accelerator=cpu"),
            *(f"--model.student={student}", f"--model.teacher={tiny_llama}"),
            *("--data.tokens=320", "--data.sequence_length=32"),
            f"--trainer.callbacks.save_dir={out}",
        ]
    )
    assert made.trainer.global_step == 5
    learned = load_file(out / "model.safetensors")
    assert all(not learned[name][zero].any() for name, zero in zeros.items())
    assert any(not torch.equal(learned[name], tensors[name]) for name in zeros)
