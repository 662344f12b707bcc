"""Load models from exported directories, and check that all weights exist."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from export import torchao_tensors
from mrp_ground.arguments import checked
from mrp_lightning.devices import device_named
from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.models.checkpoint import (
    build_without_weights,
    model_class,
    refuse_adapter,
    weight_files,
)
from mrp_lightning.models.integrity import check_files, check_values, explained_damage
from mrp_lightning.models.loading import load_config, read_weights
from mrp_lightning.storage.files import MANIFEST, differing
from mrp_lightning.storage.json_files import read_json
from mrp_sparse.formats.sparse24 import SPARSE24


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
    if settings.get("quant_method") != torchao_tensors.METHOD:
        return _load_pretrained(directory, **options)
    device = device_named(None)
    if reason := torchao_tensors.missing(device):
        raise OptionError(
            f"{directory} is for torchao's 2:4 tensors, which cannot run here: {reason}. Load the "
            "pruned model, or export it with `--format packed`, which runs everywhere."
        )
    config = load_config(str(directory))
    config.quantization_config = settings | {"quant_method": SPARSE24.quant_method}
    model = _load_pretrained(directory, config=config, **options)
    nn.Module.to(model, device)  # PreTrainedModel.to has another signature
    torchao_tensors.sparsify(model, settings["modules"])
    return model


def _load_pretrained(directory: Path, **options: Any) -> PreTrainedModel:
    trust = bool(options.get("trust_remote_code"))
    config = options.get("config") or load_config(str(directory), trust_remote_code=trust)
    # The check builds the model without weights by transformers' own classes. With code of the
    # checkpoint, there is no class to build before it runs.
    if not trust:
        check_files(directory, build_without_weights(config))
    with explained_damage(str(directory), None):
        model, loading = read_weights(model_class(config), directory, directory, **options)
    # transformers only warns of such keys, and computes with random weights where some are missing.
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, loading[kind])))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if loading[kind]
    ]
    if problems:
        raise FormatError(f"{directory} does not fit {type(model).__name__}: {'; '.join(problems)}")
    return model


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
