"""Time random 2:4 weights of published shapes, packed and stored dense, on a CUDA device.

    python lab/benchmarks/shapes.py --shape llama3-8b llama2-7b opt-6.7b --out lab/results/export

Speed does not depend on the values of weights. Measurements are written as they come; a failure is
listed with its reason. `mrp-lightning benchmark` times a packed model in the same way.
"""

import argparse
import copy
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from export.backends import check_backend
from export.comparison import SpeedReport, compare, tables
from export.speed_options import SpeedOptions, add_arguments
from export.timing import random_24
from mrp_lightning.errors import OptionError
from mrp_sparse.formats.sparse24 import why_not_packable
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


def measure_shapes(
    shapes: Sequence[str],
    options: SpeedOptions,
    dtype: str = "bfloat16",
    out: str | os.PathLike[str] | None = None,
) -> None:
    """Measure shapes one after the other, and print their tables.

    Args:
        shapes: Keys of `SHAPES`.
        options: What to measure.
        dtype: Dtype of the weights, `bfloat16` or `float16`.
        out: Directory for SHAPE-BACKEND.md and .json, which grow as it runs; `None` writes none.

    Raises:
        OptionError: There is no CUDA device, or the back-end cannot run on it.
        SystemExit: With status 1 and their names if shapes could not be measured to their end.
    """
    if not torch.cuda.is_available():
        raise OptionError("speed is measured on a CUDA device, and this machine has none.")
    device = torch.device("cuda", torch.cuda.current_device())
    check_backend(options.backend, device)
    failed = []
    for shape in shapes:
        sys.stdout.write(f"## {shape}, {options.backend}\n\n")
        path = None if out is None else Path(out, f"{shape}-{options.backend}")
        try:
            report = _measure_shape(shape, getattr(torch, dtype), device, options, path)
        except Exception:  # the shapes that follow may fit where this one did not
            log.exception("%s was not measured to its end.", shape)
            failed.append(shape)
        else:
            sys.stdout.write(f"{tables(report)}\n")
        sys.stdout.flush()
    if failed:
        raise SystemExit(f"not measured to the end: {', '.join(failed)}")


def _measure_shape(
    shape: str, dtype: torch.dtype, device: torch.device, options: SpeedOptions, path: Path | None
) -> SpeedReport:
    """Measure one shape, and save the report as it grows."""

    def save(report: SpeedReport) -> None:
        if path is not None:
            report.save(path)

    model = random_model(shape, dtype, device)
    sparse = packed_copy(model, prunable(model))
    del model
    report = compare(sparse, options, report_on=save)
    save(report)
    return report


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Status 1: a shape could not be measured to its end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--shape", choices=SHAPES, nargs="+", required=True)
    add_arguments(parser)
    option("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    option("--out", metavar="DIR", help="write SHAPE-BACKEND.md and .json there as it runs")
    parsed = parser.parse_args(args)
    measure_shapes(parsed.shape, SpeedOptions.of(parsed), parsed.dtype, parsed.out)


if __name__ == "__main__":
    main()
