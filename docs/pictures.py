"""The pictures of docs/methods.md: `python docs/pictures.py`, some minutes on a CPU.

They are of the embedded model at 70% sparsity, calibrated on 32 windows of 512 tokens.
"""

from collections.abc import Mapping
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from callbacks import MRPCallback
from mrp_lightning import CausalLM, HessianAccumulator, TextDataModule, Trainer, prune_weight
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.experiments.page.drawing import (
    INK,
    PAPER,
    RULE,
    STYLE,
    color_of,
    looks_of_methods,
    set_value_axis,
)

HERE = Path(__file__).parent / "methods"
SPARSITY = 0.7
LAYER = "model.layers.0.self_attn.o_proj"
RECIPES = {
    "SM": {"method": "SM"},
    "JM": {"method": "JM"},
    "JM, dense target": {"method": "JM", "target": "dense"},
    "JM, dense target, tuning": {"method": "JM", "target": "dense", "tuning": True},
}


def main() -> None:
    """Prune, measure and draw."""
    HERE.mkdir(exist_ok=True)
    dense = CausalLM(str(STDLIB_LLAMA), dtype="float32").model
    with torch.no_grad():
        states = hidden_states(dense)
        errors = {name: error_by_block(recipe, states) for name, recipe in RECIPES.items()}
        kept, losses = masks(dense)
    with matplotlib.rc_context(STYLE):
        save(draw_errors(errors), "error-by-block")
        save(draw_masks(kept, losses), "joint-mask")


def text_of(model: nn.Module | None = None) -> TextDataModule:
    """The calibration and the test text."""
    return TextDataModule(
        num_samples=32, sequence_length=512, batch_size=8, tokenizer=str(STDLIB_LLAMA)
    )


def test_windows() -> Tensor:
    """Windows (16, 512) that calibration does not see."""
    data = text_of()
    data.setup("test")
    (loader, *_) = [data.test_dataloader()]
    batches = [batch["input_ids"] for batch, _ in zip(loader, range(2), strict=False)]
    return torch.cat(batches)
