"""What goes beyond single layers, in Lightning's predict loop."""

import json

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from callbacks import MRPCallback
from mrp_lightning import BlockTuning, CausalLM, PruningReport, Trainer
from mrp_lightning.errors import TargetError

TUNING = BlockTuning(epochs=2, learning_rate=1e-3)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_all_of_it_together(precision, llama, loader, quiet, tmp_path):
    module = CausalLM(llama())
    callback = MRPCallback(
        sparsity=0.6, target="dense", allocation="output", tuning=TUNING, save_dir=tmp_path / "run"
    )
    Trainer(precision=precision, **quiet).predict(module, loader, callbacks=[callback])
    layers = [m for m in module.model.model.layers.modules() if isinstance(m, nn.Linear)]
    zeros = sum(int((layer.weight == 0).sum()) for layer in layers)
    # Tuning may round a kept weight to zero in bfloat16, and never makes a removed one come back.
    assert zeros >= callback.report.totals["removed"]
    assert callback.report.totals["sparsity"] == pytest.approx(0.6, abs=1e-4)
    stored = json.loads((tmp_path / "run/pruning_report.json").read_text())
    assert stored["config"]["target"] == "dense"
    assert stored["config"]["tuning"]["epochs"] == 2
    assert {"name", "sparsity", "error_before", "error_after", "epoch", "seconds"} == set(
        stored["blocks"][0]
    )
    assert all("loss" in row["target"] for row in stored["layers"])
    assert PruningReport.load(tmp_path / "run/pruning_report.json").blocks == callback.report.blocks
    for parameter in module.parameters():
        assert parameter.requires_grad
        assert parameter.grad is None
        assert not parameter.is_inference()


def test_a_predict_step_without_gradients_cannot_be_tuned(llama, loader, quiet, own):
    class WithoutGradients(own):
        @torch.no_grad()
        def predict_step(self, batch, batch_idx, dataloader_idx=0):
            return super().predict_step(batch, batch_idx, dataloader_idx)

    module = WithoutGradients(llama())
    before = [p.clone() for p in module.parameters()]
    callback = MRPCallback(pattern="2:4", tuning=True)
    with pytest.raises(TargetError, match=r"`predict_step` runs under `torch\.no_grad`"):
        pl.Trainer(callbacks=[callback], devices=1, **quiet).predict(module, loader)
    assert all(map(torch.equal, module.parameters(), before))
