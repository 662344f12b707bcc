"""A run says before its work that its text is too little for the layers, or none at all."""

import re

import pytest
import torch
from quiet import QUIET
from torch.utils.data import DataLoader
from transformers import AutoConfig

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.loop import pruning_run

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def said(monkeypatch, caplog):
    """What is logged before the pruning, which is left out, on windows of token ids."""

    def of(*batches) -> str:
        caplog.clear()

        class BegunError(Exception): ...

        def begin(_):
            raise BegunError

        monkeypatch.setattr(pruning_run, "prune_model", begin)
        model = CausalLM(AutoConfig.for_model("llama", **SIZES))
        data = DataLoader(batches, batch_size=None)
        with pytest.raises(BegunError):
            Trainer(**QUIET).predict(model, data, callbacks=[MRPCallback(pattern="2:4")])
        return caplog.text

    return of


def random_windows(count: int, length: int = 8) -> torch.Tensor:
    return torch.randint(64, (count, length), generator=torch.Generator().manual_seed(0))


def test_fewer_tokens_than_columns_are_counted(said):
    few = "40 tokens in 5 different windows, and model.layers.0.mlp.down_proj, .* 48 columns"
    assert "columns" not in said(random_windows(6))  # 48 tokens
    assert re.search(few, said(random_windows(5)))
    # Neither padding nor the same window again is more text.
    padded = {"input_ids": random_windows(5, 16), "attention_mask": torch.ones(5, 16).long()}
    padded["attention_mask"][:, 8:] = 0
    assert re.search(few, said(padded))
    assert re.search(few, said(random_windows(5), random_windows(5)))


def test_one_word_again_and_again_is_no_text(said):
    word = torch.tensor([[5, 6] * 8, [6, 5] * 8, [6, 6] * 8, [5, 5] * 8])
    assert "All 64 tokens of the calibration data are repetitions of 2 different" in said(word)
    assert "repetitions" not in said(random_windows(8))
