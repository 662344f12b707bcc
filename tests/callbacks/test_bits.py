"""Pruning and few bits at once: what is saved lies on its grid, whatever else was asked for."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from callbacks import MRPCallback
from mrp_lightning import BlockTuning, CausalLM, Trainer, prune_weight
from mrp_lightning.pruning import block
from mrp_lightning.solver.grid import decompose, grid_of_bits

TUNING = BlockTuning(epochs=2, learning_rate=3e-3, batch_size=2)


@pytest.mark.parametrize(
    ("dtype", "options", "sparsity"),
    [
        (torch.bfloat16, {"pattern": "2:4", "bits": 4, "group_size": 16}, 0.5),
        (
            torch.float32,
            {"sparsity": 0.7, "bits": 3, "method": "JM", "tuning": TUNING, "target": "dense"},
            0.7,
        ),
        (torch.bfloat16, {"bits": 4, "tuning": TUNING}, 0),
    ],
)
def test_what_is_saved_lies_on_its_grid(
    dtype, options, sparsity, llama, loader, quiet, tmp_path, caplog
):
    caplog.set_level("INFO")
    llama().to(dtype).save_pretrained(tmp_path / "dense")
    callback = MRPCallback(**options, save_dir=tmp_path / "out")
    precision = "bf16-true" if dtype is torch.bfloat16 else "32-true"
    module = CausalLM(tmp_path / "dense")
    Trainer(precision=precision, **quiet).predict(module, loader, callbacks=[callback])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert saved.dtype is dtype
    grid = grid_of_bits(options["bits"], options.get("group_size", 64))
    for row in callback.report.layers:
        weight = saved.get_submodule(row.name).weight
        decompose(grid, weight)
        assert float((weight == 0).float().mean()) >= sparsity - 1e-3
        assert row.sparsity == pytest.approx(sparsity, abs=1e-3)
        assert row.grid.bits == options["bits"]
        assert row.grid.zeros_loss + row.grid.grid_loss == pytest.approx(row.loss)
        assert (row.grid.zeros_loss == 0) == (sparsity == 0 and "target" not in options)
    if "tuning" in options:
        assert all(b.error_after <= b.error_before for b in callback.report.blocks)
    report = json.loads((tmp_path / "out" / "pruning_report.json").read_text())
    assert report["config"]["bits"] == options["bits"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"quantised to {options['bits']} bits" in card
    assert f"  bits: {options['bits']}\n" in card
    amount = {0.5: "2:4" if "pattern" in options else "50%", 0.7: "70%", 0: ""}[sparsity]
    said = "+".join(filter(None, [amount, f"{options['bits']}bit"]))
    assert f"Pruned 14 layers to {said} with" in caplog.text


def test_a_layer_gets_what_prune_weight_gives(llama, loader, quiet):
    """Of the first block, whose inputs are the dense model's."""
    model, before = llama(), llama()
    seen = []
    layer = before.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in loader:
            before(batch)
    x = torch.cat(seen)
    callback = MRPCallback(sparsity=0.5, bits=4)
    Trainer(**quiet).predict(model, loader, callbacks=[callback])
    found = prune_weight(layer.weight, 2 * x.T @ x / len(x), sparsity=0.5, bits=4)
    pruned = model.model.layers[0].self_attn.q_proj.weight
    assert (pruned == found.weight).float().mean() > 0.99
    row = callback.report.layers[0]
    assert row.grid.zeros_loss == pytest.approx(found.zeros_loss, rel=1e-3)
    assert row.grid.grid_loss == pytest.approx(found.grid_loss, rel=0.05)


def test_tuned_weights_are_put_on_the_grid_last(llama, loader, quiet, monkeypatch):
    """What a block had after tuning is rounded, and by less than by nearest rounding."""
    tuned, hessians = {}, {}
    put = block.put_layers_on_grid

    def spy(layers, inputs, *args, **options):
        tuned.update({layer.name: layer.weight.clone() for layer in layers})
        hessians.update({layer.name: inputs.hessian for layer in layers})
        return put(layers, inputs, *args, **options)

    monkeypatch.setattr(block, "put_layers_on_grid", spy)
    model = llama()
    callback = MRPCallback(sparsity=0.5, bits=4, group_size=16, tuning=TUNING)
    Trainer(**quiet).predict(model, loader, callbacks=[callback])
    assert len(tuned) == 14
    for row in callback.report.layers:
        before, after = tuned[row.name], model.get_submodule(row.name).weight.detach()
        decompose(grid_of_bits(4, 16), after)  # which raises where it is on none
        assert bool((after[before == 0] == 0).all())
        change, hessian = (after - before).double(), hessians[row.name]
        lost = float(((change @ hessian.double()) * change).sum()) / 2
        assert row.grid.grid_loss == pytest.approx(lost, rel=1e-4)
        nearest = before.clone()
        for start in range(0, before.shape[1], 16):  # with the usual scale, and no error feedback
            group = nearest[:, start : start + 16]
            scale = group.abs().amax(1, keepdim=True).clamp_min(1e-9) / 8
            group.copy_((group / scale).round() * scale)
        change = (nearest - before).double()
        assert lost < float(((change @ hessian.double()) * change).sum()) / 2
