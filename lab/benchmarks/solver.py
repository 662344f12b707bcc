"""Time of the multiple-removal solver against SparseGPT's column sweep, ALPS and per-row Cholesky.

    python lab/benchmarks/solver.py --sizes 512 1024 --threads 1
    python lab/benchmarks/solver.py --sizes 576 --inputs steep --threads 1
    python lab/benchmarks/solver.py --sizes 1024 4096 4096x11008 --device cuda
    python lab/benchmarks/solver.py --model DIR --layers model.layers.12.self_attn.q_proj
    python lab/benchmarks/solver.py --model DIR --layers … --abroad wikitext2/valid.txt --rounds 0

With `--model`, layers of the dense model are pruned, with the Hessians of 16 windows of 512 tokens
of the standard library's code. With `--abroad`, losses of the same weights on another text follow.

All contestants prune the same layer to 2:4 in the same dtype, factorise the Hessian themselves and
take turns; the median of the rounds is shown. Hessians are those of inputs with a decaying
spectrum, correlated features and a few large channels; `few` of them are half as many as there are
columns, and `steep` ones have, besides, a spectrum that falls so fast that float32 is at its end.
"""

import argparse
import os
import statistics
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import originals
import torch
from originals import DAMPING, prune_matrix
from torch import Tensor

from mrp_lightning import CausalLM, HessianAccumulator
from mrp_lightning.devices import machine
from mrp_lightning.errors import NumericalWarning
from mrp_lightning.solver.pruning import Solution, prune_weight

BASE = "SparseGPT column sweep (128)"
CONTESTANTS = {
    BASE: ("SS", 128),
    "SM (128)": ("SM", 128),
    "SM (512)": ("SM", 512),
    "SM (all)": ("SM", None),
    "MM (128)": ("MM", 128),
    "MM (all)": ("MM", None),
    "JM": ("JM", None),
}


INPUTS = {"plain": (4.0, -0.6), "few": (0.5, -0.6), "steep": (0.5, -1.5)}
"""Number of inputs relative to the columns, and the exponent of the decay of the spectrum."""


