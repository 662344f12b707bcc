"""What is trained is saved as it is, once."""

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from callbacks import SaveModel
from mrp_lightning import CausalLM
from mrp_lightning.errors import OptionError


def test_weights_are_stored_as_they_were_trained(llama, loader, quiet, tmp_path):
    llama().bfloat16().save_pretrained(tmp_path / "bf16")
    module = CausalLM(tmp_path / "bf16", dtype="float32")
    save = SaveModel(tmp_path / "out")
    pl.Trainer(max_steps=1, callbacks=[save], **quiet).fit(module, loader)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert saved.dtype == torch.float32
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, module.model.state_dict()[name]), name
    save = SaveModel(tmp_path / "asked", dtype="bfloat16")
    pl.Trainer(max_steps=1, callbacks=[save], **quiet).fit(module, loader)
    asked = load_file(tmp_path / "asked" / "model.safetensors")
    assert {tensor.dtype for tensor in asked.values()} == {torch.bfloat16}


def test_other_loops_of_its_trainer_go_on(llama, loader, quiet, tmp_path):
    module = CausalLM(llama())
    trainer = pl.Trainer(max_steps=1, callbacks=[SaveModel(tmp_path / "out")], **quiet)
    trainer.fit(module, loader)
    trainer.test(module, loader, verbose=False)
    with pytest.raises(FileExistsError, match="`save_dir`"):
        trainer.fit(module, loader)


def test_predict_says_that_nothing_is_saved(llama, loader, quiet, tmp_path, caplog):
    save = SaveModel(tmp_path / "out")
    pl.Trainer(callbacks=[save], **quiet).predict(CausalLM(llama()), loader)
    assert "SaveModel saves what `fit` trains; in `predict` it does nothing" in caplog.text
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_is_none_is_refused_before_training(llama, loader, quiet, tmp_path):
    save = SaveModel(tmp_path / "out", dtype="int8")
    trainer = pl.Trainer(max_steps=1, callbacks=[save], **quiet)
    with pytest.raises(OptionError, match="`dtype` must be a floating type"):
        trainer.fit(CausalLM(llama()), loader)
    assert trainer.global_step == 0
