import json

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_saved_model_loads_with_equal_bits(dtype, llama, loader, quiet, tmp_path):
    llama().to(dtype).save_pretrained(tmp_path / "dense")
    module = CausalLM(str(tmp_path / "dense"))
    precision = "bf16-true" if dtype is torch.bfloat16 else "32-true"
    callback = MRPCallback(pattern="2:4", save_dir=str(tmp_path / "sparse"))
    Trainer(precision=precision, **quiet).predict(module, loader, callbacks=[callback])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    ours = module.model.state_dict()
    assert loaded.dtype is dtype
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8)), name
    for row in callback.report.layers:
        weight = loaded.get_submodule(row.name).weight
        assert float((weight == 0).float().mean()) == row.sparsity == 0.5
        assert not weight[weight == 0].signbit().any()
    report = json.loads((tmp_path / "sparse" / "pruning_report.json").read_text())
    assert report == callback.report.to_dict() | {"layers": report["layers"]}
    card = (tmp_path / "sparse" / "README.md").read_text()
    assert "2:4" in card
    assert "layers pruned: 14" in card
    assert str(tmp_path) not in card


def test_a_full_directory_is_refused_before_work(llama, loader, quiet, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    module = CausalLM(llama())
    before = module.model.model.layers[0].mlp.up_proj.weight.clone()
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path)
    with pytest.raises(FileExistsError, match="save_dir.*overwrite"):
        Trainer(**quiet).predict(module, loader, callbacks=[callback])
    assert torch.equal(before, module.model.model.layers[0].mlp.up_proj.weight)
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path, overwrite=True)
    Trainer(**quiet).predict(module, loader, callbacks=[callback])
    assert (tmp_path / "model.safetensors").is_file()
    assert not (tmp_path / "notes.txt").exists()


def test_fast_dev_run_prunes_and_writes_nothing(llama, loader, quiet, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").touch()
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    Trainer(fast_dev_run=True, **quiet).predict(llama(), loader, callbacks=[callback])
    assert callback.report.complete
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old.txt"]


class Two(pl.LightningModule):
    def __init__(self, teacher: torch.nn.Module, student: torch.nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.student(input_ids=batch).logits


def test_a_module_with_two_models_is_saved_whole(llama, loader, quiet, tmp_path):
    from safetensors.torch import load_file

    module = Two(llama(), llama())
    callback = MRPCallback(pattern="2:4", blocks="student.model.layers", save_dir=tmp_path / "out")
    Trainer(**quiet).predict(module, loader, callbacks=[callback])
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == module.state_dict().keys()
    assert callback.report.layers[0].name == "student.model.layers.0.self_attn.q_proj"
    assert all(torch.equal(saved[name], x) for name, x in module.state_dict().items())


def test_a_failed_save_leaves_nothing(llama, loader, quiet, tmp_path, monkeypatch):
    from mrp_lightning.loop import saving

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(saving, "save_pretrained", full)
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    with pytest.raises(OSError, match="No space"):
        Trainer(**quiet).predict(llama(), loader, callbacks=[callback])
    assert list(tmp_path.iterdir()) == []