def layer(
    rows: int, columns: int, inputs: str, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return a weight (rows, columns) and the Hessian (columns, columns) of realistic inputs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    rotation = torch.linalg.qr(normal(columns, columns)).Q
    ratio, exponent = INPUTS[inputs]
    spectrum = torch.arange(1.0, columns + 1, device=device) ** exponent
    channels = torch.exp(0.5 * normal(columns))
    channels[:: max(columns // 8, 1)] *= 10
    hessian = torch.zeros(columns, columns, device=device)
    number = int(ratio * columns)
    for start in range(0, number, columns):
        batch = normal(min(columns, number - start), columns)
        activations = (batch * spectrum) @ rotation.T * channels
        hessian += 2 * activations.T @ activations / number
    weight = normal(rows, columns) / columns**0.5
    return weight.to(dtype), hessian


def real_layers(
    path: str, names: list[str], abroad: Path | None
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield weights (rows, columns) of layers of a model, and their Hessians at home and abroad."""
    causal_lm = CausalLM(path, dtype="float32")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::5]
    at_home = hessians(causal_lm, names, "".join(file.read_text(errors="ignore") for file in files))
    elsewhere = {} if abroad is None else hessians(causal_lm, names, abroad.read_text())
    for name in names:
        weight = causal_lm.model.get_submodule(name).weight
        yield weight.detach().clone(), at_home[name], elsewhere.get(name)


def hessians(causal_lm: CausalLM, names: list[str], text: str) -> dict[str, Tensor]:
    """Return the Hessians of layers on 16 windows of 512 tokens, spread over a text."""
    model = causal_lm.model.eval()
    layers = {name: model.get_submodule(name) for name in names}
    sums = {name: HessianAccumulator(layers[name].weight.shape[1], name) for name in names}
    hooks = [
        each.register_forward_pre_hook(lambda _, inputs, name=name: sums[name].update(inputs[0]))
        for name, each in layers.items()
    ]
    tokens = causal_lm.tokenizer(text)["input_ids"]
    for start in range(0, 16 * 2048, 2048):
        model(torch.tensor([tokens[start : start + 512]]))
    for hook in hooks:
        hook.remove()
    return {name: each.hessian() for name, each in sums.items()}


def solve(weight: Tensor, hessian: Tensor, method: str, block_size: int | None) -> Solution:
    """Prepare and prune, as for a layer whose input no other layer shares."""
    return prune_weight(
        weight, hessian, pattern="2:4", method=method, block_size=block_size, damping=DAMPING
    )


def cholesky_by_row(weight: Tensor, hessian: Tensor, pruned: Tensor) -> Tensor:
    """The optimum of a removed set by one batched Cholesky factorisation a row, in float32."""
    matrix = hessian.clone()
    matrix.diagonal().add_(DAMPING * matrix.diagonal().mean())
    dense = weight.float()
    target = dense @ matrix
    kept = (~pruned).nonzero()[:, 1].view(weight.shape[0], -1)  # 2:4 keeps as many in each row
    result = torch.zeros_like(dense)
    batch = max(1, 2**28 // kept.shape[1] ** 2)
    for rows in range(0, weight.shape[0], batch):
        places = kept[rows : rows + batch]
        systems = matrix[places[:, :, None], places[:, None, :]]
        factors = torch.linalg.cholesky(systems)
        right = target[rows : rows + batch].gather(1, places)
        solved = torch.cholesky_solve(right.unsqueeze(2), factors).squeeze(2)
        result[rows : rows + batch].scatter_(1, places, solved)
    return result.to(weight.dtype)


def loss_of(result: Tensor, weight: Tensor, hessian: Tensor) -> float:
    """½·tr(δ H δᵀ) in float64."""
    change = result.double() - weight.double()
    return float(((change @ hessian.double()) * change).sum()) / 2


def timed(
    run: Callable[[], Solution | Tensor], device: torch.device, clock: Callable[[], float]
) -> tuple[Solution | Tensor, float]:
    """Return the result of one run, and its seconds with what it started on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, clock() - start


def measure(
    weight: Tensor, hessian: Tensor, abroad: Tensor | None, args: argparse.Namespace
) -> Iterator[str]:
    """Yield the rows of the table for one layer."""
    (rows, columns), device = weight.shape, weight.device
    runs: dict[str, Callable[[], Solution | Tensor]] = {
        name: lambda method=method, block=block: solve(weight, hessian, method, block)
        for name, (method, block) in CONTESTANTS.items()
        if name == BASE or name in args.methods
    }
    if not args.skip_cholesky:
        pruned = solve(weight, hessian, "SM", None).pruned
        runs["per-row Cholesky of SM (all)"] = lambda: cholesky_by_row(weight, hessian, pruned)
    if args.sparsegpt:
        sparsegpt = originals.sparsegpt(args.sparsegpt)
        runs["original SparseGPT code"] = lambda: prune_matrix(sparsegpt, weight, hessian)
    if args.alps:
        alps = originals.alps(args.alps)
        runs["original ALPS code"] = lambda: prune_matrix(alps, weight, hessian)

    clock = time.process_time if args.cpu_time else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    results: dict[str, Solution | Tensor] = {}
    # The first round is the warm-up, which counts only where there is no other.
    for number in range(1 + args.rounds):
        for name, run in runs.items():
            results[name], elapsed = timed(run, device, clock)
            if number > 0 or args.rounds == 0:
                times[name].append(elapsed)
    medians = {name: statistics.median(values) for name, values in times.items()}

    dense_losses = [
        (each, loss_of(torch.zeros_like(weight), weight, each))
        for each in (hessian, abroad)
        if each is not None
    ]
    damped = hessian.double()
    damped.diagonal().add_(DAMPING * damped.diagonal().mean())
    eigenvalues = torch.linalg.eigvalsh(damped)
    condition = float(eigenvalues[-1] / eigenvalues[0])
    for name, result in results.items():
        solution = result if isinstance(result, Solution) else None
        found = result if isinstance(result, Tensor) else result.weight
        gap = "" if solution is None or solution.gap is None else f"{solution.gap:.1e}"
        steps = "" if solution is None or solution.iterations is None else str(solution.iterations)
        spread = max(times[name]) / min(times[name])
        yield (
            f"| {rows}×{columns} | {condition:.0f} | {name} | {medians[name]:.3f} | {spread:.2f} "
            f"| {medians[name] / medians[BASE]:.2f} | {steps} | {gap} "
            + "".join(f"| {loss_of(found, weight, each) / of:.3g} " for each, of in dense_losses)
            + "|"
        )


def size(text: str) -> tuple[int, int]:
    """Read 1024 or 4096x11008."""
    rows, _, columns = text.partition("x")
    return int(rows), int(columns or rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=size, default=[(512, 512), (1024, 1024)])
    parser.add_argument(
        "--model", help="a checkpoint or GGUF file, for `--layers` in place of `--sizes`"
    )
    parser.add_argument("--layers", nargs="+", help="names of linear layers of the model")
    parser.add_argument("--abroad", type=Path, help="another text, on which losses are shown, too")
    parser.add_argument("--methods", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--inputs", choices=INPUTS, default="plain")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time, not elapsed time")
    parser.add_argument("--skip-cholesky", action="store_true")
    parser.add_argument("--sparsegpt", type=Path, help="a checkout of IST-DASLab/sparsegpt")
    parser.add_argument("--alps", type=Path, help="a checkout of mazumder-lab/ALPS")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    warnings.simplefilter("error", NumericalWarning)

    unit = "CPU s" if args.cpu_time else "s"
    print(f"`python {' '.join(sys.argv)}`\n")
    print(f"{machine(args.device)}; weights {args.dtype};")
    print(f"2:4; median of {args.rounds} rounds; load average {os.getloadavg()[0]:.1f} before.\n")
    print(f"| layer | condition | method | {unit} | max/min ", end="")
    print("| × column sweep | steps | gap | rel. loss |", "abroad |" * bool(args.abroad))
    print("|---|---|---|---|---|---|---|---|---|" + "---|" * bool(args.abroad))
    dtype = getattr(torch, args.dtype)
    with torch.no_grad():
        if args.model:
            problems = real_layers(args.model, args.layers, args.abroad)
        else:
            problems = (
                (*layer(rows, columns, args.inputs, args.device, dtype), None)
                for rows, columns in args.sizes
            )
        for weight, hessian, abroad in problems:
            moved = weight.to(args.device, dtype), hessian.to(args.device)
            for line in measure(*moved, None if abroad is None else abroad.to(args.device), args):
                print(line, flush=True)


if __name__ == "__main__":
    main()
