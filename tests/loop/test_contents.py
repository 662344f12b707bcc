"""A streamed `CausalLM` evaluates as one in memory, and refuses what needs all weights at once."""

import shutil

import pytest
import torch
from quiet import QUIET
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from mrp_lightning import CausalLM, Trainer
from mrp_lightning.errors import OptionError, TargetError

LOADER = DataLoader(torch.arange(1, 49).view(4, 12), 2)


@pytest.mark.parametrize(("loop", "offload"), [("test", False), ("validate", True)])
def test_it_evaluates_block_by_block(tiny_llama, loop, offload):
    streamed = CausalLM(tiny_llama, streaming=True, offload=offload)
    found = [
        getattr(Trainer(**QUIET), loop)(module, LOADER, verbose=False)
        for module in (CausalLM(tiny_llama), streamed)
    ]
    assert found[0] == found[1]
    assert all(tensor.is_meta for tensor in streamed.model.model.layers.parameters())


def test_a_streamed_weight_that_is_no_number_is_named(tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    state, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    state[name][3, 5] = torch.nan
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = CausalLM(tmp_path, streaming=True)
    with pytest.raises(TargetError, match=rf"^NaN or Inf in 1 parameter(?s:.*)\n  {name}: 1$"):
        Trainer(**QUIET).test(model, LOADER, verbose=False)
    assert all(tensor.is_meta for tensor in model.model.model.layers.parameters())


def test_what_needs_all_weights_is_refused(tiny_llama, tmp_path):
    in_memory, streamed = CausalLM(tiny_llama), CausalLM(tiny_llama, streaming=True)
    assert streamed.hparams["streaming"] is True
    trainer = Trainer(**QUIET)
    trainer.validate(in_memory, LOADER, verbose=False)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    with pytest.raises(OptionError, match="`ckpt_path` gives all weights"):
        Trainer(**QUIET).validate(streamed, LOADER, ckpt_path=str(tmp_path / "whole.ckpt"))
    with pytest.raises(OptionError, match=r"`fit` changes all .* without `streaming`"):
        Trainer(**QUIET, max_epochs=1).fit(streamed, LOADER)
    trainer = Trainer(**QUIET)
    trainer.validate(streamed, LOADER, verbose=False)
    with pytest.raises(OptionError, match="a Lightning checkpoint holds all"):
        trainer.save_checkpoint(tmp_path / "none.ckpt")
    for source in (in_memory.model, in_memory.model.config):
        with pytest.raises(OptionError, match="`model` to be a directory or hub id"):
            CausalLM(source, streaming=True)


@pytest.mark.gpu
def test_offload_keeps_blocks_off_the_device(tiny_llama):
    loader = DataLoader(torch.randint(1, 2048, (10, 12)), batch_size=4)
    lm = CausalLM(tiny_llama, offload=True)
    places: list[str] = []
    first, last = lm.model.model.layers
    last.register_forward_pre_hook(
        lambda *_: places.extend(p.device.type for p in first.parameters())
    )
    (logged,) = Trainer(**QUIET | {"accelerator": "cuda"}).test(lm, loader, verbose=False)
    (expected,) = Trainer(**QUIET | {"accelerator": "cuda"}).test(
        CausalLM(tiny_llama), loader, verbose=False
    )
    assert set(places) == {"cpu"}
    assert logged["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
