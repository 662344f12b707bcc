# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Prune, and look inside
#
# The small LLaMA that comes with the package is pruned to 2:4 in a Lightning `predict` loop. Then we look at
# what was removed, what each layer lost, and how near each layer is to the optimum.

# %%
import logging

import matplotlib.pyplot as plt

from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.callbacks import MRPCallback
from mrp_lightning.embedded import STDLIB_LLAMA

logging.disable(logging.WARNING)  # the progress of each block

model = CausalLM(str(STDLIB_LLAMA))
data = TextDataModule(num_samples=16, sequence_length=256, batch_size=8)
quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
trainer = Trainer(**quiet, limit_test_batches=2, enable_model_summary=False)

# %% [markdown]
# The perplexity is measured before and after the pruning. `data` names no text, so it is the source of Python's
# standard library, of which training, calibration and evaluation use different files.

# %%
before = trainer.test(model, datamodule=data, verbose=False)[0]["perplexity"]
prune = MRPCallback(pattern="2:4", tolerance=1e-6)
trainer.predict(model, datamodule=data, callbacks=[prune])
after = trainer.test(model, datamodule=data, verbose=False)[0]["perplexity"]
print(f"perplexity {before:.2f} → {after:.2f}")

# %% [markdown]
# ## The mask
#
# Removed weights are exact zeros. In 2:4 every four consecutive weights of a row hold two of them.

# %%
weight = model.model.get_submodule("model.layers.1.self_attn.q_proj").weight.detach().float()
pruned = weight == 0
figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
axes.imshow(~pruned[:24, :96], cmap="Greys", aspect="auto")
axes.set(xlabel="input features", ylabel="output features", title="kept weights are dark")

# %%
groups = pruned.view(len(pruned), -1, 4).sum(-1)
print(f"{pruned.float().mean():.0%} removed; in a group of four: {groups.unique().tolist()}")

# %% [markdown]
# ## What each layer lost
#
# `relative_loss` is the mean over tokens of ‖δx‖², divided by that of ‖wx‖².

# %%
layers = prune.report.pruned
kinds = sorted({layer.name.rpartition(".")[2] for layer in layers})
blocks = sorted({layer.block for layer in layers})
losses = [[0.0] * len(blocks) for _ in kinds]
for layer in layers:
    kind = layer.name.rpartition(".")[2]
    losses[kinds.index(kind)][blocks.index(layer.block)] = layer.relative_loss
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
shown = axes.imshow(losses, cmap="viridis_r", aspect="auto")
axes.set_yticks(range(len(kinds)), kinds)
axes.set_xticks(range(len(blocks)))
axes.set(xlabel="block", title="relative loss")
figure.colorbar(shown)

# %% [markdown]
# ## How near to the optimum
#
# `gap` is a certified bound: the loss of a layer is at most this far above the optimal loss for the same mask,
# relative to its loss. The tolerance is a millionth here; the default for weights of 16 bits is 1e-4, which their rounding costs anyway.

# %%
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.semilogy([layer.gap for layer in layers], "o")
axes.axhline(1e-6, color="grey", linewidth=1)
axes.annotate("tolerance", (0, 1e-6), (0, 4), textcoords="offset points", color="grey")
axes.set(xlabel="layer, in the order of pruning", ylabel="certified gap", ylim=(1e-8, 4e-6))
