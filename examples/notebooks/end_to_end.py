# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # From a checkpoint to a packed model
#
# SmolLM2-135M-Instruct is evaluated, pruned to half of its weights in 4 bits, packed, and generates text, with the time
# of a token before and after. `make runs/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf` downloads it (90 MB); without it, the
# small LLaMA that comes with the package takes its place. `MODEL` can be any directory, hub id or GGUF file. The text is
# the source of Python's standard library, which is there without a download.

# %%
import logging
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM

import mrp_sparse  # noqa: F401  registers the packed formats
from callbacks import MRPCallback
from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.commands.main import main
from mrp_lightning.embedded import STDLIB_LLAMA

REAL = Path("../../runs/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
MODEL = REAL if REAL.exists() else STDLIB_LLAMA
RUN = Path("../../runs/notebook/half-4bit")
logging.disable(logging.WARNING)  # the progress of each block
quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
data = TextDataModule(num_samples=16, sequence_length=512, batch_size=8)


def perplexity(model: CausalLM) -> float:
    """Perplexity on text that calibration does not see; lower is better."""
    trainer = Trainer(**quiet, limit_test_batches=2, enable_model_summary=False)
    return trainer.test(model, datamodule=data, verbose=False)[0]["perplexity"]


model = CausalLM(str(MODEL))
perplexities = {"dense": perplexity(model)}

# %% [markdown]
# ## Prune it
#
# Half of the weights of each layer are removed, and the others are moved to the optimum on a grid of 4 bits. The
# result is an ordinary Hugging Face directory.

# %%
prune = MRPCallback(sparsity=0.5, bits=4, save_dir=RUN, overwrite=True)
Trainer(**quiet).predict(model, datamodule=data, callbacks=[prune])
perplexities["50%, 4 bits"] = perplexity(model)
for name, value in perplexities.items():
    print(f"{name:12} {value:.2f}")

# %% [markdown]
# SmolLM2's perplexity rises by more than half: 16 windows are little text, `SM` is the quickest of the accurate methods, and a
# small model has few weights to spare. More windows and `mrp-lightning prune --recipe best_4bit` lose less, in more time.
#
# Where is most lost? The relative loss of a layer is the mean square of the change of its outputs, relative to them.

# %%
losses: dict[str, list[float]] = {}
for layer in prune.report.layers:
    losses.setdefault(layer.name.rpartition(".")[2], []).append(layer.relative_loss)
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for (name, values), marker in zip(losses.items(), "osD^vPX", strict=False):
    axes.plot(values, marker, label=name, markersize=4)
axes.set(xlabel="block", ylabel="relative loss of the layer", yscale="log")
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)

# %% [markdown]
# ## Pack it
#
# The zeros are not stored any more. The command reads the result back and proves it equal.

# %%
main(["export", str(RUN), "--overwrite"])
packed_directory = RUN.with_name(f"{RUN.name}-bitmask4")

# %% [markdown]
# ## Generate text with it
#
# `mrp-lightning generate` does this on the command line.

# %%
tokenizer = model.tokenizer
prompt = tokenizer("def fibonacci(n):", return_tensors="pt")
models = {
    "dense": AutoModelForCausalLM.from_pretrained(RUN, dtype=torch.bfloat16),
    "packed": AutoModelForCausalLM.from_pretrained(packed_directory),
}
new_tokens, texts, milliseconds = 24, {}, {}
for name, loaded in models.items():
    with torch.inference_mode():
        options = {"do_sample": False, "min_new_tokens": new_tokens, "pad_token_id": 0}
        loaded.generate(**prompt, max_new_tokens=new_tokens, **options)  # kernels are compiled here
        start = time.process_time()
        written = loaded.generate(**prompt, max_new_tokens=new_tokens, **options)
    milliseconds[name] = 1000 * (time.process_time() - start) / new_tokens
    texts[name] = tokenizer.decode(written[0])
print(texts["packed"])

# %% [markdown]
# ## What it gained
#
# CPU time of a token, eager, with all threads that torch takes, and the bytes of the weight files. The dense model is
# the pruned one with its zeros stored. Other work on the machine makes such a quick look uneven; the pages on speed
# have careful ones.

# %%
sizes = {
    name: sum(file.stat().st_size for file in directory.glob("*.safetensors")) / 2**20
    for name, directory in {"dense": RUN, "packed": packed_directory}.items()
}
figure, panels = plt.subplots(1, 2, figsize=(7, 1.6), layout="constrained")
for axes, values, label in zip(
    panels, (sizes, milliseconds), ("MiB", "CPU ms a token"), strict=True
):
    bars = axes.barh(list(values), list(values.values()), color=["#7b838c", "#0a6d74"], height=0.6)
    axes.bar_label(bars, fmt="%.0f", padding=4)
    axes.margins(x=0.2)
    axes.set(xlabel=label)
    axes.invert_yaxis()
