"""What the report knows of the run that made it."""

import pytest

from callbacks import MRPCallback
from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.callbacks.pruning import PruningCallback
from mrp_lightning.environment import command


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
