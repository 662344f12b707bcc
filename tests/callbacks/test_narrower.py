"""Whole neurons and heads: the narrower model against the same model with zeros in their place."""

import json
from types import SimpleNamespace

import pytest
import torch
from families import batches, build
from lightning.pytorch import Trainer as LightningTrainer
from quiet import QUIET
from slow_pruning import report_of, stopped_at
from thread_processes import together
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import mrp_lightning
from callbacks import MRPCallback
from mrp_lightning import CausalLM, MethodError, OptionError, SaveError, TargetError, Trainer
from mrp_lightning.errors import OutOfMemoryError
from mrp_lightning.narrowing.cutting import BlockTrial, narrow
from mrp_lightning.narrowing.unit_parts import narrowing_plan
from mrp_lightning.processes import ALONE
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.prune_layers import Calibrated
from mrp_lightning.pruning.sequential import prune_model
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.pruning.units import UnitRemover
from mrp_lightning.records.report import PruningReport
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.plan import make_plan

NEURONS = [
    *("llama", "gemma2", "opt", "opt_350m", "gpt2", "gpt_neox", "gptj", "falcon", "phi"),
    *("bert", "distilbert", "vit", "t5"),
]
HEADS = ["llama", "qwen2", "qwen3", "gemma2", "phi", "mixtral", "vit"]
REFUSED = {
    ("bloom", "neurons"): "has none of the entries",
    ("phi3", "neurons"): "gate_up_proj.weight holds several projections in one",
    ("mixtral", "neurons"): "experts.gate_up_proj holds several projections in one",
    ("mamba", "neurons"): "a MambaForCausalLM cannot be made narrower",
    ("opt", "heads"): "num_attention_heads: model.decoder.layers.0 has none",
    ("gpt2", "heads"): "num_attention_heads: transformer.h.0 has none",
    ("phi3", "heads"): "one weight holds queries, keys and values",
    ("falcon", "heads"): "head_dim follows from other entries",
    ("olmo2", "heads"): "without some of its heads would lose more than those",
}


def narrower(model, loader, tmp_path, **options):
    """Prune a model, and give the callback and the directory."""
    if isinstance(loader, list):
        loader = DataLoader(loader, batch_size=None)
    callback = MRPCallback(save_dir=tmp_path / "narrower", **{"sparsity": 0.5} | options)
    Trainer(**QUIET).predict(model, loader, callbacks=[callback])
    return callback, tmp_path / "narrower"


class Spy:
    """What the model gives with the removed units as zeros, just before they are cut out."""

    def __init__(self, monkeypatch, model, inputs):
        from mrp_lightning.loop import pruning_run

        self.zeroed, real = [], pruning_run.narrow

        def narrow(structure, config):
            with torch.no_grad():
                self.zeroed += [model(**x).logits for x in inputs]
            self.counts = [
                int((layer.weight == 0).all(0).sum())
                for parts in structure.blocks.values()
                for layer in parts.consumers
            ]
            real(structure, config)

        monkeypatch.setattr(pruning_run, "narrow", narrow)


