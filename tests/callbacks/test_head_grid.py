"""The output head on a grid of its own, against `prune_weight` on the head's own inputs."""

import json

import pytest
import torch
from ddp_worker import bits
from families import build
from slow_pruning import killed_after
from thread_processes import together
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, BertModel, OPTConfig

from callbacks import MRPCallback
from mrp_lightning import (
    CausalLM,
    HessianAccumulator,
    OptionError,
    PatternError,
    TargetError,
    Trainer,
    prune_weight,
)
from mrp_lightning.pruning import prune_layers
from mrp_lightning.pruning.prune_layers import Calibrated, quantise_head
from mrp_lightning.records import grid_file
from mrp_lightning.records.grid_file import load_parameters
from mrp_lightning.solver.grid import GRIDS, decompose
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import layers_of


def expected_head(pruned, head, dense, batches, grid):
    """Quantise the dense head by the Hessian of its inputs in the pruned model."""
    quantised = head.weight.detach().clone()
    head.weight.data.copy_(dense)  # a tied embedding feeds the head
    inputs = HessianAccumulator(head.in_features)
    hook = head.register_forward_pre_hook(lambda _, args: inputs.update(args[0]))
    with torch.no_grad():
        for batch in batches:
            pruned(batch)
    hook.remove()
    head.weight.data.copy_(quantised)
    return prune_weight(dense, inputs.hessian(), grid=grid)


RUNS = [
    {},
    {"pattern": "2:4", "offload": True},
    {"bits": 4, "target": "dense"},
    {"sparsity": 0.5, "structure": "neurons"},
    {"sparsity": 0.5, "ignore": ["layers.1"]},
]


@pytest.mark.parametrize(
    ("options", "tied"), [*((options, True) for options in RUNS), (RUNS[0], False)], ids=str
)
def test_the_head_is_put_on_its_grid_by_its_own_inputs(options, tied, llama, loader, quiet):
    model = llama(tie_word_embeddings=tied)
    dense = model.lm_head.weight.detach().clone()
    embeddings = model.model.embed_tokens.weight.detach().clone()
    callback = MRPCallback(head_grid="iq4_nl", **options)
    Trainer(**quiet).predict(model, loader, callbacks=[callback])
    expected = expected_head(model, model.lm_head, dense, loader, "iq4_nl")
    assert torch.equal(model.lm_head.weight, expected.weight)
    decompose(GRIDS["iq4_nl"], model.lm_head.weight)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model.model.embed_tokens.weight, embeddings) != tied
    row = callback.report.layers[-1]
    assert (row.name, row.grid.bits, row.sparsity, row.block) == ("lm_head", 4, None, None)
    assert row.loss == row.grid.grid_loss == pytest.approx(expected.loss)
    assert row.tokens == 128
    assert (row.target is None) == ("target" not in options)
    assert callback.report.totals["layers"] == len(callback.report.pruned)


@pytest.mark.parametrize("family", ["gemma3n_text", "opt"])
def test_other_ways_to_walk_give_the_head_its_own_inputs(family, loader, quiet):
    """The blocks of one run only in whole forwards, and the other has layers around its blocks."""
    model, outside = build(family), {"targets": ["up_proj"]}
    if family == "opt":
        sizes = {"word_embed_proj_dim": 32, "hidden_size": 48, "ffn_dim": 32}
        model = AutoModelForCausalLM.from_config(
            OPTConfig(vocab_size=64, num_hidden_layers=2, num_attention_heads=4, **sizes)
        ).eval()
        outside = {"targets": ["q_proj", "project_in"]}
    head = model.get_output_embeddings()
    dense = head.weight.detach().clone()
    callback = MRPCallback(sparsity=0.5, head_grid="q4_0", **outside)
    Trainer(**quiet).predict(model, loader, callbacks=[callback])
    pruned = [row.name for row in callback.report.pruned]
    assert pruned[-1].endswith("lm_head")
    assert any("project_in" in name for name in pruned) == (family == "opt")
    expected = expected_head(model, head, dense, loader, "q4_0").weight
    assert torch.equal(head.weight, expected)


def test_what_is_saved_is_tied_and_says_so(llama, loader, quiet, tmp_path):
    llama(tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path / "dense")
    callback = MRPCallback(pattern="2:4", head_grid="q5_0", save_dir=tmp_path / "out")
    module = CausalLM(tmp_path / "dense")
    Trainer(**quiet).predict(module, loader, callbacks=[callback])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert saved.lm_head.weight is saved.model.embed_tokens.weight
    assert torch.equal(saved.lm_head.weight, module.model.lm_head.weight)
    parameters = load_parameters(tmp_path / "out" / grid_file.NAME)
    assert GRIDS["q5_0"].codes_of(saved.lm_head.weight, parameters["lm_head"]) is not None
    report = json.loads((tmp_path / "out" / "pruning_report.json").read_text())
    assert report["config"]["head_grid"] == "q5_0"
    assert report["layers"][-1]["name"] == "lm_head"
    assert report["layers"][-1]["sparsity"] is None
    card = (tmp_path / "out" / "README.md").read_text()
    assert "the output head on the grid `q5_0`" in card
    assert '  head_grid: "q5_0"\n' in card


