r"""The accuracy that peers' own codes give on the windows of a sweep.

    python lab/benchmarks/narrower_peers.py --config lab/sweeps/narrower.yaml --flap FLAP \
        --slicegpt TransformerCompression

FLAP (CASIA-IVA-Lab/FLAP, at the directory `--flap`) removes neurons of the models of the sweep,
loaded as it loads them, on the calibration windows that it draws: by its metric WIFV and with its
biases, which stand in for what was removed. `UL` removes the same number from every block, as many
as the sweep's runs; `AL`, its default, ranks the neurons of all blocks together and so leaves no
model that a configuration describes. Both keep the biases, which make up for 1/columns of the
weights that were removed.

SliceGPT (microsoft/TransformerCompression, at the directory `--slicegpt`; it needs ml-collections)
rotates the hidden state of LLaMAs and cuts it: to the multiple of 8 features, its own rounding,
at which its blocks, with the products that it adds to their shortcuts, have the number of weights
nearest to ours; the table has both numbers. Its embeddings become smaller, too, and its head is no
longer tied to them. It was written for transformers 4.41: the forward of its blocks is that of
transformers 5 here, with its shortcuts.
"""

import argparse
import logging
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from mrp_lightning.devices import machine
from mrp_lightning.experiments.design import Sweep
from mrp_lightning.experiments.running import configure
from mrp_lightning.experiments.sweep import read_sweep
from mrp_lightning.experiments.trials import Trial, parse_setting
from mrp_lightning.narrowing.structure import NarrowingPlan
from mrp_lightning.narrowing.unit_parts import narrowing_plan
from mrp_lightning.solver.patterns import Unstructured
from mrp_lightning.targets.plan import make_plan

METRIC = "WIFV"

log = logging.getLogger("narrower_peers")


@contextmanager
def watched(layers: list[nn.Linear], see: Any) -> Iterator[None]:
    """Call `see` with the number of a layer, its input and its output, in this context."""
    handles = [
        layer.register_forward_hook(lambda _, x, y, i=i: see(i, x[0].detach(), y.detach()))
        for i, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Windows(Callback):
    """A callback that stores the calibration windows, which the model may have written."""

    def __init__(self) -> None:
        self.windows: list[Tensor] = []

    def on_predict_batch_start(self, *given: Any) -> None:
        """Store the windows of a batch."""
        self.windows += given[2].split(1)


def consumers(plan: NarrowingPlan) -> list[Any]:
    """Return the layers that read the neurons, one of each block."""
    return [layers[0].module for layers in plan.layers.values()]


def flap(
    model: Any, windows: list[Tensor], plan: NarrowingPlan, across: bool, repository: Path
) -> None:
    """Remove neurons by FLAP's code, which sees the activations of the dense model."""
    if str(repository) not in sys.path:
        sys.path.insert(0, str(repository))
    from lib.layerwrapper import BiasGPT  # type: ignore[import-not-found]
    from lib.prune import compress, metrics  # type: ignore[import-not-found]

    layers = consumers(plan)
    seen = [BiasGPT(layer, METRIC) for layer in layers]
    with watched(layers, lambda i, x, y: seen[i].add_batch(x.float(), y)):
        for window in windows:
            model(window)
    pairs = zip(seen, layers, strict=True)
    found = torch.stack([metrics[METRIC]({"": x}, {"": layer}, "").float() for x, layer in pairs])
    structure = plan.structure
    if across:
        found = (found - found.mean(1, keepdim=True)) / found.std(1, keepdim=True)
        order = found.flatten().argsort(descending=True)[: structure.kept * len(layers)]
        kept = torch.zeros(found.numel(), dtype=torch.bool)
        kept[order] = True
        kept = kept.view_as(found)
    else:
        order = found.argsort(1, descending=True)[:, : structure.kept]
        kept = torch.zeros_like(found, dtype=torch.bool).scatter_(1, order, True)
    for block, layer, mask, each in zip(plan.blocks, layers, kept, seen, strict=True):
        layer.bias = nn.Parameter(torch.zeros(layer.out_features, dtype=layer.weight.dtype))
        mean = each.baseline_inp.to(layer.weight.dtype)
        compress(block.module, None, mask, None, mean, layer.weight.device)


def slicegpt(model: Any, windows: list[Tensor], plan: NarrowingPlan, repository: Path) -> None:
    """Cut the hidden state by SliceGPT's code."""
    package = types.ModuleType("slicegpt")  # its own imports models that transformers 5 changed
    package.__path__ = [str(repository / "src" / "slicegpt")]
    sys.modules["slicegpt"] = package
    from slicegpt.adapters import llama_adapter  # type: ignore[import-not-found]
    from slicegpt.config import config  # type: ignore[import-not-found]
    from slicegpt.layernorm_fusion import (  # type: ignore[import-not-found]
        fuse_modules,
        replace_layers,
    )
    from slicegpt.rotate import rotate_and_slice  # type: ignore[import-not-found]
    from slicegpt.slicing_scheduler import (  # type: ignore[import-not-found]
        ConstSlicingScheduler,
    )

    class Block(llama_adapter.CompressedLlamaDecoderLayer):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
            residual = _shortcut(hidden_states, self.attn_shortcut_Q)
            attended, _ = self.self_attn(self.input_layernorm(hidden_states), **others)
            hidden_states = residual + attended
            residual = _shortcut(hidden_states, self.mlp_shortcut_Q)
            return residual + self.mlp(self.post_attention_layernorm(hidden_states))

    class Adapter(llama_adapter.LlamaModelAdapter):  # type: ignore[misc]
        compressed_layer_type = Block

    structure = plan.structure
    inside = [p for block in plan.blocks for p in block.module.parameters() if p.ndim == 2]
    allowed = sum(p.numel() for p in inside) - structure.num_weights
    hidden = model.config.hidden_size
    # Each matrix of a block has the hidden size once, and each of its two shortcuts twice. What the
    # last block hands to the head keeps its size.
    rest, shortcuts = sum(p.numel() for p in inside) // hidden, 2 * len(plan.blocks)
    held = {
        d: d * (rest + shortcuts * d) + (hidden - d) * (structure.units + d)
        for d in range(8, hidden, 8)
    }
    cut = min(held, key=lambda d: abs(held[d] - allowed))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    config.device = torch.device("cpu")
    model.config.torch_dtype = model.dtype  # in which its code makes its own blocks
    adapter = Adapter(model)
    replace_layers(adapter)
    fuse_modules(adapter)
    data = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in windows]
    rotate_and_slice(adapter, data, ConstSlicingScheduler(cut))
    inside = [p for block in model.model.layers for p in block.parameters() if p.ndim == 2]
    assert sum(p.numel() for p in inside) == held[cut]
    log.info("SliceGPT: %d features, %d weights in blocks, ours %d", cut, held[cut], allowed)


