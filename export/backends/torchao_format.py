"""torchao's 2:4 tensors on disk, in the layout of CUTLASS, which no library or device changes.

cuSPARSELt's layout, in which they run on most devices, depends on its version: it is made at load.
The file is a pickle, since safetensors holds no tensor subclasses, and is read as tensors only.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensorCUTLASS as Stored
from transformers import PreTrainedModel

from export.backends.subclasses import SUBCLASSES, why_not_tiled
from mrp_lightning.arguments import checked
from mrp_lightning.environment import device_named
from mrp_lightning.errors import FormatError, OptionError, first_line
from mrp_lightning.json_files import read_json
from mrp_lightning.models.integrity import check_files, check_values, misfits
from mrp_lightning.models.loading import load_config
from mrp_lightning.models.pickles import read_pickle
from mrp_lightning.models.skeleton import build_without_weights, model_class
from mrp_lightning.packed import loading

QUANT_METHOD = "mrp_torchao24"
FORMAT_VERSION = 1


def why_not_storable(shape: tuple[int, int], dtype: torch.dtype) -> str | None:
    """The reason why torchao has no tensor for a 2:4 weight, or `None`."""
    return why_not_tiled(Stored, shape, dtype)


def store(weight: Tensor) -> Tensor:
    """The tensor to write, on the CPU, of a 2:4 weight (rows, columns) on a CUDA device."""
    made: Any = Stored.from_dense(weight.contiguous())
    return Stored(
        weight.shape,
        packed=made.packed.cpu(),
        meta=made.meta.cpu(),
        packed_t=None,
        meta_t=None,
        compressed_swizzled_bitmask=None,
    )


def restore(tensor: Tensor) -> Tensor:
    """The weight of a stored tensor, bit by bit; any other tensor as it is."""
    return tensor.to_dense() if isinstance(tensor, Stored) else tensor


def read(file: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file, torchao's among them, on the CPU. No code of the file is run.

    Raises:
        FormatError: It is damaged, holds other things, or tensors that are far larger than it is.
    """
    try:
        return read_pickle(file, [Stored])
    except FormatError as error:
        raise FormatError(f"{file} cannot be read: {error}. Fetch it again.") from error
    except Exception as error:  # damaged archives and refused classes come as many kinds
        raise FormatError(
            f"{file} cannot be read with torch.load(weights_only=True) ({first_line(error)}), and "
            "nothing else is tried, because it could run code. Fetch it again, or save the model "
            "as safetensors where it comes from."
        ) from error


@checked
def load(directory: str | os.PathLike[str], **options: Any) -> PreTrainedModel:
    """Load a packed or dense model, and check that the directory has all of its weights.

    Args:
        directory: A directory that `python -m export.to_sparse` wrote. With `--format torchao` the
            model is loaded on the CUDA device, with its layers in the form that torchao runs there.
        **options: Options of `from_pretrained`, such as `dtype` and `device_map`.

    Raises:
        FileNotFoundError: There is no `config.json` in it.
        FormatError: Tensors are missing, unexpected, damaged or of another shape; or the directory
            holds an adapter alone.
        OptionError: The directory is of `--format torchao`, and torchao cannot run here, or not in
            this `dtype`.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        return loading.load(directory, **options)  # which says so
    content = read_json(directory / "config.json", "export the pruned model again")
    check_values(content, directory)
    settings = content.get("quantization_config") or {}
    if settings.get("quant_method") != QUANT_METHOD:
        return loading.load(directory, **options)
    if settings.get("format_version") != FORMAT_VERSION:
        raise FormatError(
            f"{directory}: `quantization_config.format_version` is "
            f"{settings.get('format_version')!r}, but this version of mrp-lightning reads "
            f"{FORMAT_VERSION}. Export the pruned model again."
        )
    device = device_named(None)
    if reason := SUBCLASSES["torchao"].missing(device):
        raise OptionError(
            f"{directory} holds torchao's 2:4 tensors, which cannot run here: {reason}. Load the "
            "pruned model, or export it with `--format packed`, which runs everywhere."
        )
    return _on_torchao(_load_dense(directory, options).to(device), settings["modules"])


def _load_dense(directory: Path, options: dict[str, Any]) -> nn.Module:
    config = load_config(str(directory))
    del config.quantization_config
    check_files(directory, build_without_weights(config))
    state: dict[str, Tensor] = {}
    for file in sorted(directory.glob("pytorch_model*.bin")):
        state |= {name: restore(tensor) for name, tensor in read(file).items()}
    model, loading = model_class(config).from_pretrained(
        None, config=config, state_dict=state, output_loading_info=True, **options
    )
    if problem := misfits(directory, model, loading):
        raise FormatError(problem)
    return model


def _on_torchao(model: Any, names: list[str]) -> Any:
    """Convert layers in place, on the device where they are."""
    layers = {name: model.get_submodule(name) for name in names}
    reasons = {name: SUBCLASSES["torchao"].refuse(layer) for name, layer in layers.items()}
    if refused := [f"  {name}: {reason}" for name, reason in reasons.items() if reason]:
        raise OptionError("torchao cannot run these layers:\n" + "\n".join(refused))
    for layer in layers.values():
        SUBCLASSES["torchao"].convert(layer)
    return model
