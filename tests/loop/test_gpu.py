"""Evaluation on a GPU. No Hypothesis here: it may be missing where there is a GPU."""

import pytest
import torch
from torch.utils.data import DataLoader

from mrp_lightning import CausalLM, Trainer

QUIET = {
    "accelerator": "cuda",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


@pytest.mark.gpu
def test_offload_keeps_blocks_off_the_device(tiny_llama):
    loader = DataLoader(torch.randint(1, 2048, (10, 12)), batch_size=4)
    lm = CausalLM(tiny_llama, offload=True)
    places: list[str] = []
    first, last = lm.model.model.layers
    last.register_forward_pre_hook(
        lambda *_: places.extend(p.device.type for p in first.parameters())
    )
    (logged,) = Trainer(**QUIET).test(lm, loader, verbose=False)
    (expected,) = Trainer(**QUIET).test(CausalLM(tiny_llama), loader, verbose=False)
    assert set(places) == {"cpu"}
    assert logged["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
