"""The callbacks in Lightning's predict loop."""

import csv
import json
import re
import traceback
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from callbacks import MRPCallback, PruningCallback
from mrp_lightning import BlockTuning, CausalLM, PruningReport, TextDataModule, Trainer
from mrp_lightning.environment import command
from mrp_lightning.errors import TargetError
from mrp_lightning.solver.patterns import SemiStructured
from mrp_lightning.solver.problem import Problem

KEYS = [
    *("name", "shape", "method", "sparsity", "loss", "relative_loss", "damping", "iterations"),
    *("gap", "seconds", "tokens", "dead_inputs", "skipped"),
]


def assert_clean(model: nn.Module) -> None:
    """No hook, stub, patch or inference tensor is left, and everything is trainable as before."""
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not {"forward", "predict_step", "_apply"} & set(module.__dict__)
    assert not any(parameter.is_inference() for parameter in model.parameters())


def assert_pruned(model: nn.Module, but: tuple[str, ...] = ("lm_head",)) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            has_pattern = SemiStructured(2, 4).holds(module.weight == 0)
            assert has_pattern is not name.endswith(but), name


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_the_literal_call_prunes_a_hugging_face_model(llama, loader, quiet):
    model, callback = llama(), MRPCallback(pattern="2:4")
    assert Trainer(**quiet).predict(model, loader, callbacks=[callback]) is None
    assert_pruned(model)
    assert_clean(model)
    assert [row.name for row in callback.report.layers[:7]] == [
        f"model.layers.0.{name}"
        for name in (
            *(f"self_attn.{x}_proj" for x in "qkvo"),
            *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        )
    ]
    assert callback.report.complete
    assert all(row.tokens == 8 * 16 for row in callback.report.layers)


def test_stock_trainer_and_own_module_give_the_same_weights(llama, loader, quiet, own):
    ours, theirs = llama(), llama()
    Trainer(**quiet).predict(ours, loader, callbacks=MRPCallback(pattern="2:4"))
    callback = PruningCallback(method="SM", pattern="2:4")
    module = own(theirs)
    pl.Trainer(callbacks=[callback], devices=1, **quiet).predict(module, loader)
    assert same_weights(ours, theirs)
    assert_clean(module)
    assert callback.report.layers[0].name == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_precisions(precision, llama, loader, quiet):
    module = CausalLM(llama())
    callback = MRPCallback(pattern="2:4", offload=precision == "bf16-true")
    Trainer(precision=precision, **quiet).predict(module, loader, callbacks=[callback])
    assert_pruned(module)
    assert_clean(module)
    assert callback.report.config["walk"] == "inject"
    assert 0 < callback.report.relative_loss < 0.2
    weight = module.model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype is (torch.bfloat16 if precision == "bf16-true" else torch.float32)


class Windows(pl.LightningDataModule):
    def __init__(self, loaders: Any) -> None:
        super().__init__()
        self.loaders = loaders

    def predict_dataloader(self) -> Any:
        return self.loaders


def test_datamodule_several_loaders_and_limits(llama, windows, quiet, own):
    reference, split, limited = llama(), llama(), llama()
    trainer = Trainer(**quiet)
    trainer.predict(
        reference, DataLoader(windows, batch_size=2), callbacks=MRPCallback(pattern="2:4")
    )
    loaders = [DataLoader(part, batch_size=2) for part in windows.split(4)]
    trainer.predict(own(split), datamodule=Windows(loaders), callbacks=MRPCallback(pattern="2:4"))
    assert same_weights(reference, split)
    callback = MRPCallback(pattern="2:4")
    Trainer(limit_predict_batches=3, **quiet).predict(
        limited, DataLoader(windows, batch_size=2), callbacks=callback
    )
    assert {row.tokens for row in callback.report.layers} == {3 * 2 * 16}


