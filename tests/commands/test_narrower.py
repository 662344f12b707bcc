"""Narrower models on the command line: run after run, and every command that takes a directory."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")

from export import to_sparse
from mrp_lightning.commands.main import main
from mrp_lightning.records.evaluation import read
from mrp_lightning.records.report import PruningReport

DATA = ["--data.num_samples=4", "--data.sequence_length=32", "--data.batch_size=2"]
TRAINER = ["--trainer.accelerator=cpu", "--trainer.logger=false"]
PRUNE = "--trainer.callbacks=callbacks.MRPCallback"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def text(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"value_{i} = compute({i}) + {i * 7}" for i in range(400)))
    return [*DATA, f"--data.train_files={path}", f"--data.eval_files={path}"]


def prune(model: Path | str, out: str, text: list[str], *options: str) -> Path:
    given = [f"--trainer.callbacks.{option}" for option in (*options, f"save_dir={out}")]
    main(["predict", f"--model.model={model}", *text, *TRAINER, PRUNE, *given])
    return Path(out)


@pytest.mark.usefixtures("short_library")
def test_neurons_then_heads_then_zeros_and_all_that_follows(tiny_llama, text, capsys, tmp_path):
    """As a user runs it; the losses are those of the model's own forward."""
    first = prune(tiny_llama, "neurons", text, "structure=neurons", "sparsity=0.5")
    second = prune(first, "heads", text, "structure=heads", "sparsity=0.5", "offload=true")
    third = prune(second, "zeros", text, "pattern=2:4")
    config = AutoConfig.from_pretrained(third)
    assert (config.intermediate_size, config.num_key_value_heads) == (32, 1)
    earlier = PruningReport.load(third / "pruning_report.json").provenance["pruned_before"]
    assert [run.get("structure") for run in earlier] == ["neurons", "heads"]

    capsys.readouterr()
    main(["test", f"--model.model={third}", *text, *TRAINER])
    (told,) = read(third).perplexity.values()
    assert f"{told['perplexity']:.6g}"[:6] in capsys.readouterr().out
    assert 1 < told["perplexity"] < 10 * math.exp(8)
    main(["layers", f"--model={third}", "--json"])
    rows = json.loads(capsys.readouterr().out)
    listed = {row["name"]: row for row in rows["layers"]}
    layer = AutoModelForCausalLM.from_pretrained(third).get_submodule(DOWN)
    assert listed[DOWN]["shape"] == list(layer.weight.shape)
    main(["report", str(third), "--out=zeros.md"])
    assert "perplexity" in (tmp_path / "zeros.md").read_text().lower()

    with pytest.raises(SystemExit):
        to_sparse.main([str(second)])
    assert "made narrower by `structure: heads`" in capsys.readouterr().err
    to_sparse.main([str(third)])
    assert (tmp_path / "zeros-sparse24" / "model.safetensors").is_file()


def test_a_narrower_model_is_trained_on(tiny_llama, text, capsys):
    """It stays as narrow, and its report and card come along."""
    first = prune(tiny_llama, "neurons", text, "structure=neurons", "sparsity=0.5")
    before = AutoModelForCausalLM.from_pretrained(first)
    fit = ["fit", f"--model.model={first}", "--model.learning_rate=1e-3", *text, *TRAINER]
    fit += ["--trainer.max_steps=2", "--trainer.callbacks=callbacks.SaveModel"]
    main([*fit, "--trainer.callbacks.save_dir=trained", "--trainer.limit_val_batches=0"])
    after = AutoModelForCausalLM.from_pretrained("trained")
    assert after.config.intermediate_size == 32
    changed = [
        name
        for name, x in after.state_dict().items()
        if not torch.equal(x.float(), before.state_dict()[name].float())
    ]
    assert "model.layers.0.mlp.down_proj.weight" in changed
    report = PruningReport.load(Path("trained/pruning_report.json"))
    assert report.narrowed["kept"] == 32
    assert report.provenance["trained"]["steps"] == 2
    assert "dense, and narrower" in Path("trained/README.md").read_text()