@pytest.mark.parametrize(
    ("family", "structure"), [*((f, "neurons") for f in NEURONS), *((f, "heads") for f in HEADS)]
)
def test_the_saved_model_is_ordinary_and_gives_the_same(family, structure, tmp_path, monkeypatch):
    model, inputs = build(family), batches(family)
    weights = sum(p.numel() for p in model.parameters())
    spy = Spy(monkeypatch, model, inputs)
    sparsity = 0.25 if structure == "neurons" else 0.5
    callback, saved = narrower(
        model, [dict(x) for x in inputs], tmp_path, structure=structure, sparsity=sparsity
    )
    with torch.no_grad():
        now = [model(**x).logits for x in inputs]
        loaded, told = type(model).from_pretrained(saved, output_loading_info=True)
        again = [loaded.eval()(**x).logits for x in inputs]
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for zeroed, mine, theirs in zip(spy.zeroed, now, again, strict=True):
        torch.testing.assert_close(mine, zeroed, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(theirs, mine, rtol=1e-6, atol=1e-6)
    narrowed = callback.report.narrowed
    assert narrowed["model_weights"] == sum(p.numel() for p in loaded.parameters()) < weights
    assert narrowed["structure"] == structure
    if structure == "neurons":
        assert narrowed["kept"] % 32 == 0
    for name, value in narrowed["config"].items():
        assert getattr(loaded.config, name) == value
    assert len(set(spy.counts)) == 1
    report = PruningReport.load(saved / "pruning_report.json")
    assert report.narrowed == narrowed
    assert all(row.gap <= 1e-5 for row in report.pruned)
    assert "dense, and narrower" in (saved / "README.md").read_text()


@pytest.mark.parametrize(("family", "structure"), REFUSED)
def test_what_cannot_be_narrower_is_refused_by_name(family, structure, tmp_path):
    model = build(family)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(TargetError) as refused:
        narrower(model, batches(family), tmp_path, structure=structure)
    assert REFUSED[family, structure] in str(refused.value)
    assert f"`structure: {structure}`" in str(refused.value)
    assert not (tmp_path / "narrower").exists()
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"structure": "columns"}, OptionError, "must be one of neurons, heads, experts"),
        ({"pattern": "2:4", "sparsity": None}, OptionError, "Leave out `pattern`"),
        ({"targets": "mlp", "allocation": "output"}, OptionError, "`allocation`, `targets`"),
        ({"block_size": 64, "tolerance": 0.1}, OptionError, "`block_size`, `tolerance`"),
        ({"bits": 4}, OptionError, "Remove neurons in a first run, .* in a second one"),
        ({"grid": "q4_0"}, OptionError, "no `bits` or `grid` in one run"),
        ({"method": "SS"}, MethodError, "SS does not remove whole columns"),
        ({"method": "magnitude", "target": "dense"}, MethodError, "`target: dense` moves"),
    ],
)
def test_what_does_not_go_with_it_is_refused_at_once(options, error, message):
    with pytest.raises(error, match=message):
        MRPCallback(**{"structure": "neurons", "sparsity": 0.25} | options)


@pytest.mark.parametrize(
    ("sparsity", "structure", "message"),
    [
        (0.05, "neurons", "would remove none. Give at least"),
        (0.95, "neurons", "would leave none. Give at most"),
        (0.25, "heads", "of 2 heads a block would remove none. Give at least 0.5"),
    ],
)
def test_too_little_and_too_much(sparsity, structure, message, llama, loader, tmp_path):
    model = llama(intermediate_size=128)
    with pytest.raises(OptionError, match=message):
        narrower(model, loader, tmp_path, structure=structure, sparsity=sparsity)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_number_of_heads_that_transformers_refuses_is_refused_with_the_nearest(
    family, loader, tmp_path
):
    """A validator wants the hidden size to be a multiple of the number of heads."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "head_dim": 8, "max_position_embeddings": 64}
    if family != "gpt_neox":
        heads |= {"num_key_value_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads)).eval()
    options = {"structure": "heads", "sparsity": 0.25}
    if family == "gpt_neox":  # no number passes, since its queries, keys and values are one weight
        with pytest.raises(TargetError, match="a GPTNeoXForCausalLM cannot be made narrower"):
            narrower(model, loader, tmp_path, **options)
        return
    with pytest.raises(OptionError, match=r"leave 3 of 4 heads.*takes is 2: give `sparsity` 0\.5"):
        narrower(model, loader, tmp_path, **options)
    callback, saved = narrower(model, loader, tmp_path, structure="heads", sparsity=0.5)
    assert callback.report.narrowed["kept"] == 2
    assert AutoModelForCausalLM.from_pretrained(saved).config.num_attention_heads == 4


def test_a_fraction_far_from_the_asked_one_is_said(llama, loader, tmp_path, caplog):
    narrower(llama(), loader, tmp_path, structure="heads", sparsity=0.4)
    assert "`sparsity` 0.4 of 2 heads a block removes 1 of them, which is 50%." in caplog.text


def test_zeros_that_compensation_would_fill_are_said(llama, loader, tmp_path, caplog):
    model = llama()
    for block in model.model.layers:
        block.mlp.down_proj.weight.data[:, ::2] = 0
    narrower(model, loader, tmp_path, structure="neurons", sparsity=0.5)
    count = len(model.model.layers)
    assert f"{count} layers lost single weights before" in caplog.text


def test_the_least_that_a_message_names_is_enough(llama, loader, tmp_path):
    _, saved = narrower(
        llama(intermediate_size=128), loader, tmp_path, structure="neurons", sparsity=0.125
    )
    assert json.loads((saved / "config.json").read_text())["intermediate_size"] == 96


def test_wide_models_and_own_modules(llama, loader, own, tmp_path):
    """A user's module that holds a transformers model is narrowed; one of plain layers is not."""
    module = own(llama())
    callback = MRPCallback(structure="neurons", sparsity=0.25, save_dir=tmp_path / "narrower")
    LightningTrainer(**QUIET, callbacks=[callback]).predict(module, loader)
    assert module.net.config.intermediate_size == 32
    assert module.net.model.layers[1].mlp.up_proj.weight.shape == (32, 32)
    plain = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    with pytest.raises(TargetError, match="needs a transformers model"):
        Trainer(**QUIET).predict(
            plain,
            DataLoader([torch.randn(4, 8)], batch_size=None),
            callbacks=[MRPCallback(structure="neurons", sparsity=0.5)],
        )


