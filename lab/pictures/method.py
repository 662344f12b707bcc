"""The pictures of docs/method.md: `python lab/pictures/method.py`, seconds on a CPU.

The first is of two weights, the second of a layer of the embedded model.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib
import numpy as np
import torch
from lines import color_of
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor

from mrp_lightning import CausalLM, HessianAccumulator, TextDataModule, prune_weight
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.experiments.pictures import INK, MUTED, PAPER, RULE, STYLE

DIRECTORY = Path(__file__).parents[2] / "docs" / "method"
LAYER = "model.layers.1.mlp.up_proj"
TOLERANCES = [10.0**-k for k in range(1, 8)]
WINDOWS, LENGTH = 8, 512


def main() -> None:
    """Measure, draw."""
    DIRECTORY.mkdir(exist_ok=True)
    weight, hessian = layer()
    with matplotlib.rc_context(STYLE):
        save(draw_two_weights(), "two-weights")
        save(draw_certificate(certified_and_true(weight, hessian)), "certificate")


@torch.no_grad()
def layer() -> tuple[Tensor, Tensor]:
    """Return the weight of a layer of the embedded model, and the Hessian of its inputs."""
    data = TextDataModule(num_samples=WINDOWS, sequence_length=LENGTH, tokenizer=str(STDLIB_LLAMA))
    data.setup("predict")
    model = CausalLM(str(STDLIB_LLAMA)).model
    module = model.get_submodule(LAYER)
    accumulator = HessianAccumulator(module.in_features)
    hook = module.register_forward_pre_hook(lambda _, args: accumulator.update(args[0]))
    model(data.calibration_windows())
    hook.remove()
    return module.weight.detach().float(), accumulator.hessian()


def certified_and_true(weight: Tensor, hessian: Tensor) -> list[tuple[int, float, float]]:
    """Iterations, the certified gap and the true one, for one removed set and falling tolerances.

    The true optimum is solved for row by row, in float64.
    """
    found = []
    best: float | None = None
    for tolerance in TOLERANCES:
        options: dict[str, Any] = {"method": "wanda+M", "sparsity": 0.5, "tolerance": tolerance}
        solution = prune_weight(weight, hessian, **options)
        damped = hessian.double() + solution.damping_used * torch.eye(len(hessian)).double()
        if best is None:
            best = damped_loss(exact_rows(weight, solution.pruned, damped), weight, damped)
        loss = damped_loss(solution.weight, weight, damped)
        found.append((int(solution.iterations or 0), float(solution.gap or 0), loss / best - 1))
    return found


def exact_rows(weight: Tensor, pruned: Tensor, damped: Tensor) -> Tensor:
    """w_U = H_UU⁻¹ (H w)_U, a dense solve for each row."""
    target = weight.double() @ damped
    rows = torch.zeros_like(target)
    for row, (removed, right) in enumerate(zip(pruned, target, strict=True)):
        kept = (~removed).nonzero().flatten()
        rows[row, kept] = torch.linalg.solve(damped[kept][:, kept], right[kept])
    return rows


def damped_loss(new: Tensor, weight: Tensor, damped: Tensor) -> float:
    """½·tr(δ H δᵀ)."""
    change = new.double() - weight.double()
    return float((change @ damped * change).sum()) / 2


def draw_two_weights() -> Figure:
    """The loss around two weights whose inputs are correlated, and three ways to remove one."""
    hessian = np.array([[1.0, 0.75], [0.75, 1.0]])
    dense = np.array([0.9, 1.0])
    grid = np.linspace(-0.45, 2.3, 200)
    x, y = np.meshgrid(grid, grid)
    change = np.stack([x - dense[0], y - dense[1]], -1)
    loss = np.einsum("...i,ij,...j", change, hessian, change) / 2
    moved = dense[1] + hessian[0, 1] / hessian[1, 1] * dense[0]
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axes = figure.subplots()
    levels = [0.02, 0.08, 0.18, 0.32, 0.5, 0.72, 0.98]
    axes.contour(x, y, loss, levels, colors=RULE, linewidths=1)
    axes.axvline(0, color=MUTED, linewidth=1)
    axes.plot(*dense, "o", color=INK)
    axes.annotate("dense: loss 0", dense, (8, 8), textcoords="offset points", color=INK)
    marks = {"magnitude": ("s", dense[1]), "SM": ("P", moved)}
    for method, (marker, height) in marks.items():
        color = color_of(method)
        at = np.array([0.0, height])
        rule: Any = {"arrowstyle": "->", "color": color, "linewidth": 1.3, "shrinkB": 5}
        axes.annotate("", at, dense, arrowprops=rule)
        axes.plot(*at, marker, color=color, markersize=7)
        cost = float((at - dense) @ hessian @ (at - dense)) / 2
        what = "w₁ removed, w₂ as it was" if method == "magnitude" else "w₁ removed, w₂ optimal"
        paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}  # no contour through words
        how: Any = {"textcoords": "offset points", "color": color, "va": "center", "bbox": paper}
        place = (8, -14) if method == "magnitude" else (8, 12)
        align = "left"
        axes.annotate(f"{what}: loss {cost:.2f}", at, place, ha=align, **how)
    axes.annotate("w₁ = 0", (0, -0.4), (5, 0), textcoords="offset points", color=MUTED)
    axes.set(xlabel="w₁", ylabel="w₂", xlim=(-0.45, 2.3), ylim=(-0.45, 2.3))
    axes.grid(False)
    return figure


def draw_certificate(found: list[tuple[int, float, float]]) -> Figure:
    """Return the certified and the true distance to the optimum, by iterations."""
    figure = Figure(figsize=(5.4, 2.8), layout="constrained")
    axes = figure.subplots()
    iterations, certified, true = zip(*found, strict=True)
    drawn = {"certified": (certified, color_of("SM"), "o"), "true": (true, MUTED, "s")}
    for name, (values, color, marker) in drawn.items():
        shown = [(i, v) for i, v in zip(iterations, values, strict=True) if v > 0]
        axes.plot(*zip(*shown, strict=True), marker=marker, color=color, markersize=5)
        how: Any = {"textcoords": "offset points", "color": color, "va": "center"}
        axes.annotate(name, shown[-1], (9, 0), annotation_clip=False, **how)
    axes.set(yscale="log", xlabel="iterations", ylabel="distance to the optimum, relative")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e-0", "e−"))
    return figure


def save(figure: Figure, name: str) -> None:
    """Write a picture."""
    figure.savefig(DIRECTORY / f"{name}.svg", facecolor=PAPER, metadata={"Date": None})


if __name__ == "__main__":
    main()
