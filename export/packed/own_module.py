"""Packed weights in a module of the user's own, which transformers cannot build."""

import json
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TypeVar

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from export.packed.format import invalid_nibbles
from export.packed.huggingface import Sparse24Config, pack_modules
from export.packed.layer import Sparse24Linear, is_packable
from mrp_lightning.errors import FormatError

log = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)


def load_into(module: Module, directory: str | os.PathLike[str]) -> Module:
    """Give a module the packed layers and all weights of an exported directory.

    It is for what was pruned in a LightningModule of one's own. The layers are replaced in place,
    and all else of the module stays as it is. Nothing is changed where the directory does not fit.

    Args:
        module: A module of the class that was pruned, with any weights, on any device.
        directory: What `python -m export.to_sparse` wrote, packed or dense.

    Returns:
        The same module.

    Raises:
        FileNotFoundError: There is no `model.safetensors` in it.
        FormatError: Tensors are missing, unexpected, damaged or of another shape; all are listed.
    """
    directory = Path(directory)
    tensors = _tensors(directory / "model.safetensors", module.state_dict().keys())
    names = _packed_names(directory / "config.json")
    if problems := list(_problems(module, names, tensors)):
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise FormatError(
            f"{directory} does not fit {type(module).__name__}, of which nothing was changed. The "
            f"module must be built as the one that was pruned:\n{listed}"
        )
    pack_modules(module, names)
    module.load_state_dict(tensors)
    if _has_fast_path(module, names):
        log.warning(
            "In evaluation torch's TransformerEncoderLayer multiplies with the dense weights of "
            "its layers, which are packed now. Call torch.backends.mha.set_fastpath_enabled(False)."
        )
    return module


def _has_fast_path(module: nn.Module, names: list[str]) -> bool:
    owners = (module.get_submodule(name.rpartition(".")[0]) for name in names)
    return any(isinstance(owner, nn.TransformerEncoderLayer) for owner in owners)


def _tensors(file: Path, known: Collection[str]) -> dict[str, Tensor]:
    """All tensors of a file, those that were tied under each of their names."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there: not the directory of an exported module.")
    tensors = load_file(file)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
    tied = {name: tensors[kept] for name, kept in metadata.items() if kept in tensors}
    return tensors | {name: tensor for name, tensor in tied.items() if name in known}


def _packed_names(file: Path) -> list[str]:
    if not file.is_file():
        return []  # what the dense format writes
    settings = json.loads(file.read_text("utf-8"))["quantization_config"]
    return Sparse24Config(**settings).modules


def _problems(module: nn.Module, names: list[str], tensors: dict[str, Tensor]) -> Iterator[str]:
    """What of a file does not fit the module, before anything is changed."""
    modules = dict(module.named_modules())
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    for name in names:
        if name not in modules or not is_packable(modules[name]):
            yield f"{name}: the module has no linear layer of this name"
            continue
        layer = Sparse24Linear.like(modules[name], "meta")
        shapes |= {f"{name}.{key}": tensor.shape for key, tensor in layer.state_dict().items()}
        meta = tensors.get(f"{name}.weight_meta")
        if meta is not None and (count := invalid_nibbles(meta)):
            yield f"{name}.weight_meta: damaged, {count} nibbles that no 2:4 weight has"
    for name in sorted(shapes.keys() | tensors.keys()):
        if name not in tensors:
            yield f"{name}: missing from the file"
        elif name not in shapes:
            yield f"{name}: not in the module"
        elif tensors[name].shape != shapes[name]:
            found, expected = tuple(tensors[name].shape), tuple(shapes[name])
            yield f"{name}: the shape is {found} in the file and {expected} in the module"