def test_a_run_goes_on_with_the_same_bits(llama, loader, quiet, tmp_path):
    """Killed after the first block, before the head, and after it."""
    llama(tie_word_embeddings=True).save_pretrained(tmp_path / "dense")

    def run(name, streaming=False):
        module = CausalLM(tmp_path / "dense", streaming=streaming)
        options = {"bits": 4, "target": "dense", "save_dir": tmp_path / name}
        callback = MRPCallback(head_grid="iq4_nl", **options)
        Trainer(**quiet).predict(module, loader, callbacks=[callback])
        return callback.report

    run("whole")
    whole = bits(AutoModelForCausalLM.from_pretrained(tmp_path / "whole"))
    for entries, streaming in ((1, False), (2, True), (3, False)):
        name = f"parts-{entries}"
        with killed_after(entries):
            run(name, streaming)
        report = run(name, streaming)
        assert report.resumed_blocks == entries
        assert [row.name for row in report.layers][-1] == "lm_head"
        assert bits(AutoModelForCausalLM.from_pretrained(tmp_path / name)) == whole


@torch.no_grad()
def test_rows_in_parts_and_in_processes_get_the_weights_that_all_get_at_once(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    hessian = 2 * x.T @ x / 300
    dense = torch.randn(101, 64, generator=generator).bfloat16()
    recipe = Recipe.of(method="SM", head_grid="iq4_nl").for_head

    @torch.no_grad()  # a thread has a mode of its own
    def quantised(processes=None):
        linear = nn.Linear(64, 101, bias=False, dtype=torch.bfloat16)
        linear.weight.copy_(dense)
        options = {} if processes is None else {"processes": processes}
        calibrated = Calibrated(InputHessian(hessian), tokens=300)
        layer = layers_of("head", linear)[0]
        result = quantise_head(layer, calibrated, recipe, **options)
        codes = GRIDS["iq4_nl"].codes_of(linear.weight, result.grid)
        assert codes is not None  # the parameters give these weights
        return linear.weight.detach(), result.row

    monkeypatch.setattr(prune_layers, "ELEMENTS", 64 * 20)
    expected = prune_weight(dense, hessian, grid="iq4_nl")
    energy = float((dense.double() @ x.double().T).square().sum()) / 300
    for weight, row in [quantised(), *together(2, quantised)]:
        # Sums over other numbers of rows are rounded differently, which decides between two codes.
        assert (weight == expected.weight).float().mean() > 0.999
        assert row.loss == pytest.approx(expected.loss, rel=1e-3)
        assert row.relative_loss == pytest.approx(row.loss / energy, rel=1e-3)
        change = (weight - dense).double()
        assert row.loss == pytest.approx(
            float((change @ x.double().T).square().sum()) / 300, rel=1e-3
        )
    assert row.damping == pytest.approx(0.01 * float(hessian.diagonal().mean()))


class Plain(nn.Module):
    """A module that names no output head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_does_not_go_is_refused_by_name_before_any_work(llama, loader, quiet):
    for options, message in (
        ({"head_grid": "q4"}, "`head_grid` must be one of q3_k"),
        ({"head_grid": "q4_0", "targets": "q_proj"}, "`head_grid` alone .*`targets`"),
        ({"head_grid": "q4_0", "tuning": True, "target": "dense"}, "`target`, `tuning`"),
    ):
        with pytest.raises(OptionError, match=message):
            MRPCallback(**options)

    def predict(model, **options):
        callback = MRPCallback(head_grid="q4_0", **options)
        Trainer(**quiet).predict(model, loader, callbacks=[callback])

    with pytest.raises(TargetError, match="linear output head.*Plain has none"):
        predict(Plain(), sparsity=0.5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    with pytest.raises(TargetError, match="BertModel has none"):
        predict(BertModel(BertConfig(vocab_size=64, **sizes)), sparsity=0.5)
    with pytest.raises(OptionError, match="`targets` names lm_head"):
        predict(llama(), sparsity=0.5, targets=["lm_head"])
    with pytest.raises(PatternError, match="`head_grid` q4_0 does not fit lm_head: 48 columns"):
        predict(llama(hidden_size=48), sparsity=0.5)