def test_ckpt_path_is_loaded_before_pruning(llama, loader, quiet, own, tmp_path):
    trained, fresh, reference = own(llama()), own(llama()), llama()
    with torch.no_grad():
        for model in (trained.net, reference):
            model.model.layers[0].mlp.up_proj.weight.mul_(2)
    trainer = Trainer(**quiet)
    trainer.strategy.connect(trained)
    trainer.save_checkpoint(tmp_path / "trained.ckpt", weights_only=True)
    trainer.predict(reference, loader, callbacks=MRPCallback(pattern="2:4"))
    trainer.predict(
        fresh,
        loader,
        ckpt_path=str(tmp_path / "trained.ckpt"),
        callbacks=MRPCallback(pattern="2:4"),
    )
    assert same_weights(reference, fresh.net)


def test_batches_of_other_shapes(llama, windows, loader, quiet):
    """In one loader, those of a tuple, a list, a mapping and an encoding."""
    reference, model = llama(), llama()
    a, b, c, d = windows.split(2)
    mapping = {"input_ids": c, "attention_mask": torch.ones_like(c), "id": ["a", "b"]}
    made: Any = [(a, a), [b], mapping, BatchEncoding({"input_ids": d})]
    Trainer(**quiet).predict(reference, loader, callbacks=MRPCallback(pattern="2:4"))
    batches = DataLoader(made, batch_size=None)
    Trainer(**quiet).predict(model, batches, callbacks=MRPCallback(pattern="2:4"))
    assert same_weights(reference, model)


def test_a_callback_prunes_once(llama, loader, quiet, caplog):
    model, callback = llama(), PruningCallback(method="magnitude", pattern="2:4")
    trainer = pl.Trainer(callbacks=[callback], devices=1, **quiet)
    module = CausalLM(model)
    trainer.predict(module, loader)
    report, weights = callback.report, [p.clone() for p in model.parameters()]
    predictions = trainer.predict(module, loader)
    assert "has pruned already" in caplog.text
    assert [p.shape for p in predictions] == [(2, 16, 64)] * 4
    assert callback.report is report
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


def test_other_stages_are_left_alone(llama, loader, quiet, own):
    callback = MRPCallback(pattern="2:4")
    trainer = pl.Trainer(callbacks=[callback], devices=1, max_steps=1, **quiet)
    trainer.fit(own(llama()), loader)
    assert callback.report is None


def test_the_pruned_model_trains_compiles_and_exports(llama, loader, quiet, own, windows):
    # The layer in the second block gets an input that needs a gradient: where a weight that was
    # written in inference mode would fail.
    module = own(llama())
    trainer = Trainer(max_steps=2, **quiet)
    trainer.predict(module, loader, callbacks=MRPCallback(pattern="2:4"))
    weight = module.net.model.layers[1].mlp.down_proj.weight
    before = weight.detach().clone()
    trainer.fit(module, loader)
    assert not torch.equal(before, weight)
    module.net.requires_grad_(True).train()
    hidden = torch.randn(2, 16, 48, requires_grad=True)
    down = module.net.model.layers[1].mlp.down_proj
    torch.compile(down, backend="eager")(hidden).sum().backward()
    assert hidden.grad is not None
    exported = torch.export.export(module.net.model.layers[1].mlp.eval(), (torch.randn(2, 16, 32),))
    x = torch.randn(2, 16, 32)
    torch.testing.assert_close(exported.module()(x), module.net.model.layers[1].mlp(x))


def test_a_compiled_model_is_pruned(llama, loader, quiet, own, windows):
    reference, model = llama(), llama()
    Trainer(**quiet).predict(reference, loader, callbacks=MRPCallback(pattern="2:4"))
    module = own(torch.compile(model, backend="eager"))
    with torch.no_grad():
        module.net(input_ids=windows[:2])  # hooks added from here on do not fire by themselves
    callback = MRPCallback(pattern="2:4")
    Trainer(**quiet).predict(module, loader, callbacks=callback)
    assert same_weights(reference, model)
    assert callback.report.layers[0].name == "model.layers.0.self_attn.q_proj"
    assert_clean(model)


