"""Training a pruned model: the zeros stay, exactly, whatever trains the rest."""

import copy
import json
import warnings
from typing import Any

import lightning
import pytest
import torch
from families import build
from quiet import QUIET
from torch import Tensor, nn
from torch.utils.data import DataLoader

from callbacks import KeepSparsity, MRPCallback, SaveModel
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.errors import StrategyError, TargetError
from mrp_lightning.storage.files import MANIFEST
from mrp_lightning.targets.layers import holds_experts, layers_of


@pytest.fixture(scope="module")
def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(torch.randint(3, 2000, (12, 24), generator=generator), batch_size=2)


@pytest.fixture(scope="module")
def pruned_once(tiny_llama, loader) -> CausalLM:
    model = CausalLM(tiny_llama, dtype="float32", learning_rate=1e-2, warmup_steps=1)
    Trainer(**QUIET).predict(model, loader, callbacks=[MRPCallback(pattern="2:4")])
    return model


@pytest.fixture
def pruned(pruned_once) -> CausalLM:
    return copy.deepcopy(pruned_once)


def zeros(model: nn.Module) -> dict[str, Tensor]:
    blocks = model.model.model.layers
    return {name: p == 0 for name, p in blocks.named_parameters() if p.ndim == 2}


def optimizers() -> dict[str, Any]:
    return {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=2),
    }


class AfterEachStep(lightning.Callback):
    """Looks at the weights while they are trained, and after each batch."""

    def __init__(self, expected: dict[str, Tensor]) -> None:
        self.expected, self.looks = expected, 0

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self.looks += 1
        assert all(torch.equal(zeros(pl_module)[n], kept) for n, kept in self.expected.items())


@pytest.mark.parametrize("optimizer", optimizers())
def test_zeros_stay_with_any_optimizer(optimizer, pruned, loader):
    before, weights = zeros(pruned), pruned.model.state_dict()["model.norm.weight"].clone()
    assert all(float(kept.float().mean()) == 0.5 for kept in before.values())
    dense = pruned.model.model.layers[0].mlp.up_proj.weight.detach().clone()
    pruned.configure_optimizers = lambda: optimizers()[optimizer](pruned.parameters())
    look = AfterEachStep(before)
    lightning.Trainer(max_epochs=1, callbacks=[KeepSparsity(), look], **QUIET).fit(pruned, loader)
    assert look.looks == 6
    assert not torch.equal(pruned.model.state_dict()["model.norm.weight"], weights)
    trained = pruned.model.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(trained, dense)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-true", "gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_zeros_stay_in_any_loop(options, pruned, loader):
    look = AfterEachStep(zeros(pruned))
    callbacks = [KeepSparsity(), look]
    lightning.Trainer(max_epochs=2, callbacks=callbacks, **options, **QUIET).fit(pruned, loader)
    assert look.looks == 12


def test_removed_weights_do_not_count_in_the_clipped_norm(pruned, loader):
    """Where only removed weights have a gradient, the others do not move."""
    layer = pruned.model.model.layers[0].mlp.up_proj
    removed = layer.weight == 0

    class OnlyRemoved(KeepSparsity):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for parameter in pl_module.parameters():
                parameter.grad.zero_()
            layer.weight.grad[removed] = 1e3
            super().on_before_optimizer_step(trainer, pl_module, optimizer)
            gradients = [
                p.grad
                for group in optimizer.param_groups
                for p in group["params"]
                if p.grad is not None
            ]
            assert gradients
            assert not any(gradient.any() for gradient in gradients)

    trainer = lightning.Trainer(
        max_steps=1, callbacks=[OnlyRemoved()], gradient_clip_val=1.0, **QUIET
    )
    pruned.weight_decay = 0.0
    before = {name: p.detach().clone() for name, p in pruned.named_parameters()}
    trainer.fit(pruned, loader)
    assert all(torch.equal(p, before[name]) for name, p in pruned.named_parameters())


