"""The original codes on the windows of a sweep, with a stand-in for such a code."""

import math
import sys

import original_accuracy
import originals
import pytest
from lightning.pytorch import Trainer

from callbacks import MRPCallback
from mrp_lightning import CausalLM, TextDataModule
from mrp_lightning.experiments.sweep import read_sweep

STAND_IN = '''
class SparseGPT:
    """Magnitude pruning, by the interface of the original code."""

    def __init__(self, layer):
        self.layer, self.H = layer, 0

    def add_batch(self, inputs, outputs):
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        self.H = self.H + rows.T @ rows

    def fasterprune(self, sparsity, prunen=0, prunem=0, blocksize=128, percdamp=0.01):
        weight = self.layer.weight.data
        if prunem:
            groups = weight.view(-1, prunem)
            places = groups.abs().argsort(dim=1, stable=True)[:, :prunen]
            groups.scatter_(1, places, 0.0)
        else:
            count = int(weight.numel() * sparsity)
            weight.view(-1)[weight.abs().flatten().argsort(stable=True)[:count]] = 0.0

    def free(self):
        pass
'''


@pytest.mark.parametrize("setting", ["50%", "2:4"])
def test_gives_what_a_run_of_the_sweep_gives(setting, tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "sparsegpt", raising=False)
    (tmp_path / "sparsegpt.py").write_text(STAND_IN)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{n} sheep and {n * n} goats" for n in range(300)))
    data = {"num_samples": 3, "sequence_length": 24, "batch_size": 2}
    (tmp_path / "base.yaml").write_text(
        f"data: {{train_files: [{text}], eval_files: [{text}], num_samples: 3,"
        " sequence_length: 24, batch_size: 2}\n"
        "trainer: {accelerator: cpu, logger: false, enable_model_summary: false,"
        " callbacks: [{class_path: callbacks.MRPCallback}]}\n"
    )
    (tmp_path / "sweep.yaml").write_text(
        f"base: [base.yaml]\nmodels: {{tiny: {{options: {{model.model: {tiny_llama}}}}}}}\n"
        f'runs: {{"{setting}": [magnitude]}}\nout: {tmp_path / "out"}\n'
    )
    sweep = read_sweep([f"--config={tmp_path / 'sweep.yaml'}"])
    pattern = original_accuracy.parse_setting(setting, "magnitude").pattern
    code = originals.sparsegpt(tmp_path)
    perplexity, loss, seconds = original_accuracy.run(
        code, sweep, "tiny", pattern, seed=1, saved=tmp_path / "saved"
    )

    model = CausalLM(str(tiny_llama))
    prune = MRPCallback(
        method="magnitude", **({"pattern": "2:4"} if ":" in setting else {"sparsity": 0.5})
    )
    windows = TextDataModule(str(text), str(text), seed=1, **data)
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = Trainer(callbacks=[prune], enable_progress_bar=False, **options)
    trainer.predict(model, datamodule=windows)
    (found,) = trainer.test(model, datamodule=windows, verbose=False)
    assert perplexity == pytest.approx(found["perplexity"], rel=1e-3)
    losses = [row.relative_loss for row in prune.report.pruned]
    assert loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-2)
    assert seconds > 0

    kept = CausalLM(str(tmp_path / "saved"))
    (again,) = trainer.test(kept, datamodule=windows, verbose=False)
    assert perplexity == pytest.approx(again["perplexity"], rel=1e-6)