def test_plain_modules_are_wrapped(quiet, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    data = torch.utils.data.TensorDataset(torch.randn(32, 16), torch.zeros(32))
    Trainer(**quiet).predict(model, DataLoader(data, batch_size=8), callbacks=[callback])
    assert_pruned(model)
    assert [row.name for row in callback.report.layers] == ["0", "2"]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    assert (tmp_path / "out" / "pruning_report.json").is_file()


def test_progress_is_shown_in_the_trainers_bar(llama, loader, quiet, capfd):
    quiet["enable_progress_bar"] = True
    trainer = Trainer(callbacks=[RichProgressBar()], **quiet)
    trainer.predict(llama(), loader, callbacks=MRPCallback(pattern="2:4"))
    out = "".join(capfd.readouterr())
    assert "block 2/2 · loss 0." in out  # when all is done
    assert "14/14" in out


def test_no_logs_are_left(llama, loader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False)
    trainer.predict(llama(), loader, callbacks=MRPCallback(pattern="2:4"))
    assert not [*tmp_path.iterdir()]


def test_metrics_go_to_the_loggers(llama, loader, quiet, tmp_path):
    logger = CSVLogger(tmp_path)
    trainer = Trainer(**quiet | {"logger": logger})
    callback = MRPCallback(pattern="2:4")
    trainer.predict(llama(), loader, callbacks=callback)
    directory = tmp_path / "lightning_logs" / "version_0"
    with (directory / "metrics.csv").open() as file:
        values = list(csv.DictReader(file))
    blocks = {row["step"]: row for row in values if row["prune/relative_loss"]}
    assert list(blocks) == ["0", "1"]
    losses = [row.relative_loss for row in callback.report.layers[:7]]
    assert float(blocks["0"]["prune/relative_loss"]) == pytest.approx(sum(losses) / 7)
    for row in blocks.values():
        assert float(row["prune/seconds"]) > 0
    recipe = yaml.safe_load((directory / "hparams.yaml").read_text())["prune"]
    assert (recipe["method"], recipe["pattern"], recipe["block_size"]) == ("SM", "2:4", 128)
    assert float(trainer.callback_metrics["prune/sparsity"]) == 0.5


def test_the_report_has_its_fixed_form(llama, loader, quiet):
    callback = PruningCallback(method="wanda", sparsity=0.5, targets=["q_proj", "down_proj"])
    Trainer(**quiet).predict(llama(), loader, callbacks=callback)
    report = json.loads(json.dumps(callback.report.to_dict(), allow_nan=False))
    fixed = ["format_version", "layers", "totals", "versions", "config"]
    assert list(report)[:5] == fixed
    assert report["format_version"] == 1
    assert len(report["layers"]) == 4
    for row in report["layers"]:
        assert list(row)[: len(KEYS)] == [*KEYS]
        assert row["block"] in ("model.layers.0", "model.layers.1")
        assert row["method"] == "wanda"
        assert row["iterations"] is None
        assert row["gap"] is None
        assert row["skipped"] is None
    assert report["config"]["sparsity"] == 0.5
    assert report["config"]["targets"] == ["q_proj", "down_proj"]
    assert {"torch", "lightning", "transformers"} <= report["versions"].keys()
    assert report["totals"]["removed"] == sum(
        round(row["sparsity"] * row["shape"][0] * row["shape"][1]) for row in report["layers"]
    )


class Late(pl.LightningModule):
    """Makes its model when Lightning asks for it."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_model(self) -> None:
        self.net = self.make()

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).logits


def test_a_model_that_is_made_in_configure_model(llama, loader, quiet):
    reference, module = llama(), Late(llama)
    Trainer(**quiet).predict(reference, loader, callbacks=MRPCallback(pattern="2:4"))
    callback = MRPCallback(pattern="2:4", targets="self_attn", offload=True)
    Trainer(**quiet).predict(module, loader, callbacks=callback)
    assert len(callback.report.pruned) == 8
    ours, theirs = (m.model.layers[0].self_attn.q_proj.weight for m in (module.net, reference))
    assert torch.equal(ours, theirs)


def test_one_trainer_takes_one_callback_after_another(llama, loader, quiet, own):
    first = PruningCallback(method="magnitude", pattern="2:4", targets="self_attn")
    second = PruningCallback(method="wanda", sparsity=0.5, targets="mlp")
    trainer = pl.Trainer(callbacks=[first], devices=1, **quiet)
    module = own(llama())
    trainer.predict(module, loader)
    trainer.callbacks.append(second)
    trainer.predict(module, loader)
    assert len(first.report.pruned) == 8
    assert len(second.report.pruned) == 6


def test_the_run_ends_with_one_line_that_says_what_was_done(llama, loader, quiet, tmp_path, caplog):
    caplog.set_level("INFO")
    for arguments, said in (
        ({"save_dir": str(tmp_path / "out")}, rf"The model is in {tmp_path}/out\."),
        ({}, r"pruned in memory only \(no `save_dir`\)"),
    ):
        caplog.clear()
        Trainer(**quiet).predict(
            llama(), loader, callbacks=[MRPCallback(pattern="2:4", **arguments)]
        )
        (line,) = [m for m in caplog.messages if m.startswith("Pruned 14 layers to 2:4 with SM in")]
        assert re.search(said, line)


class Torch(pl.LightningModule):
    """An encoder of torch, whose attentions multiply by themselves."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.embedding = nn.Embedding(2048, 16)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def predict_step(self, batch, index):
        ids = batch["input_ids"] if isinstance(batch, dict) else batch
        return self.encoder(self.embedding(ids))


def test_the_run_ends_with_what_stays_dense_and_what_is_ruined(loader, quiet, caplog):
    caplog.set_level("INFO")
    for sparsity in (0.5, 0.95):
        caplog.clear()
        callback = PruningCallback(method="magnitude", sparsity=sparsity)
        Trainer(**quiet).predict(Torch(), loader, callbacks=[callback])
        (line,) = [m for m in caplog.messages if m.startswith("Left dense: ")]
        assert "encoder.layers.*.self_attn.in_proj_weight (2 layers): fused weight of Mult" in line
        assert "self_attn.out_proj (2 layers): its product is made inside torch's attention" in line
        assert (callback.report.totals["relative_loss"] > 0.5) == (sparsity > 0.9)
        assert ("most is lost" in caplog.text) == (sparsity > 0.9)


def test_a_model_that_was_pruned_before_is_told_as_one(llama, loader, quiet, tmp_path, caplog):
    caplog.set_level("INFO")
    model = llama()
    for name, sparsity, method in (("a", 0.5, "magnitude"), ("b", 0.3, "SM"), ("c", 0.7, "JM")):
        caplog.clear()
        callback = PruningCallback(method=method, sparsity=sparsity, save_dir=str(tmp_path / name))
        Trainer(**quiet).predict(model, loader, callbacks=[callback])
        model = CausalLM(tmp_path / name)
        (line,) = [m for m in caplog.messages if m.startswith("Pruned 14 layers")]
        report, card = callback.report, (tmp_path / name / "README.md").read_text()
        if name == "a":
            assert "zero before" not in line + card
            assert "zeros_before" not in report.totals
            assert "pruned_before" not in report.provenance
            continue
        assert "(against these weights as they were, 50% of which were zero before)" in line
        assert report.totals["zeros_before"] == pytest.approx(0.5, abs=0.01)
        assert "- zero before: 50.00% of them, pruned to 50% unstructured sparsity by " in card
        stored = load_file(tmp_path / name / "model.safetensors")
        zeros = sum(int((stored[f"{row.name}.weight"] == 0).sum()) for row in report.pruned)
        assert report.totals["removed"] == zeros  # 30% removed none of those that were left
        assert f"- weights removed in them: {zeros:,} of" in card
        already = "14 of 14 layers already had the pattern 30%: little or nothing was removed there"
        assert (already in caplog.text) == (name == "b")
    assert PruningReport.load(tmp_path / "c" / "pruning_report.json").provenance[
        "pruned_before"
    ] == [{"method": "magnitude", "sparsity": 0.5}, {"method": "SM", "sparsity": 0.3}]
    assert "by magnitude, then pruned to 30% unstructured sparsity by SM; the error is" in card


def test_the_report_says_where_it_comes_from(tiny_llama, loader, quiet, llama, tmp_path):
    (tmp_path / "text.txt").write_text("import this\n" * 3000)
    data = TextDataModule(str(tmp_path / "text.txt"), num_samples=3, sequence_length=24, seed=7)
    callback = PruningCallback(method="magnitude", pattern="2:4")
    Trainer(**quiet).predict(CausalLM(tiny_llama), datamodule=data, callbacks=callback)
    found = callback.report.provenance
    assert found["data"] == {
        "source": "text.txt",
        "files": [str(tmp_path / "text.txt")],
        "text_column": "text",
        "samples": 3,
        "sequence_length": 24,
        "seed": 7,
        "bos": "window",
    }
    assert found["command"] == command()
    callback = PruningCallback(method="magnitude", pattern="2:4")
    Trainer(**quiet).predict(CausalLM(llama()), loader, callbacks=callback)
    found = callback.report.provenance["data"]
    of_text = ("source", "files", "text_column", "seed", "bos")
    own = dict.fromkeys(of_text) | {"samples": 8, "sequence_length": 16}
    assert found == own
    trainer, module = Trainer(**quiet), CausalLM(tiny_llama)
    trainer.predict(module, datamodule=data)  # which the trainer remembers
    callback = PruningCallback(method="magnitude", pattern="2:4")
    trainer.predict(module, loader, callbacks=callback)
    assert callback.report.provenance["data"] == own


@pytest.mark.parametrize(
    ("started", "told"),
    [
        (["-m", "mrp_lightning", "predict", "a b"], "python -m mrp_lightning predict 'a b'"),
        (["/env/bin/mrp-lightning", "predict"], "mrp-lightning predict"),
        (["own.py"], "python own.py"),
        (["-c", "import this"], None),
        ([], None),
        (["-m", "ipykernel_launcher", "-f", "x.json"], None),
    ],
)
def test_commands_are_as_they_would_be_typed(started, told, monkeypatch):
    monkeypatch.setattr("sys.executable", "/env/bin/python")
    monkeypatch.setattr("sys.orig_argv", ["/env/bin/python3", *started])
    assert command() == told


def test_the_share_of_the_models_weights_is_told(llama, loader, quiet, caplog):
    callback, model = MRPCallback(pattern="2:4", targets="mlp"), llama()
    with caplog.at_level("INFO"):
        Trainer(**quiet).predict(CausalLM(model), loader, callbacks=callback)
    total = sum(p.numel() for p in model.parameters())
    pruned = sum(p.numel() for n, p in model.named_parameters() if "mlp" in n)
    totals = callback.report.totals
    assert totals["model_weights"] == total
    assert totals["share"] == pruned / total
    assert f"{pruned / total:.0%} of the model's weights are in them" in caplog.text


@pytest.mark.parametrize("method", ["SM", "JM"])
def test_at_most_twelve_calls_lead_from_the_callback_to_a_mask(
    method, llama, loader, quiet, monkeypatch
):
    stacks, select = [], Problem.select

    def seen(problem, scores, start):
        stacks.append([f for f in traceback.extract_stack() if "/mrp_lightning/" in f.filename])
        return select(problem, scores, start)

    monkeypatch.setattr(Problem, "select", seen)
    Trainer(**quiet).predict(llama(), loader, callbacks=[MRPCallback(pattern="2:4", method=method)])
    # The first choice of the first layer; `Problem.select` itself, replaced above, is one more.
    names = [frame.name for frame in stacks[0]]
    assert len(names[names.index("on_predict_epoch_end") :]) + 1 <= 12, names


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
