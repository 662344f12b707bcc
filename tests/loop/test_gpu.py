"""Evaluation on a GPU. No Hypothesis here: it may be missing where there is a GPU."""

import pytest
import torch
from quiet import QUIET
from torch.utils.data import DataLoader

from mrp_lightning import CausalLM, Trainer

ON_GPU = QUIET | {"accelerator": "cuda"}


@pytest.mark.gpu
def test_offload_keeps_blocks_off_the_device(tiny_llama):
    loader = DataLoader(torch.randint(1, 2048, (10, 12)), batch_size=4)
    lm = CausalLM(tiny_llama, offload=True)
    places: list[str] = []
    first, last = lm.model.model.layers
    last.register_forward_pre_hook(
        lambda *_: places.extend(p.device.type for p in first.parameters())
    )
    (logged,) = Trainer(**ON_GPU).test(lm, loader, verbose=False)
    (expected,) = Trainer(**ON_GPU).test(CausalLM(tiny_llama), loader, verbose=False)
    assert set(places) == {"cpu"}
    assert logged["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-6)