def test_without_it_training_fills_the_zeros_and_says_so_once(pruned, loader):
    before = zeros(pruned)
    with pytest.warns(UserWarning, match=r"14 layers .* Add `callbacks.KeepSparsity`") as warned:
        lightning.Trainer(max_epochs=2, **QUIET).fit(pruned, loader)
    assert sum("KeepSparsity" in str(w.message) for w in warned) == 1
    assert not any(torch.equal(zeros(pruned)[name], kept) for name, kept in before.items())


def test_it_leaves_nothing_behind(pruned, loader):
    keep = KeepSparsity()
    lightning.Trainer(max_steps=1, callbacks=[keep], **QUIET).fit(pruned, loader)
    assert sum(keep.removed.values()) == sum(int(z.sum()) for z in zeros(pruned).values())
    assert keep._hooks == []
    assert keep._pruned == []


def tuned(tiny_llama, loader, directory, callbacks, **pruning):
    """Prune, save, load, train, save; the directory of the trained model."""
    prune = MRPCallback(pattern="2:4", save_dir=directory / "pruned", **pruning)
    Trainer(**QUIET).predict(CausalLM(tiny_llama), loader, callbacks=[prune])
    model = CausalLM(str(directory / "pruned"), dtype="float32", learning_rate=1e-2)
    save = SaveModel(str(directory / "tuned"), dtype="bfloat16")
    lightning.Trainer(max_steps=3, callbacks=[*callbacks, save], **QUIET).fit(model, loader)
    return directory / "tuned"


