"""Time random 2:4 weights of published shapes, packed and stored dense, on a CUDA device.

    python lab/benchmarks/shapes.py --shape llama3-8b llama2-7b opt-6.7b --out lab/results/export

Speed does not depend on the values of weights. Models are timed as `mrp-lightning export` times
them; `--layer-tokens` times each layer shape, too. A shape is written when it was timed.
"""

import argparse
import copy
import functools
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from export.loading import sparsify, storage_bytes, torchao_missing
from export.speed import COLUMNS, graphed, measure, rows, take_turns
from mrp_lightning.devices import machine
from mrp_lightning.environment import versions
from mrp_lightning.errors import OptionError
from mrp_sparse.formats.sparse24 import GROUP, why_not_packable
from mrp_sparse.kernels.operator import MAX_ERROR_RATIO
from mrp_sparse.packed_linear import Sparse24Linear

log = logging.getLogger(__name__)

_OF_ALL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 16384,
}
_LLAMA = {"model_type": "llama", **_OF_ALL}
_OPT = {"model_type": "opt", "word_embed_proj_dim": 4096, **_OF_ALL}
SHAPES: dict[str, dict[str, Any]] = {
    "llama2-7b": {**_LLAMA, "vocab_size": 32000, "intermediate_size": 11008},
    "llama3-8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
    },
    "opt-6.7b": {**_OPT, "vocab_size": 50272, "ffn_dim": 16384},
}
"""Shapes of published models; room for positions is larger, so that long prompts can be timed."""

COLD_BYTES = 512 * 2**20
"""Total bytes of the weights that calls rotate over: several times the size of any L2 cache."""