def _shortcut(residual: Tensor, rotation: Tensor | None) -> Tensor:
    return residual if rotation is None else residual @ rotation


def run(sweep: Sweep, name: str, setting: str, code: str, options: Any) -> str:
    """Return the result of one code on one model, a cell of the table."""
    cli = configure(Trial(name), sweep)
    cli.config["data.seed"] = options.seed
    cli.config["trainer.enable_progress_bar"] = False
    cli.build()
    read = Windows()
    cli.trainer.predict(cli.model, datamodule=cli.datamodule, callbacks=[read])
    model: Any = cli.model.model.eval()
    windows = read.windows
    pattern = parse_setting(setting, "magnitude").pattern
    assert isinstance(pattern, Unstructured)
    with torch.no_grad():
        plan = make_plan(model, pattern)
        plan = narrowing_plan(model, "neurons", pattern.sparsity, plan)
        start = time.process_time()
        if code == "SliceGPT":
            slicegpt(model, windows, plan, options.slicegpt)
        else:
            flap(model, windows, plan, code == "FLAP AL", options.flap)
    seconds = time.process_time() - start
    cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
    found = [f"{text} {each['perplexity']:.3f}" for text, each in cli.model.evaluation.items()]
    return f"{', '.join(found)} | {seconds:.1f}"


def main() -> None:
    """Print the table, row by row as they come."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", action="append", required=True, help="a YAML of the sweep")
    parser.add_argument("--flap", type=Path, help="a checkout of CASIA-IVA-Lab/FLAP")
    parser.add_argument("--slicegpt", type=Path, help="a checkout of TransformerCompression")
    parser.add_argument("--models", nargs="*", help="of the sweep (default: all)")
    parser.add_argument("--settings", nargs="*", default=["10%", "20%", "30%"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    sweep = read_sweep([f"--config={path}" for path in options.config])
    print(f"{machine(torch.device('cpu'))}, {options.threads} threads, seed {options.seed}.\n")
    print("| model | neurons | code | perplexity | CPU s |")
    print("|---|---|---|---|---|", flush=True)
    codes = ["FLAP UL", "FLAP AL"] if options.flap else []
    codes += ["SliceGPT"] if options.slicegpt else []
    for model in options.models or sweep.models:
        for setting in options.settings:
            for code in codes:
                found = run(sweep, model, setting, code, options)
                print(f"| {model} | {setting} | {code} | {found} |", flush=True)


if __name__ == "__main__":
    main()