@pytest.mark.parametrize("structure", ["neurons", "heads"])
def test_it_aims_at_the_dense_model_is_tuned_and_goes_on(structure, llama, tmp_path):
    """An interrupted run ends with the bits of one that was not, and tuning changes all layers."""
    tuning = mrp_lightning.BlockTuning(epochs=1, learning_rate=1e-3, batch_size=2)
    options = {"structure": structure, "sparsity": 0.5, "target": "dense", "tuning": tuning}
    windows = torch.randint(3, 64, (16, 32), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(windows, batch_size=4)
    whole, model = tmp_path / "whole", llama(intermediate_size=96)
    before = model.model.layers[0].mlp.gate_proj.weight.clone()
    callback = MRPCallback(save_dir=whole, **options)
    Trainer(**QUIET).predict(model, loader, callbacks=[callback])
    assert any(block.epoch for block in callback.report.blocks)
    assert not any(
        torch.equal(row, old)
        for row, old in zip(model.model.layers[0].mlp.gate_proj.weight, before, strict=False)
    )

    with stopped_at(1, UnitRemover):
        narrower(llama(intermediate_size=96), loader, tmp_path, **options)
    again = MRPCallback(save_dir=tmp_path / "narrower", **options)
    resumed = llama(intermediate_size=96)
    Trainer(**QUIET).predict(resumed, loader, callbacks=[again])
    assert again.report.resumed_blocks == 1
    for name, x in resumed.state_dict().items():
        assert torch.equal(x, model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("family", "structure"),
    [("llama", "neurons"), ("llama", "heads"), ("deepseek_v3", "experts")],
)
def test_a_streamed_model_gets_as_narrow(family, structure, tmp_path, monkeypatch):
    """Saved, it has the bits of one that was in memory; so it does after a failure to save."""
    import mrp_lightning.loop.pruned_module as saving

    build(family).save_pretrained(tmp_path / "dense")
    inputs, tuning = batches(family), mrp_lightning.BlockTuning(epochs=1)
    options = {"structure": structure, "sparsity": 0.25 if structure == "neurons" else 0.5}
    options |= {"target": "dense", "tuning": tuning}
    whole, first = narrower(CausalLM(tmp_path / "dense"), inputs, tmp_path / "1", **options)
    streamed = CausalLM(tmp_path / "dense", streaming=True)

    def fail(*args, **kwargs):
        real(*args, **kwargs)
        raise OSError("disk full")

    real = saving.save_streamed
    with monkeypatch.context() as patched:
        patched.setattr(saving, "save_streamed", fail)
        with pytest.raises(SaveError, match="disk full"):
            narrower(streamed, inputs, tmp_path / "2", **options)
    again, second = narrower(
        CausalLM(tmp_path / "dense", streaming=True), inputs, tmp_path / "2", **options
    )
    assert again.report.resumed_blocks == len({row.block for row in again.report.pruned}) > 1
    assert again.report.narrowed == whole.report.narrowed
    one, two = (AutoModelForCausalLM.from_pretrained(x) for x in (first, second))
    assert one.config.to_dict() | {"_name_or_path": ""} == two.config.to_dict() | {
        "_name_or_path": ""
    }
    assert one.state_dict().keys() == two.state_dict().keys()
    for name, x in one.state_dict().items():
        assert torch.equal(x, two.state_dict()[name]), name


def test_a_streamed_model_is_as_narrow_in_memory(tmp_path):
    """Once it is saved, it reads its blocks from there."""
    build("mixtral").save_pretrained(tmp_path / "dense")
    inputs = batches("mixtral")
    streamed = CausalLM(tmp_path / "dense", streaming=True)
    _, saved = narrower(streamed, inputs, tmp_path, structure="experts")
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    with torch.no_grad():
        for x in inputs:
            torch.testing.assert_close(streamed.model(**x).logits, loaded(**x).logits)
    assert streamed.model.config.num_local_experts == 2


@pytest.mark.parametrize("structure", ["neurons", "heads"])
def test_processes_cut_out_the_same(structure):
    """Three processes with a batch or none each, against one with all of them."""
    inputs = batches("llama")

    def prune(model, mine, processes):
        tuning = mrp_lightning.BlockTuning(epochs=1, batch_size=100, held_out=0.4)
        settings = Settings(
            method="SM", sparsity=0.5, structure=structure, target="dense", tuning=tuning
        )
        plan = make_plan(model, settings.recipe.pattern)
        plan = narrowing_plan(model, structure, 0.5, plan)
        job = Job(
            model=model,
            plan=plan,
            settings=settings,
            forward=lambda batch: model(**batch),
            batches=mine,
            processes=processes,
        )
        prune_model(job)
        narrow(plan.structure, model.config)
        return model.state_dict(), report_of(job)

    models = [build("llama") for _ in range(4)]
    found = together(3, lambda p: prune(models[p.rank], inputs[:2][p.rank :: 3], p))
    one, report = prune(models[3], inputs[:2], ALONE)
    for state, theirs in found:
        assert [row.loss for row in theirs.layers] == [row.loss for row in found[0][1].layers]
        for name, x in state.items():
            assert torch.equal(x, found[0][0][name]), name
            assert x.shape == one[name].shape
    first = found[0][1].layers[0]
    assert first.relative_loss == pytest.approx(report.layers[0].relative_loss, rel=1e-4)
    assert first.tokens == report.layers[0].tokens


def test_a_single_neuron_can_be_removed_where_producers_have_biases(tmp_path):
    config = AutoConfig.for_model("gpt2", n_embd=32, n_head=4, n_layer=1, n_inner=33, vocab_size=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    options = {"structure": "neurons", "sparsity": 0.03}
    callback, _ = narrower(model, batches("gpt2"), tmp_path, **options)
    assert callback.report.narrowed["kept"] == 32


def test_out_of_memory_is_no_fault_of_the_structure(llama, loader, tmp_path):
    def fail(module, args):
        if args[0].shape[-1] < 128:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model = llama(intermediate_size=128)
    model.model.layers[0].mlp.down_proj.register_forward_pre_hook(fail)
    with pytest.raises(OutOfMemoryError, match="CUDA out of memory"):
        narrower(model, loader, tmp_path, structure="neurons")


def test_a_block_is_checked_that_the_batch_reaches(llama):
    model = llama(intermediate_size=128)
    plan = narrowing_plan(model, "neurons", 0.5, make_plan(model, Unstructured(0.5)))
    trial, (first, second) = BlockTrial(plan.structure), plan.blocks
    trial.check(first, lambda: None)
    with pytest.raises(TargetError, match="computes something else|would lose more"):
        trial.check(second, lambda: torch.rand(2, 3))


def test_all_processes_remove_the_units_of_the_first(llama):
    """Whose rounding, here a Hessian of its own, decides between two sets."""
    model = llama(intermediate_size=128)
    plan = narrowing_plan(model, "neurons", 0.5, make_plan(model, Unstructured(0.5)))
    (layer,) = plan.structure.blocks[plan.blocks[0].name].consumers
    remover = UnitRemover(plan.structure, Recipe.of(method="SM", sparsity=0.5))

    def solve(processes):
        x = torch.randn(400, 128, generator=torch.Generator().manual_seed(processes.rank))
        block = SimpleNamespace(job=SimpleNamespace(processes=processes))
        calibrated = Calibrated(InputHessian(2 * x.T @ x / len(x)), len(x))
        return remover._solved(block, [layer.weight], 1, calibrated)

    for solution in together(2, solve):
        assert torch.equal(solution.removed, (solution.weight == 0).all(0))