def random_24(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return normal weights of variance 1/in, with the two smallest of every four removed."""
    weight = torch.randn(out_features, in_features, dtype=dtype, device=device) / in_features**0.5
    groups = weight.unflatten(1, (-1, GROUP))
    smallest = groups.abs().topk(GROUP // 2, dim=-1, largest=False).indices
    return groups.scatter(-1, smallest, 0).flatten(1)


def copies(weight_bytes: int) -> int:
    """Return the number of weights of a size to rotate over, so that none stays in the L2 cache."""
    # In a model, every layer's weight is evicted by the others before its next use. A single weight
    # that stays in the cache would be read far faster than in any model.
    return max(2, -(-COLD_BYTES // weight_bytes))


def why_wrong(y: Tensor, x: Tensor, dense: Tensor) -> str | None:
    """Return how y differs from x Wᵀ of the weight `dense`, `None` if it is exact enough."""
    exact = x.float() @ dense.float().T
    error = float((y - exact).norm() / exact.norm())
    # The limit is relative to the dense product's own rounding, which depends on dtype and shape.
    allowed = MAX_ERROR_RATIO * float((F.linear(x, dense) - exact).norm() / exact.norm())
    return None if error <= allowed else f"its relative error is {error:.1e}, not {allowed:.1e}"


@torch.no_grad()
def random_model(shape: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return a model of a published shape with random 2:4 weights, but for its dense head."""
    options = dict(SHAPES[shape])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for layer in prunable(model).values():
        layer.weight.copy_(random_24(layer.out_features, layer.in_features, dtype, device))
    return model


def prunable(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers that have a packed form, without the output head, by name."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and why_not_packable(module.weight.shape) is None
    }


def packed_copy(model: PreTrainedModel, names: Iterable[str]) -> PreTrainedModel:
    """Return the model with these layers packed; all other tensors are shared with the original."""
    shared: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    packed = copy.deepcopy(model, shared)
    for name in names:
        packed.set_submodule(name, Sparse24Linear.from_linear(model.get_submodule(name)))
    return packed


def torchao_copy(model: PreTrainedModel, names: Iterable[str]) -> PreTrainedModel:
    """Return the model with these layers in torchao's tensors, on its CUDA device."""
    shared: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    converted = copy.deepcopy(model, shared)
    sparsify(converted, list(names))
    return converted


@torch.no_grad()
def layer_rows(shapes: Iterable[tuple[int, int]], dtype: torch.dtype, tokens: Sequence[int]):
    """Yield the rows of a table on layers: the packed product beside that with dense weights."""
    device = torch.device("cuda", torch.cuda.current_device())
    for out_features, in_features in shapes:
        number = copies(out_features * in_features * dtype.itemsize)
        dense = [random_24(out_features, in_features, dtype, device) for _ in range(number)]
        packed = []
        for weight in dense:
            linear = nn.Linear(in_features, out_features, bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            packed.append(Sparse24Linear.from_linear(linear))
            packed[-1].compress()
        for count in tokens:
            x = torch.randn(count, in_features, dtype=dtype, device=device)
            if fault := why_wrong(packed[0](x), x, dense[0]):
                raise SystemExit(f"{out_features}×{in_features}, {count} tokens: {fault}")
            runs = {
                "dense": graphed([functools.partial(F.linear, x, weight) for weight in dense]),
                "packed": graphed([functools.partial(layer, x) for layer in packed]),
            }
            timings = take_turns(runs, 20)
            was, now = (timings[name].median for name in ("dense", "packed"))
            shape = f"{out_features}×{in_features}"
            yield shape, str(count), f"{was:.1f}", f"{now:.1f}", f"{was / now:.2f}"


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    for line in (columns, ["---"] * len(columns), *lines):
        yield f"| {' | '.join(line)} |"


def page(shape: str, options: argparse.Namespace) -> Iterator[str]:
    """Measure a shape, and yield the lines of its page as they come."""
    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, options.dtype)
    libraries = ", ".join(f"{name} {version}" for name, version in versions().items())
    version = torch.backends.cusparselt.version() if torch.backends.cusparselt.is_available() else 0
    yield f"{machine(device)}, cuSPARSELt {version}, {libraries}\n"
    if version == 800:  # NVIDIA's release notes: 0.8.0 lost speed on Hopper, 0.8.1 has it back
        yield "cuSPARSELt 0.8.0 is slower on Hopper than 0.8.1, which torch 2.12 brings.\n"
    dense = random_model(shape, dtype, device)
    layers = prunable(dense)
    if options.layer_tokens:
        sizes = dict.fromkeys((m.out_features, m.in_features) for m in layers.values())
        columns = ("out × in", "tokens", "dense µs", "packed µs", "× dense")
        yield from markdown(columns, layer_rows(sizes, dtype, options.layer_tokens))
        yield ""
    make = torchao_copy if options.format == "torchao" else packed_copy
    packed = make(dense, layers)
    sizes_of = storage_bytes(packed) / 1e9, storage_bytes(dense) / 1e9
    speeds = measure(
        dense,
        packed,
        batch_sizes=options.batch_sizes,
        prompt_tokens=options.prompt_tokens,
        prefill_tokens=options.prefill_tokens,
        new_tokens=options.new_tokens,
        rounds=20,
        compiled=options.compile,
    )
    yield from markdown(COLUMNS, (line for speed in speeds for line in rows([speed])))
    yield "\nWeights in memory before the prefill: {:.2f} GB, {:.2f} GB dense.".format(*sizes_of)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Status 1: a shape could not be measured to its end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--shape", choices=SHAPES, nargs="+", required=True)
    option("--format", choices=("packed", "torchao"), default="packed")
    option("--compile", action="store_true", help="compile both sides by torch.compile")
    option("--batch-sizes", nargs="+", type=int, default=[1], metavar="N")
    option("--prompt-tokens", type=int, default=128, metavar="N", help="before decoding")
    option("--prefill-tokens", type=int, default=2048, metavar="N")
    option("--new-tokens", type=int, default=64, metavar="N")
    option("--layer-tokens", nargs="+", type=int, default=[], metavar="N")
    option("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    option("--out", type=Path, metavar="DIR", help="write SHAPE-FORMAT.md there")
    options = parser.parse_args(args)
    if not torch.cuda.is_available():
        raise OptionError("speed is measured on a CUDA device, and this machine has none.")
    device = torch.device("cuda", torch.cuda.current_device())
    if options.format == "torchao" and (reason := torchao_missing(device)):
        raise OptionError(f"`--format torchao` cannot run here: {reason}.")
    failed = []
    for shape in options.shape:
        lines = []
        try:
            for line in page(shape, options):
                lines.append(line)
                print(line, flush=True)
        except Exception:  # the shapes that follow may fit where this one did not
            log.exception("%s was not measured to its end.", shape)
            failed.append(shape)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"{shape}-{options.format}.md"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"not measured to the end: {', '.join(failed)}")


if __name__ == "__main__":
    main()
