# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Compare methods
#
# Methods are compared first on one matrix, which takes a second, and then on the whole model.

# %%
import logging

import matplotlib.pyplot as plt
import torch

from mrp_lightning import CausalLM, HessianAccumulator, TextDataModule, Trainer, prune_weight
from mrp_lightning.callbacks import PruningCallback
from mrp_lightning.embedded import STDLIB_LLAMA

logging.disable(logging.WARNING)  # the progress of each block

data = TextDataModule(
    num_samples=16, sequence_length=256, batch_size=8, tokenizer=str(STDLIB_LLAMA)
)
data.setup("predict")
windows = data.calibration_windows()
dense = CausalLM(str(STDLIB_LLAMA))

# %% [markdown]
# ## One matrix
#
# A method uses nothing of the calibration text but the Hessian H = 2·XᵀX / tokens of a layer's inputs.

# %%
layer = dense.model.get_submodule("model.layers.1.mlp.up_proj")
hessian = HessianAccumulator(layer.in_features)
hook = layer.register_forward_pre_hook(lambda _, args: hessian.update(args[0]))
with torch.no_grad():
    dense.model(windows)
hook.remove()

weight, h = layer.weight.detach().float(), hessian.hessian()
energy = float((weight @ h * weight).sum()) / 2
methods = ["magnitude", "wanda", "sparsegpt", "wanda+M", "SM", "MM", "JM"]
losses = {m: prune_weight(weight, h, pattern="2:4", method=m).loss / energy for m in methods}

figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.plot(list(losses.values()), list(losses), "o")
axes.invert_yaxis()
axes.grid(axis="y", alpha=0.4)
axes.set(xlabel="relative loss of the layer at 2:4", xlim=(0, None))

# %% [markdown]
# `wanda+M` is Wanda's mask with the exact compensation. It separates the effect of the mask from that of moving
# the other weights.

# %%
for method, loss in losses.items():
    print(f"{method:10} {loss:.4f}  {loss / losses['sparsegpt']:.2f} × SparseGPT")

# %% [markdown]
# ## The whole model
#
# The perplexity is measured on text that neither training nor calibration saw.

# %%
quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}


def perplexity(method: str | None) -> float:
    """That of the embedded model at 2:4; of the dense one for `None`."""
    model = CausalLM(str(STDLIB_LLAMA))
    trainer = Trainer(**quiet, limit_test_batches=2, enable_model_summary=False)
    if method is not None:
        callback = PruningCallback(method=method, pattern="2:4")
        trainer.predict(model, datamodule=data, callbacks=[callback])
    return trainer.test(model, datamodule=data, verbose=False)[0]["perplexity"]


perplexities = {method: perplexity(method) for method in (None, "sparsegpt", "SM", "JM")}

figure, axes = plt.subplots(figsize=(6, 2), layout="constrained")
for method, value in perplexities.items():
    axes.plot(value, method or "dense", "o", color="#0a6d74")
    axes.annotate(f"{value:.2f}", (value, method or "dense"), (7, -3), textcoords="offset points")
axes.invert_yaxis()
axes.grid(axis="y", alpha=0.4)
axes.margins(x=0.15, y=0.2)
axes.set(xlabel="perplexity (lower is better)")
