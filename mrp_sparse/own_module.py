"""Load packed weights into a module that transformers cannot build."""

import logging
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from mrp_ground.arguments import checked
from mrp_ground.errors import FormatError, OptionError, counted
from mrp_ground.json_files import read_json
from mrp_ground.upstream import is_conv1d
from mrp_sparse.formats.packed_format import NOTE
from mrp_sparse.huggingface import CONFIGS, PackedConfig, misfits, pack_modules
from mrp_sparse.packed_linear import PackedLinear

log = logging.getLogger(__name__)

Module = TypeVar("Module", bound=nn.Module)


@checked
def load_into(module: Module, directory: str | os.PathLike[str]) -> Module:
    """Give a module the packed layers and all weights of an exported directory.

    Use it for a LightningModule of your own that was pruned. The layers are replaced in place, and
    all weights are copied to the module's devices and cast to its dtypes. Bitmasks stay packed on a
    CPU alone: for a module on another device they are unpacked, and its layers stay dense. If the
    directory does not fit, nothing is changed.

    Args:
        module: A module of the class that was pruned, with any weights, on any device but meta.
        directory: A directory that `python -m export.to_sparse` wrote, packed or dense.

    Returns:
        The same module.

    Raises:
        FileNotFoundError: There is no `model.safetensors` in it.
        OptionError: The module has tensors on the meta device.
        FormatError: Tensors are missing, unexpected, damaged or of another shape; all are listed.
            Or a file is damaged, or of an unknown format.
    """
    if on_meta := [name for name, tensor in module.state_dict().items() if tensor.is_meta]:
        raise OptionError(
            f"expected a module with data, got {counted(len(on_meta), 'tensor')} on the meta "
            f"device, such as {on_meta[0]}. Build it outside of `torch.device('meta')`.",
            "module",
        )
    directory = Path(directory)
    tensors = _tensors(directory / "model.safetensors", module.state_dict().keys())
    packed = _packed(directory / "config.json")
    if problems := list(_problems(module, packed, tensors)):
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise FormatError(
            f"{directory} does not fit {type(module).__name__}, of which nothing was changed. The "
            f"module must be built as the one that was pruned:\n{listed}"
        )
    names = [] if packed is None else packed.counts
    dense = {name: module.get_submodule(name) for name in names}
    if packed is not None:
        pack_modules(module, packed)
    module.load_state_dict(tensors)
    for name, linear in dense.items():
        layer: Any = module.get_submodule(name)
        if layer.FORMAT.row_offsets is not None and layer.weight.device.type != "cpu":
            module.set_submodule(name, layer.give(linear))
    if _has_fast_path(module, dense):
        log.warning(
            "In evaluation torch's TransformerEncoderLayer multiplies with the dense weights of "
            "its layers, which are packed now. Call torch.backends.mha.set_fastpath_enabled(False)."
        )
    return module


def _has_fast_path(module: nn.Module, names: Iterable[str]) -> bool:
    """Return whether a packed layer lies in torch's encoder layer, which reads its weight."""
    packed = (n for n in names if isinstance(module.get_submodule(n), PackedLinear))
    owners = (module.get_submodule(name.rpartition(".")[0]) for name in packed)
    return any(isinstance(owner, nn.TransformerEncoderLayer) for owner in owners)


def _tensors(file: Path, known: Collection[str]) -> dict[str, Tensor]:
    """Return all tensors of a file, tied ones under each of their names among `known`."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there: not the directory of an exported module.")
    try:
        tensors = load_file(file)
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise FormatError(
            f"{file} is no whole safetensors file ({error}). Export the pruned module again."
        ) from error
    tied = {name: tensors[kept] for name, kept in metadata.items() if kept in tensors}
    tensors.pop(NOTE, None)
    return tensors | {name: tensor for name, tensor in tied.items() if name in known}


def _packed(file: Path) -> PackedConfig | None:
    if not file.is_file():
        return None  # the dense format writes no config.json
    remedy = "export the pruned module again"
    settings = read_json(file, remedy).get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(settings, dict) or method not in [*CONFIGS]:
        raise FormatError(
            f"{file}: expected in `quantization_config` a `quant_method` of {', '.join(CONFIGS)}, "
            f"got {method!r}. Delete it, or {remedy}."
        )
    return CONFIGS[method](**settings)


def _problems(
    module: nn.Module, packed: PackedConfig | None, tensors: dict[str, Tensor]
) -> Iterator[str]:
    """Yield all that does not fit between a file and the module, before anything is changed."""
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if packed is not None:
        yield from _packed_problems(module, packed, tensors, shapes)
    for name in sorted(shapes.keys() | tensors.keys()):
        if name not in tensors:
            yield f"{name}: missing from the file"
        elif name not in shapes:
            yield f"{name}: not in the module"
        elif tensors[name].shape != shapes[name]:
            stored, expected = tuple(tensors[name].shape), tuple(shapes[name])
            yield f"{name}: the shape is {stored} in the file and {expected} in the module"


def _packed_problems(
    module: nn.Module,
    packed: PackedConfig,
    tensors: dict[str, Tensor],
    shapes: dict[str, torch.Size],
) -> Iterator[str]:
    """Yield the problems of the packed layers, and replace their dense shapes in `shapes`.

    Missing tensors and those of another shape are reported by the caller.
    """
    modules = dict(module.named_modules())
    form, problems = packed.layer.FORMAT, misfits(modules, packed)
    yield from problems.values()
    if packed.head is not None:
        yield f"{packed.head['module']}: a head of 8 bits is for models of transformers"
    for name, count in packed.counts.items():
        if name in problems:
            continue
        layer = packed.layer.like(modules[name], "meta", count=count)
        expected = {f"{name}.{key}": tensor.shape for key, tensor in layer.state_dict().items()}
        shapes |= expected
        columns = layer.in_features
        if form.counted and is_conv1d(modules[name]) and columns == layer.out_features:
            yield f"{name}: a square Conv1D, whose bits may be those of its transpose; `--skip` it"
        keys = [f"{name}.{key}" for key in form.names]
        if any(key not in tensors or tensors[key].shape != expected[key] for key in keys):
            continue
        stored = [tensors[key] for key in keys]
        if damage := form.damage(*stored, columns):
            yield f"{name}.{form.places}: damaged, {damage}"
