"""Load models from exported directories, and check that all weights exist.

torchao's 2:4 tensors are made of packed layers as they are loaded, on a CUDA device.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS
from transformers import PreTrainedModel

from mrp_ground.arguments import checked
from mrp_lightning.devices import device_named
from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.models.checkpoint import model_class, weight_files
from mrp_lightning.models.integrity import check_values
from mrp_lightning.models.loading import load_checked, load_config
from mrp_lightning.models.locations import refuse_adapter
from mrp_lightning.storage.files import MANIFEST, differing
from mrp_lightning.storage.json_files import read_json
from mrp_lightning.upstream import torch_names
from mrp_sparse.formats.sparse24 import SPARSE24
from mrp_sparse.packed_linear import Sparse24Linear, frozen

TORCHAO = "mrp_torchao24"
"""`quant_method` of packed 2:4 directories whose layers torchao multiplies."""


@checked
def load(
    directory: str | os.PathLike[str], *, verify: bool = False, **options: Any
) -> PreTrainedModel:
    """Load a packed or dense model, and check that the directory has all of its weights.

    Bitmasks that `device_map` puts on another device than a CPU are made dense, once.

    Args:
        directory: A directory that `python -m export.to_sparse` wrote. With `--format torchao` the
            model is put on the CUDA device, with its packed layers as torchao's tensors.
        verify: Whether to compare the SHA-256 of each file of weights with the one that was stored
            when it was written, which reads all of them once more. Positions that do not fit the
            stored values are detected without it, a changed value is not.
        **options: Options of `from_pretrained`, such as `dtype` and `device_map`.

    Returns:
        The model in evaluation mode, of the class that the configuration names.

    Raises:
        FileNotFoundError: The directory has no `config.json`.
        FormatError: Tensors are missing, unexpected, damaged or of another shape; the directory
            holds only an adapter; or `verify` finds other content.
        OptionError: The directory is of `--format torchao`, and torchao cannot run here, or not in
            this `dtype`.
    """
    directory = Path(directory)
    refuse_adapter(directory)
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"{directory} holds no config.json: not a model directory. Give one that an export or "
            "a pruning wrote, or of any dense model."
        )
    content = read_json(directory / "config.json", "export the pruned model again")
    check_values(content, directory)
    if verify and (names := differing(directory, weight_files(directory))):
        raise FormatError(
            f"{directory} is not as it was written: {', '.join(names)} differ from the checksums "
            f"in {MANIFEST}, or are not listed there. Copy the directory again, with its hidden "
            "files, or export the pruned model again."
        )
    settings = content.get("quantization_config") or {}
    if settings.get("quant_method") != TORCHAO:
        return _load_pretrained(directory, **options)
    device = device_named(None)
    if reason := torchao_missing(device):
        raise OptionError(
            f"{directory} is for torchao's 2:4 tensors, which cannot run here: {reason}. Load the "
            "pruned model, or export it with `--format packed`, which runs everywhere."
        )
    config = load_config(str(directory))
    config.quantization_config = settings | {"quant_method": SPARSE24.quant_method}
    model = _load_pretrained(directory, config=config, **options)
    nn.Module.to(model, device)  # PreTrainedModel.to has another signature
    sparsify(model, settings["modules"])
    return model


def _load_pretrained(directory: Path, **options: Any) -> PreTrainedModel:
    trust = bool(options.get("trust_remote_code"))
    config = options.get("config") or load_config(str(directory), trust_remote_code=trust)
    return load_checked(model_class(config), config, str(directory), **options)


def torchao_missing(device: torch.device) -> str | None:
    """Return why torchao's tensors cannot be used on a device, `None` if they can."""
    if device.type != "cuda":
        return f"torchao's 2:4 tensors are for CUDA devices, and this is {device.type!r}"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed (pip install 'torchao==0.18.*')"
    if importlib.util.find_spec("torchao.sparsity") is None:
        return "this torchao has no `torchao.sparsity`; 0.18 was the last to have it"
    if torch_names.is_cutlass_forced():
        major, minor = torch.cuda.get_device_capability(device)
        if major != 8:
            return f"torch's CUTLASS kernels need sm_8x; this device is sm_{major}{minor}"
    elif not torch.backends.cusparselt.is_available():
        return f"torch {torch.__version__} was built without cuSPARSELt"
    return None


def why_not_torchao(shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Return why torch's tensors cannot hold a 2:4 weight, `None` if they can."""
    forced = torch_names.is_cutlass_forced()
    kind = SparseSemiStructuredTensorCUTLASS if forced else SparseSemiStructuredTensorCUSPARSELT
    tiles = torch_names.tiles_of_sparse24(kind, dtype)
    if dtype == torch.float32 or tiles is None:
        name = str(dtype).removeprefix("torch.")
        return f"torch's 2:4 tensors take float16 and bfloat16, not {name}"
    (rows, columns), (row_tile, column_tile) = shape, tiles
    if rows % row_tile or columns % column_tile:
        return f"{rows}×{columns} is not a multiple of {row_tile}×{column_tile}"
    return None


def sparsify(model: nn.Module, names: list[str]) -> None:
    """Convert the weights of 2:4 layers, packed or dense, to torchao's tensors, in place.

    Raises:
        OptionError: torchao cannot run layers, of which the message lists all; none is converted.
    """
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    reasons = {
        name: why_not_torchao((layer.out_features, layer.in_features), layer.weight.dtype)
        for name, layer in layers.items()
    }
    if refused := [f"  {name}: {reason}" for name, reason in reasons.items() if reason]:
        raise OptionError("torchao cannot run these layers:\n" + "\n".join(refused))
    from torchao.sparsity import semi_sparse_weight, sparsify_

    for name, layer in layers.items():
        linear = layer.to_linear() if isinstance(layer, Sparse24Linear) else layer
        linear.weight = frozen(linear.weight.detach().contiguous())
        sparsify_(linear, semi_sparse_weight())
        model.set_submodule(name, linear)


def storage_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers in memory, each storage once.

    A 2:4 tensor subclass gives the `nbytes` of its dense matrix; its parts are counted instead.
    """
    storages: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in _parts(tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _parts(tensor: Tensor) -> list[Tensor]:
    flatten: Callable[[], tuple[list[str], Any]] | None
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]
