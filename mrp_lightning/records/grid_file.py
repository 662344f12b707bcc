"""`grid/parameters.safetensors`: the parameters of the grids on which a pruning put its weights.

The values of a checkpoint in bfloat16 give back codes and scales only by a search, and those of a
grid with minima not at all. So a pruning keeps the parameters that it chose, and an export proves
that they reproduce the checkpoint to the bit before it uses them. The file lies in a directory of
its own, since some engines read every safetensors file next to a model's weights as a part of them.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mrp_lightning.errors import FormatError
from mrp_lightning.solver.grid import GridParameters

NAME = "grid/parameters.safetensors"
"""The path of the file in the directory of a run."""


def save_parameters(parameters: Mapping[str, GridParameters], file: Path) -> None:
    """Write the parameters of layers, by layer name, as tensors `LAYER.scales` and `LAYER.minima`.

    A tensor is float16 if that holds all of its numbers exactly, else float32. The directory is
    created, but not its parents.
    """
    tensors = {
        f"{name}.{kind}": _compact(tensor)
        for name, of_layer in parameters.items()
        for kind, tensor in vars(of_layer).items()
        if tensor is not None
    }
    file.parent.mkdir(exist_ok=True)
    save_file(tensors, file, {"format": "pt"})


def load_parameters(file: str | PathLike[str]) -> dict[str, GridParameters]:
    """Read a file that `save_parameters` wrote, as float32 on the CPU; return {} without a file.

    Raises:
        FormatError: The file is damaged.
    """
    if not Path(file).is_file():
        return {}
    kinds: dict[str, dict[str, Any]] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118
                # From the right, since names of layers contain dots and kinds do not.
                name, _, kind = key.rpartition(".")
                kinds.setdefault(name, {})[kind] = opened.get_tensor(key).float()
        return {name: GridParameters(**tensors) for name, tensors in kinds.items()}
    except (SafetensorError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            f"{file} is not as mrp-lightning writes it ({error}). Copy the directory again, or "
            "prune again."
        ) from error


def _compact(tensor: Tensor) -> Tensor:
    # float16 only if no bit is lost: an export has to reproduce the checkpoint exactly from these
    # numbers.
    half = tensor.to(torch.float16)
    return (half if torch.equal(half.to(tensor.dtype), tensor) else tensor.float()).contiguous()
