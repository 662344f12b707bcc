"""The stock Lightning trainer with a LightningModule of your own.

    python examples/own_module.py

Trains a residual network to tell noisy signals apart, prunes it with the callback in the stock
`lightning.Trainer`, and tests it before and after.
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from callbacks import MRPCallback

CLASSES, FEATURES, WIDTH = 20, 32, 96


class Residual(nn.Module):
    """x + MLP(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Classifier(lightning.LightningModule):
    """The list of blocks is what is walked and pruned; `embed` and `head` stay dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Residual() for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, signals: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(signals)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        signals, kinds = batch
        return nn.functional.cross_entropy(self(signals), kinds)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        signals, kinds = batch
        self.log("accuracy", (self(signals).argmax(1) == kinds).float().mean())

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch[0])  # what this runs is what is calibrated and pruned

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def data(count: int, seed: int) -> DataLoader:
    """Two waves of a frequency each, where the pair tells the class, in noise."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(CLASSES, (count,), generator=generator)
    phases = 6.28 * torch.rand(2, count, 1, generator=generator)
    time = torch.linspace(0, 6.28, FEATURES)
    waves = torch.sin((1 + kinds[:, None] % 5) * time + phases[0])
    waves += torch.sin((6 + kinds[:, None] // 5) * time + phases[1])
    signals = waves + 0.3 * torch.randn(count, FEATURES, generator=generator)
    return DataLoader(TensorDataset(signals, kinds), batch_size=128)


def main() -> dict[str, float]:
    lightning.seed_everything(0, verbose=False)
    options = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    model = Classifier()
    lightning.Trainer(max_epochs=4, **options).fit(model, data(8192, seed=0))
    (before,) = lightning.Trainer(**options).test(model, data(4096, seed=1), verbose=False)

    prune = MRPCallback(sparsity=0.8)
    lightning.Trainer(callbacks=[prune], **options).predict(model, data(2048, seed=2))
    (after,) = lightning.Trainer(**options).test(model, data(4096, seed=1), verbose=False)
    totals = prune.report.totals
    print(
        f"accuracy {before['accuracy']:.3f} dense, {after['accuracy']:.3f} with "
        f"{totals['sparsity']:.0%} of the weights of {totals['layers']} layers removed"
    )
    return {"dense": before["accuracy"], "pruned": after["accuracy"]}


if __name__ == "__main__":
    main()