@pytest.mark.usefixtures("short_library")
def test_what_was_trained_can_be_packed(tiny_llama, loader, tmp_path):
    from export.to_sparse import main

    out = tuned(tiny_llama, loader, tmp_path, [KeepSparsity()], ignore="down_proj")
    main([str(out)])  # without the report, down_proj would have to be 2:4
    report = json.loads((tmp_path / "tuned-sparse24" / "export_report.json").read_text())
    assert report["totals"]["packed_layers"] == 12
    report = json.loads((out / "pruning_report.json").read_text())
    assert report["provenance"]["trained"]["steps"] == 3
    assert set(report["files"]) == {file.name for file in out.iterdir()} - {MANIFEST}
    assert "then trained for 3 steps" in (out / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:.*Add `callbacks.KeepSparsity`")
def test_the_report_does_not_outlive_the_zeros(tiny_llama, loader, tmp_path):
    out = tuned(tiny_llama, loader, tmp_path, [])
    assert (out / "model.safetensors").is_file()
    assert not (out / "pruning_report.json").exists()


def test_few_zeros_keep_the_report(tiny_llama, loader, tmp_path):
    prune = MRPCallback(sparsity=0.04, save_dir=tmp_path / "pruned")
    Trainer(**QUIET).predict(CausalLM(tiny_llama), loader, callbacks=[prune])
    file = tmp_path / "pruned/pruning_report.json"
    content = json.loads(file.read_text())
    for row in content["layers"]:
        if row.get("sparsity"):
            row["sparsity"] += 4e-7  # as a mean in float32 may be
    file.write_text(json.dumps(content))
    model = CausalLM(tmp_path / "pruned")
    model.model.model.layers.requires_grad_(False)
    save = SaveModel(str(tmp_path / "tuned"))
    lightning.Trainer(max_steps=1, callbacks=[save], **QUIET).fit(model, loader)
    report = json.loads((tmp_path / "tuned" / "pruning_report.json").read_text())
    assert report["provenance"]["trained"]["steps"] == 1


def test_a_damaged_report_costs_no_training(tiny_llama, loader, tmp_path, caplog):
    prune = MRPCallback(sparsity=0.5, save_dir=tmp_path / "pruned")
    Trainer(**QUIET).predict(CausalLM(tiny_llama), loader, callbacks=[prune])
    model = CausalLM(tmp_path / "pruned")
    (tmp_path / "pruned/pruning_report.json").write_text("{")
    save = SaveModel(str(tmp_path / "tuned"))
    lightning.Trainer(max_steps=1, callbacks=[save], **QUIET).fit(model, loader)
    assert "The report of the model's pruning is lost" in caplog.text
    assert (tmp_path / "tuned/model.safetensors").is_file()
    assert not (tmp_path / "tuned/pruning_report.json").exists()


def test_a_report_of_few_bits_does_not_outlive_them(tiny_llama, loader, tmp_path, caplog):
    prune = MRPCallback(pattern="2:4", bits=4, save_dir=tmp_path / "pruned")
    Trainer(**QUIET).predict(CausalLM(tiny_llama), loader, callbacks=[prune])
    callbacks = [KeepSparsity(), SaveModel(str(tmp_path / "tuned"))]
    trainer = lightning.Trainer(max_steps=1, callbacks=callbacks, **QUIET)
    trainer.fit(CausalLM(tmp_path / "pruned"), loader)
    assert "training leaves few bits" in caplog.text
    assert not (tmp_path / "tuned/pruning_report.json").exists()


def test_a_dense_model_has_nothing_to_keep(tiny_llama, loader):
    model = CausalLM(tiny_llama)
    with pytest.raises(TargetError, match="no layer of the model is pruned"):
        lightning.Trainer(max_steps=1, callbacks=[KeepSparsity()], **QUIET).fit(model, loader)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*KeepSparsity.*")
        lightning.Trainer(max_steps=1, **QUIET).fit(model, loader)


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_sharded_strategies_are_refused_by_name(name, monkeypatch):
    trainer = lightning.Trainer(callbacks=[KeepSparsity()], **QUIET)
    strategy = type(trainer.strategy)
    sharded = type(name, (strategy,), {})
    monkeypatch.setattr(trainer.strategy, "__class__", sharded)
    with pytest.raises(StrategyError, match=f"KeepSparsity needs whole weights.*{name}"):
        trainer.callbacks[0].setup(trainer, CausalLM.__new__(CausalLM), "fit")


def test_zeros_of_an_expert_that_is_not_pruned_are_trained():
    model = build("mixtral")
    experts = [e for _, m in model.named_modules() if holds_experts(m) for e in layers_of("", m)]
    pruned, dense = (e for e in experts[:3] if e.stack == "gate_up_proj")
    with torch.no_grad():
        pruned.view[:, ::2] = 0
        dense.view[0, 0] = 0
    kept = KeepSparsity()
    masks = kept._find(model)
    parameters = dict(model.named_parameters())
    by_parameter = {id(parameters[name]): mask for name, mask in masks.items()}
    assert torch.equal(pruned.arranged(by_parameter[id(pruned.parameter)]), pruned.view == 0)
    assert not dense.arranged(by_parameter[id(dense.parameter)]).any()
    assert sum(map(int, kept.removed.values())) == sum(int(mask.sum()) for mask in masks.values())


class LaterUnfrozen(lightning.pytorch.callbacks.BaseFinetuning):
    """Trains the blocks from the second epoch on."""

    def freeze_before_training(self, pl_module) -> None:
        self.freeze(pl_module.model.model.layers)

    def finetune_function(self, pl_module, epoch, optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.model.layers, optimizer)


def test_zeros_of_layers_that_are_unfrozen_later_stay(pruned, loader):
    look = AfterEachStep(zeros(pruned))
    dense = pruned.model.model.layers[0].mlp.up_proj.weight.detach().clone()

    def only_trainable():
        return torch.optim.AdamW([p for p in pruned.parameters() if p.requires_grad], lr=1e-2)

    pruned.configure_optimizers = only_trainable
    callbacks = [KeepSparsity(), LaterUnfrozen(), look]
    lightning.Trainer(max_epochs=2, callbacks=callbacks, **QUIET).fit(pruned, loader)
    assert look.looks == 12
    assert not torch.equal(pruned.model.model.layers[0].mlp.up_proj.weight, dense)


class Manual(CausalLM):
    """Discards the gradients of the first batch, and clips all others to nearly nothing."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx == 0:
            optimizer.zero_grad()
        self.clip_gradients(optimizer, gradient_clip_val=1e-9, gradient_clip_algorithm="norm")
        optimizer.step()


def test_manual_optimization_clips_and_discards_gradients(pruned, loader):
    module = Manual(pruned.model, tokenizer=pruned.tokenizer)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    look = AfterEachStep(zeros(module))
    lightning.Trainer(max_epochs=1, callbacks=[KeepSparsity(), look], **QUIET).fit(module, loader)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=1e-7)
