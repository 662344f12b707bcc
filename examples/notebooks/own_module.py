# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Your own module
#
# Nothing here is a language model: a LightningModule of residual blocks learns a function, is pruned to 70%
# and evaluated again. The pruned layers are those of the blocks that `predict_step` runs.

# %%
import logging

import matplotlib.pyplot as plt
import torch
from lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mrp_lightning.callbacks import PruningCallback

logging.disable(logging.WARNING)  # the progress of each block
seed_everything(0, verbose=False)
x = torch.rand(2048, 2) * 4 - 2
y = torch.sin(3 * x[:, :1]) * torch.cos(2 * x[:, 1:])
loader = DataLoader(TensorDataset(x, y), batch_size=256)


class Regression(LightningModule):
    """Six residual blocks from two numbers to one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 64)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)]
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """All blocks."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def predict_step(self, batch: list[Tensor], _: int) -> Tensor:
        """What calibration runs."""
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)


quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
quiet |= {"enable_checkpointing": False, "enable_model_summary": False}
dense = Regression()
Trainer(max_epochs=40, **quiet).fit(dense, loader)

# %% [markdown]
# ## Prune it, by three methods
#
# Each starts from the same trained weights. The callback changes them in place.


# %%
@torch.no_grad()
def error(model: nn.Module) -> float:
    """Mean squared error."""
    return float((model(x) - y).square().mean())


errors, models = {"dense": error(dense)}, {}
for method in ("magnitude", "sparsegpt", "SM"):
    models[method] = Regression()
    models[method].load_state_dict(dense.state_dict())
    prune = PruningCallback(method=method, sparsity=0.7)
    Trainer(callbacks=[prune], **quiet).predict(models[method], loader)
    errors[method] = error(models[method])
for method, value in errors.items():
    print(f"{method:10} {value:.5f}")

# %% [markdown]
# The picture shows the function along one line, before and after pruning:

# %%
line = torch.stack([torch.linspace(-2, 2, 200), torch.zeros(200)], -1)
styles = {
    "dense": {"color": "#1c2024", "linewidth": 3, "alpha": 0.35},
    "magnitude": {"color": "#7b838c", "linestyle": ":"},
    "sparsegpt": {"color": "#c04a2b", "linestyle": "--"},
    "SM": {"color": "#0a6d74", "linewidth": 1.5},
}
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for name, model in {"dense": dense, **models}.items():
    with torch.no_grad():
        axes.plot(line[:, 0], model(line)[:, 0], label=name, **styles[name])
axes.set(xlabel="x₁ at x₂ = 0", ylabel="y")
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

# %% [markdown]
# The report lists the layers of the repeated blocks. The first and the last layer are in no block and stay dense,
# unless `targets` names them.

# %%
for layer in prune.report.layers:
    print(f"{layer.name:12} {layer.sparsity:.0%} removed, relative loss {layer.relative_loss:.4f}")
