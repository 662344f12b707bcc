r"""The gain of each lever after 4 bits: scales by least squares, and the head by its own Hessian.

    python lab/benchmarks/levers.py MODEL --calibration C.txt --evaluation E.txt [--perplexity]

METHOD. MODEL is a dense LLaMA, such as the `dense` that engine_types.py writes. Windows of 512
tokens as there. Scales: the layers of the first blocks are put on a grid by the Hessians of the
dense model, once as `prune_weight` does and once without moving scales in the descent; the table
has the mean over the layers of the ratio of their losses. Head: the weight that embedding and head
share is put on a grid alone, all else dense, by each of three means: the nearest codes (H the
identity), scales and codes by diag(H), as an importance matrix gives, and the solver with the
Hessian H of the head's inputs. The table has the loss of the head's outputs relative to their
energy, over some of its rows, and the perplexity of the model.
"""

import argparse
import statistics
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from engine_types import perplexity, windows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrp_lightning import HessianAccumulator, prune_weight
from mrp_lightning.solver.problem import output_energy
from mrp_lightning.solver.quantisation import _Descent


class _Reached(Exception):  # noqa: N818 (ends a forward)
    """The last watched layer has its input."""


def hessians(model: nn.Module, layers: dict[str, nn.Linear], inputs: Tensor) -> dict[str, Tensor]:
    """Return the Hessians of the inputs of layers, by name; forwards end at the last of these."""
    sums = {name: HessianAccumulator(layer.in_features) for name, layer in layers.items()}

    def watch(name: str, layer: nn.Linear, is_last: bool) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            sums[name].update(args[0])
            if is_last:
                raise _Reached

        return layer.register_forward_pre_hook(hook)

    hooks = [watch(*each, i + 1 == len(layers)) for i, each in enumerate(layers.items())]
    with torch.no_grad():
        for batch in inputs.split(1):
            with suppress(_Reached):
                model(batch)
    for hook in hooks:
        hook.remove()
    return {name: each.hessian() for name, each in sums.items()}


def gain_of_scales(model: nn.Module, inputs: Tensor, blocks: int, grid: str) -> float:
    """Return the mean ratio of the losses with and without scales by least squares."""
    first = model.get_submodule("model.layers")[:blocks]  # type: ignore[index]
    layers = {name: m for name, m in first.named_modules() if isinstance(m, nn.Linear)}
    found = hessians(model, layers, inputs)
    ratios = []
    for name, layer in layers.items():
        moved = prune_weight(layer.weight, found[name], grid=grid).loss
        with patch.object(_Descent, "_improve_scales", lambda *_: None):
            ratios.append(moved / prune_weight(layer.weight, found[name], grid=grid).loss)
    return statistics.mean(ratios)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a Hugging Face directory of a LLaMA")
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=3, help="whose layers the scales are of")
    parser.add_argument("--rows", type=int, default=2048, help="of the head, for its loss")
    parser.add_argument("--windows", type=int, default=32, help="for the Hessian of the head")
    parser.add_argument("--perplexity", action="store_true", help="also with all rows on the grid")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    calibration = windows(options.calibration, tokenizer, 32)
    evaluation = windows(options.evaluation, tokenizer, 40)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    print(f"`python {' '.join(sys.argv)}`\n", flush=True)
    print("| grid | loss with scales by least squares, over that without |\n| --- | ---: |")
    for grid in ("q4_0", "iq4_nl"):
        ratio = gain_of_scales(model, calibration, options.blocks, grid)
        print(f"| {grid} | {ratio:.3f} |", flush=True)
    head = model.get_output_embeddings()
    dense = head.weight.detach().clone()
    some = dense[:: max(1, len(dense) // options.rows)]
    (hessian,) = hessians(model, {"head": head}, calibration[: options.windows]).values()
    energy = output_energy(some, hessian)
    print("\n| head and embedding | loss of its outputs | perplexity |\n| --- | ---: | ---: |")
    if options.perplexity:
        print(f"| dense | | {perplexity(model, evaluation):.3f} |", flush=True)
    means = {"nearest": torch.eye(len(hessian)), "diag(H)": hessian.diagonal().diag(), "H": hessian}
    for grid in ("q4_0", "iq4_nl"):
        for name, given in means.items():
            change = prune_weight(some, given, grid=grid).weight - some
            loss = output_energy(change, hessian) / energy
            value = ""
            if options.perplexity:
                head.weight.data.copy_(prune_weight(dense, given, grid=grid).weight)
                value = f"{perplexity(model, evaluation):.3f}"
            print(f"| {grid} by {name} | {loss:.5f} | {value} |", flush=True)


if __name__ == "__main__":
    main()
