"""The callback's state in a Lightning checkpoint, and what its report knows of the run."""

import lightning
import pytest
import torch

from callbacks import MRPCallback
from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.callbacks.pruning import PruningCallback
from mrp_lightning.environment import command
from mrp_lightning.errors import FormatError


def trainer(callback, quiet):
    return lightning.Trainer(callbacks=[callback], **quiet)


def test_a_checkpoint_carries_report_and_recipe(llama, loader, quiet, tmp_path):
    settings = {"pattern": "2:4", "damping": 0.02, "targets": "mlp"}
    module, callback = CausalLM(llama()), MRPCallback(**settings)
    pruning = trainer(callback, quiet)
    pruning.predict(module, loader)
    pruning.save_checkpoint(tmp_path / "pruned.ckpt")
    torch.load(tmp_path / "pruned.ckpt", weights_only=True)

    other, dense = MRPCallback(**settings), CausalLM(llama())
    logits = trainer(other, quiet).predict(dense, loader, ckpt_path=tmp_path / "pruned.ckpt")
    assert other.report.to_dict() == callback.report.to_dict()
    assert other.settings == callback.settings
    assert other.state_dict() == callback.state_dict()
    weights = module.model.state_dict()
    assert all(torch.equal(t, weights[n]) for n, t in dense.model.state_dict().items())
    with torch.no_grad():
        assert torch.allclose(logits[0], module(next(iter(loader))), atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        {"head_grid": "q8_0"},
        {"grid": "int4-g32", "balance": True},
        {"targets": "mlp"},
        {"target": "dense"},
    ],
    ids=str,
)
def test_a_state_belongs_to_one_choice_of_settings(other):
    one = MRPCallback(pattern="2:4", **{key: other[key] for key in other if key == "grid"})
    assert MRPCallback(pattern="2:4", **other).state_key != one.state_key


def test_a_callback_that_has_not_pruned_changes_nothing(llama, loader, quiet, tmp_path):
    module = CausalLM(llama())
    before = trainer(MRPCallback(pattern="1:4"), quiet)
    before.strategy.connect(module)
    before.save_checkpoint(tmp_path / "dense.ckpt")
    callback = MRPCallback(pattern="2:4")
    trainer(callback, quiet).predict(module, loader, ckpt_path=tmp_path / "dense.ckpt")
    assert callback.report.totals["sparsity"] == 0.5


def test_a_damaged_state_is_told():
    callback = MRPCallback(pattern="2:4")
    state = callback.state_dict() | {"report": {"format_version": 1}}
    with pytest.raises(FormatError, match=r"the callback's state .* lacks `layers`.* Prune again"):
        callback.load_state_dict(state)


def test_the_report_says_where_it_comes_from(tiny_llama, loader, quiet, llama, tmp_path):
    (tmp_path / "text.txt").write_text("import this\n" * 3000)
    data = TextDataModule(str(tmp_path / "text.txt"), num_samples=3, sequence_length=24, seed=7)
    callback = PruningCallback(method="magnitude", pattern="2:4")
    Trainer(**quiet).predict(CausalLM(tiny_llama), datamodule=data, callbacks=callback)
    found = callback.report.provenance
    assert found["data"] == {
        "source": "text.txt",
        "files": [str(tmp_path / "text.txt")],
        "samples": 3,
        "sequence_length": 24,
        "seed": 7,
        "bos": "window",
    }
    assert found["command"] == command()
    callback = PruningCallback(method="magnitude", pattern="2:4")
    Trainer(**quiet).predict(CausalLM(llama()), loader, callbacks=callback)
    found = callback.report.provenance["data"]
    own = dict.fromkeys(("source", "files", "seed", "bos")) | {"samples": 8, "sequence_length": 16}
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
