"""An image encoder: any module that a predict loop can call is pruned.

    python examples/vision_encoder.py

The ViT is small and has random weights; yours comes from `ViTModel.from_pretrained`.
"""

import torch
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTModel

from callbacks import MRPCallback
from mrp_lightning import Trainer


def main() -> float:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    model = ViTModel(config).eval()
    images = torch.rand(64, 3, 32, 32)
    with torch.no_grad():
        before = model(images[:8]).last_hidden_state

    # A mapping is unpacked: the model is called as model(pixel_values=...).
    loader = DataLoader([{"pixel_values": image} for image in images], batch_size=16)
    prune = MRPCallback(pattern="2:4", ignore="pooler")
    Trainer(logger=False, enable_progress_bar=False).predict(model, loader, callbacks=[prune])

    with torch.no_grad():
        after = model(images[:8]).last_hidden_state
    change = float((after - before).norm() / before.norm())
    print(f"{prune.report.totals['layers']} layers are 2:4; outputs changed by {change:.1%}")
    return change


if __name__ == "__main__":
    main()
