"""How fast a pruned model is: the same weights packed and stored dense, on a CUDA device.

    python -m export.benchmark --shape llama3-8b --json times.json

A shape is filled with random 2:4 weights: speed does not depend on what the weights mean.
"""

import argparse
import copy
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from export.backends import cusparselt, measured_table, use_table
from export.backends.apply import BACKENDS, TARGETS, apply
from export.backends.forms import nbytes
from export.backends.table import Measurement, cache_path
from export.backends.timing import microseconds, take_turns
from export.backends.tuning import measure, random_24
from export.benchmark_tables import Result, tables
from export.format import why_not_packable
from export.layer import Sparse24Linear
from export.model_timing import time_models
from mrp_lightning.errors import OptionError

LAYER_TOKENS = (1, 4, 8, 16, 64, 256, 1024, 4096)

SHAPES: dict[str, dict[str, Any]] = {
    "llama2-7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 16384,
    },
    "llama3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 16384,
    },
    "opt-6.7b": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 4096,
        "word_embed_proj_dim": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 16384,
    },
}
"""Shapes of published models; room for positions is larger, so that long prompts can be timed."""


@torch.no_grad()
def random_model(shape: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of a published shape with random weights, 2:4 in all linear layers but the head."""
    options = dict(SHAPES[shape])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for layer in prunable(model).values():
        layer.weight.copy_(random_24(layer.out_features, layer.in_features, dtype, device))
    return model


def prunable(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers that have a packed form, without the output head."""
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not head
        and why_not_packable(module.weight.shape) is None
    }


def packed_copy(model: PreTrainedModel, names: Iterable[str]) -> PreTrainedModel:
    """The model with these layers packed; all other tensors are shared with the original."""
    shared: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    sparse = copy.deepcopy(model, shared)
    for name in names:
        sparse.set_submodule(name, Sparse24Linear.from_linear(model.get_submodule(name)))
    return sparse


def dense_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its packed layers dense; all other tensors are shared with the original."""
    shared: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    dense = copy.deepcopy(model, shared)
    for name, module in model.named_modules():
        if isinstance(module, Sparse24Linear):
            dense.set_submodule(name, module.to_linear())
    return dense


def storage_bytes(model: nn.Module) -> int:
    """Bytes that the weights take in memory: each storage once, forms and subclasses included.

    A 2:4 tensor subclass gives the `nbytes` of its dense matrix; its parts are counted instead.
    """
    storages: dict[int, int] = {}
    forms = 0
    for tensor in (*model.parameters(), *model.buffers()):
        for part in _parts(tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            forms += nbytes(part)
    return sum(storages.values()) + forms


def _parts(tensor: Tensor) -> list[Tensor]:
    flatten: Callable[[], tuple[list[str], Any]] | None
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]


@torch.no_grad()
def measure_layers(
    model: PreTrainedModel, tokens: Sequence[int], *, remember: bool = True
) -> list[Measurement]:
    """Time each shape of the model's packed layers once, by all kernels.

    Args:
        model: On a CUDA device, with `Sparse24Linear` layers.
        tokens: Numbers of tokens.
        remember: Choose kernels by these times from now on, in later processes too.
    """
    device = model.device
    if device.type != "cuda":
        raise OptionError(f"Speed is measured on CUDA devices; the model is on {device}.")
    layers = [m for m in model.modules() if isinstance(m, Sparse24Linear)]
    shapes = {(m.out_features, m.in_features, m.weight.dtype): None for m in layers}
    found = [row for shape in shapes for row in measure(*shape, device, tokens)]
    if remember:
        table = measured_table(device).merged(found)
        table.save(cache_path(table.environment))
        use_table(table, device)
    return found


def bandwidth(device: torch.device) -> float:
    """Bytes a second that the device reads and writes in a large copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    once = {"copy": lambda: microseconds(lambda: target.copy_(source))}
    return 2 * source.nbytes / (take_turns(once, 10)["copy"].median * 1e-6)


def benchmark(
    sparse: PreTrainedModel,
    *,
    backend: str = "auto",
    target: str = "both",
    compile_mode: str | None = "default",
    batch_sizes: Sequence[int] = (1,),
    prompt_tokens: int = 2048,
    new_tokens: int = 128,
    layer_tokens: Sequence[int] = LAYER_TOKENS,
) -> Result:
    """Measure the layers, put the model on a back-end, and time it against its dense twin.

    Args:
        sparse: On a CUDA device, with packed layers; it is left on the back-end.
        backend: One of `BACKENDS`.
        target: `decode`, `prefill` or `both`.
        compile_mode: For `torch.compile`, on both sides; `None` times eager code alone.
        batch_sizes: Sequences at a time.
        prompt_tokens: Length of each prompt.
        new_tokens: Decode steps of a repeat.
        layer_tokens: For the table by layer shape; empty leaves it out.

    Raises:
        OptionError: The model is not on a CUDA device, or the back-end cannot run there.
    """
    device = sparse.device
    if device.type != "cuda":
        raise OptionError(f"Speed is measured on CUDA devices; the model is on {device}.")
    layers = measure_layers(sparse, layer_tokens) if layer_tokens else []
    dense = dense_copy(sparse)
    applied = apply(sparse, backend, target)
    phases = ("prefill", "decode") if target == "both" else (target,)
    models = time_models(
        dense,
        sparse,
        batch_sizes=batch_sizes,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        compile_mode=compile_mode,
        phases=phases,
    )
    environment = dict(measured_table(device).environment)
    notes = []
    if environment.get("cusparselt") == cusparselt.SLOW_ON_HOPPER:
        notes.append("cuSPARSELt 0.8.0 is slower on Hopper than 0.8.1, which torch 2.12 brings.")
    return Result(
        environment=environment,
        backend=backend,
        target=target,
        layers=layers,
        models=models,
        stayed_dense=applied.dense,
        dense_bytes=storage_bytes(dense),
        sparse_bytes=storage_bytes(sparse),
        bandwidth=bandwidth(device),
        notes=notes,
    )


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m export.benchmark",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--target", choices=TARGETS, default="both")
    parser.add_argument("--compile", default="default", metavar="MODE", help="none: eager alone")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layer-tokens", type=int, nargs="*", default=LAYER_TOKENS)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--json", type=Path, help="write all figures here too")
    options = parser.parse_args(args)
    if not torch.cuda.is_available():
        parser.error("speed is measured on a CUDA device, and this machine has none")

    device = torch.device("cuda", torch.cuda.current_device())
    model = random_model(options.shape, getattr(torch, options.dtype), device)
    sparse = packed_copy(model, prunable(model))
    del model
    result = benchmark(
        sparse,
        backend=options.backend,
        target=options.target,
        compile_mode=None if options.compile == "none" else options.compile,
        batch_sizes=options.batch_sizes,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        layer_tokens=options.layer_tokens,
    )
    sys.stdout.write(tables(result))
    if options.json:
        options.json.write_text(json.dumps(asdict(result), indent=1))


if __name__ == "__main__":
    main()
