from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from quiet import QUIET
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


@pytest.fixture
def quiet() -> dict[str, Any]:
    """Trainer arguments that keep it silent and off the disk."""
    return dict(QUIET)


@pytest.fixture
def llama() -> Callable[..., PreTrainedModel]:
    """A tiny random LLaMA, the same one on every call."""

    def build(**config: Any) -> PreTrainedModel:
        torch.manual_seed(0)
        options = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
            "initializer_range": 0.2,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model("llama", **options | config)
        ).eval()

    return build


@pytest.fixture
def windows() -> Tensor:
    """Calibration windows (8, 16)."""
    return torch.randint(3, 64, (8, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def loader(windows: Tensor) -> DataLoader:
    """Four batches of two windows."""
    return DataLoader(windows, batch_size=2)


class Own(pl.LightningModule):
    """A user's LightningModule, which knows nothing of pruning."""

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__()
        self.net = net

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.net(input_ids=batch).logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.fixture
def own() -> type[Own]:
    return Own
