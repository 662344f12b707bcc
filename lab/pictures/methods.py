"""The pictures of docs/methods.md: `python lab/pictures/methods.py`, some minutes on a CPU.

They are of the embedded model at 70%, calibrated on 32 windows of 512 tokens.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib
import torch
from lines import color_of, line_styles, marker_of
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.data import DataLoader

from callbacks import MRPCallback
from mrp_lightning import CausalLM, HessianAccumulator, TextDataModule, Trainer, prune_weight
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.experiments.pictures import PAPER, RULE, STYLE

DIRECTORY = Path(__file__).parents[2] / "docs" / "methods"
SPARSITY = 0.7
WINDOWS, LENGTH = 32, 512
LAYERS = [
    f"model.layers.1.{name}"
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
]
"""The layers whose masks are compared, one for each input of a block; the first one is drawn."""

RECIPES: dict[str, dict[str, Any]] = {
    "SM": {"method": "SM"},
    "JM": {"method": "JM"},
    "JM, dense target": {"method": "JM", "target": "dense"},
    "JM, dense target, tuning": {"method": "JM", "target": "dense", "tuning": True},
}


def main() -> None:
    """Prune, measure, draw."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    DIRECTORY.mkdir(exist_ok=True)
    data = TextDataModule(num_samples=WINDOWS, sequence_length=LENGTH, tokenizer=str(STDLIB_LLAMA))
    data.setup("predict")
    data.setup("test")
    calibration, unseen = data.calibration_windows(), data.windows("test").ids[:16]
    dense = CausalLM(str(STDLIB_LLAMA)).model
    states = hidden_states(dense, unseen)
    errors = {}
    for name, recipe in RECIPES.items():
        pruned = prune(calibration, recipe)
        errors[name] = [
            float((ours - theirs).square().sum() / theirs.square().sum())
            for ours, theirs in zip(hidden_states(pruned, unseen), states, strict=True)
        ]
    with matplotlib.rc_context(STYLE):
        save(draw_masks(*compare_masks(dense, calibration)), "joint-mask")
        save(draw_errors(errors), "error-by-block")


def prune(windows: Tensor, recipe: Mapping[str, Any]) -> nn.Module:
    """Return the embedded model, pruned by a recipe."""
    model = CausalLM(str(STDLIB_LLAMA))
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    batches = DataLoader(windows, batch_size=8)
    trainer.predict(model, batches, callbacks=[MRPCallback(sparsity=SPARSITY, **recipe)])
    return model.model


@torch.no_grad()
def hidden_states(model: nn.Module, windows: Tensor) -> Sequence[Tensor]:
    """Return the output of each block, before the final norm."""
    found: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda *args: found.append(args[-1].float()))
        for block in model.model.layers  # type: ignore[union-attr]
    ]
    model(windows)
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
def compare_masks(
    model: nn.Module, windows: Tensor
) -> tuple[list[tuple[Tensor, Tensor]], list[list[float]]]:
    """Return the masks of SM and JM in the layers, and the relative losses."""
    hessians = {name: HessianAccumulator(model.get_submodule(name).in_features) for name in LAYERS}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: hessians[name].update(args[0])
        )
        for name in LAYERS
    ]
    for batch in windows.split(8):
        model(batch)
    for hook in hooks:
        hook.remove()
    masks, losses = [], []
    for name, accumulator in hessians.items():
        weight, hessian = model.get_submodule(name).weight.float(), accumulator.hessian()
        energy = float((weight @ hessian * weight).sum()) / 2
        found = [prune_weight(weight, hessian, sparsity=SPARSITY, method=m) for m in ("SM", "JM")]
        masks.append((found[0].pruned, found[1].pruned))
        losses.append([solution.loss / energy for solution in found])
    return masks, losses


def draw_masks(masks: list[tuple[Tensor, Tensor]], losses: list[list[float]]) -> Figure:
    """Return a corner of one layer, weight by weight; and the losses of all."""
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    single, joint = (kept[:24, :72] for kept in (~masks[0][0], ~masks[0][1]))
    colors = [PAPER, RULE, color_of("SM"), color_of("JM")]
    kinds = ["removed by both", "kept by both", "kept by SM alone", "kept by JM alone"]
    cells = torch.where(single & joint, 1, torch.where(single, 2, torch.where(joint, 3, 0)))
    left.imshow(cells, cmap=ListedColormap(colors), vmin=0, vmax=3, aspect="auto")
    left.set(xticks=[], yticks=[], xlabel="input features", ylabel="output features")
    left.grid(False)
    for i, (kind, color) in list(enumerate(zip(kinds, colors, strict=True)))[1:]:
        how: Any = {"xycoords": "axes fraction", "textcoords": "offset points"}
        left.annotate("■", ((i - 1) / 3, 1), (0, 4), color=color, **how)
        left.annotate(kind, ((i - 1) / 3, 1), (12, 4), **how)
    for i, method in enumerate(("SM", "JM")):
        values = [pair[i] for pair in losses]
        right.plot(values, range(len(LAYERS)), marker_of(method), color=color_of(method))
        above = (values[0], -0.25)
        right.annotate(method, above, color=color_of(method), ha="center", va="bottom")
    changed = [float((a != b).float().mean() / 2 / (1 - SPARSITY)) for a, b in masks]
    names = [name.rpartition(".")[2] for name in LAYERS]
    labels = [f"{name}\n{c:.0%} kept elsewhere" for name, c in zip(names, changed, strict=True)]
    right.set_yticks(range(len(LAYERS)), labels)
    right.set(xlabel="relative loss", xlim=(0, None), ylim=(len(LAYERS) - 0.5, -0.8))
    return figure


def draw_errors(errors: Mapping[str, list[float]]) -> Figure:
    """Return the relative error of the hidden states after each block."""
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.subplots()
    methods = [str(recipe["method"]) for recipe in RECIPES.values()]
    for (name, values), line in zip(errors.items(), line_styles(methods), strict=True):
        axes.plot(values, label=name, **line)
    axes.set(xlabel="after block", ylabel="‖x̂ − x_d‖² / ‖x_d‖²", ylim=(0, None))
    axes.set_xticks(range(len(values)))
    axes.xaxis.grid(False)
    axes.legend(frameon=False)
    return figure


def save(figure: Figure, name: str) -> None:
    """Write a picture."""
    figure.savefig(DIRECTORY / f"{name}.svg", facecolor=PAPER, metadata={"Date": None})


if __name__ == "__main__":
    main()
