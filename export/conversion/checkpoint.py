"""A checkpoint on disk, read file by file, with progress bars for long reads."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from mrp_lightning.errors import FormatError, first_line
from mrp_lightning.models.checkpoint import (
    model_class,
    names_in_model,
    weight_files,
)
from mrp_lightning.models.companions import find_companions
from mrp_lightning.models.integrity import check_values, unexpected_tensors
from mrp_lightning.models.loading import load_checked
from mrp_lightning.models.locations import refuse_adapter
from mrp_lightning.records import report as pruning_report
from mrp_lightning.records.grid_file import NAME as GRID
from mrp_lightning.records.grid_file import load_parameters
from mrp_lightning.solver.grid import GridParameters
from mrp_lightning.storage.files import OTHER_WEIGHTS
from mrp_lightning.storage.json_files import read_json
from mrp_lightning.targets.blocks import not_finite
from mrp_lightning.targets.layers import PLAIN_DTYPES
from mrp_lightning.terminal import Console

T = TypeVar("T")


def tracked(items: Iterable[T], total: int | None, description: str) -> Iterator[T]:
    """Iterate with a progress bar on standard error, if that is a terminal."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    off = not sys.stderr.isatty()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=off) as progress:
        yield from progress.track(items, total=total, description=description)


def silence_transformers() -> None:
    """Silence transformers' messages below errors."""
    logging.getLogger("transformers").setLevel(logging.ERROR)


_REPLACED = {"config.json", "export_report.json"}


@dataclass(frozen=True)
class WeightFile:
    """A safetensors file of weights, with the metadata of its header."""

    path: Path
    name: str  # of the file that will replace it
    names: Sequence[str]  # of its tensors
    metadata: Mapping[str, str]

    def read(self) -> dict[str, Tensor]:
        """Load its tensors to the CPU."""
        return load_file(self.path)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: The directory that the user named.
        config: The content of `config.json`; empty for a user's own module, whose layers only
            `pruning_report.json` names.
        files: The files of weights.
        companions: The other files to copy, relative to `path`: tokenizer, chat template, reports.
    """

    path: Path
    config: dict[str, Any]
    files: list[WeightFile]
    companions: list[Path]

    @property
    def num_tensors(self) -> int:
        """The number of tensors."""
        return sum(len(file.names) for file in self.files)

    @property
    def num_bytes(self) -> int:
        """The size of the weight files in bytes."""
        return sum(file.path.stat().st_size for file in self.files)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Read all tensors with their names, with one file at a time in memory."""
        for file in self.files:
            yield from file.read().items()

    def parameters(
        self, model: PreTrainedModel, description: str | None = None
    ) -> Iterator[tuple[str, str, bool, Tensor]]:
        """Read all tensors with the parameters that they are in a model.

        With a description of the step there is a bar, and an error at the end if some are not
        finite.

        Yields:
            The name in the files, the name in the model, whether transformers computes the
            parameter from several tensors or by another conversion, and the tensor.

        Raises:
            FormatError: See `require_finite`.
        """
        name_in_model = names_in_model(model, get_model_conversion_mapping(model))
        tensors = self.tensors()
        if description is not None:
            known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            tensors = require_finite(
                tracked(tensors, self.num_tensors, description),
                self.path,
                lambda stored: name_in_model(stored)[0] in known,
            )
        for stored, tensor in tensors:
            yield (stored, *name_in_model(stored), tensor)

    def state(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the state dict of a loaded model as the files hold it, in their precision.

        Loading rounds to the dtype of the configuration. Parameters that transformers computes from
        several tensors are those of the model.

        Raises:
            FormatError: The files hold tensors that no parameter of the model takes, or tensors of
                a wider dtype from which it computes parameters.
        """
        state, lost, rounded = dict(model.state_dict()), [], []
        # A tied parameter is in the files once, under one of its names. All its names have to take
        # the file's tensor, or the copies would differ by the rounding to `dtype`.
        names_of: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(parameter), []).append(name)
        tied = {name: names for names in names_of.values() for name in names}
        for stored, name, is_converted, tensor in self.parameters(model):
            if name not in state:
                lost.append(stored)
            elif is_converted:
                # A converted parameter can only be read from the model. It is exact if the model's
                # dtype holds every value of the file's, which for floating point is so iff both
                # promote to the model's dtype.
                fits = torch.promote_types(tensor.dtype, state[name].dtype) == state[name].dtype
                rounded += [] if fits else [stored]
            else:
                state |= dict.fromkeys(tied.get(name, [name]), tensor)
        if problem := unexpected_tensors(self.path, model, lost):
            raise FormatError(problem)
        if rounded:
            raise FormatError(
                f"{self.path} holds {len(rounded)} tensors that are more precise than "
                f"{model.dtype}, the `dtype` of config.json, from which transformers computes "
                f"parameters: {', '.join(rounded[:5])}. Correct `dtype`, or save them in it."
            )
        return state

    def grid_parameters(self) -> dict[str, GridParameters]:
        """Read the grid parameters that the pruning kept, float32, by layers' names; maybe none.

        Raises:
            FormatError: Their file is damaged.
        """
        return load_parameters(self.path / GRID)

    def require_dense(self) -> None:
        """Raise a FormatError if the weights are packed or quantized."""
        if quantization := self.config.get("quantization_config"):
            method = quantization.get("quant_method", "unknown")
            raise FormatError(
                f"{self.path} is already packed or quantized (`quant_method` {method!r}). Give "
                "the pruned checkpoint, with dense weights."
            )

    def pretrained_config(self) -> PreTrainedConfig:
        """Return the configuration as a transformers object.

        Raises:
            FormatError: transformers does not know the configuration.
        """
        try:
            return AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        except Exception as error:  # of any type, from the model's own checks
            raise FormatError(
                f"{self.path}: transformers does not know this configuration (`model_type` "
                f"{self.config.get('model_type')!r}), and code of the checkpoint is never run: "
                f"{first_line(error)}"
            ) from error

    def load(self) -> PreTrainedModel:
        """Load the dense model to the CPU, in the dtype of its configuration.

        Raises:
            FormatError: The configuration is unknown, or files are damaged or do not fit it.
        """
        config = self.pretrained_config()
        return load_checked(model_class(config), config, str(self.path), dtype="auto")


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Find the weights of a Hugging Face directory, in safetensors files.

    A directory without `config.json` is that of a user's own module, as pruning writes it.

    Raises:
        FileNotFoundError: The path is none of these, or holds no weights.
        FormatError: The files are damaged, incomplete or implausible, or hold something else, such
            as an adapter; or links in the directory lead outside.
    """
    path = Path(path).expanduser()
    refuse_adapter(path, "CKPT")
    if (path / "config.json").is_file():
        config = read_json(path / "config.json", "fetch it again")
        check_values(config, path)
    elif (path / "model.safetensors").is_file() and (path / pruning_report.NAME).is_file():
        config = {}
    else:
        raise FileNotFoundError(
            f"`CKPT`: {path} is neither a Hugging Face directory with a config.json, nor what "
            "pruning writes of a module of your own (model.safetensors and "
            f"{pruning_report.NAME}). Save another checkpoint with `save_pretrained`."
        )
    files = weight_files(path)
    if not files:
        raise FileNotFoundError(
            f"`CKPT`: {path} holds no weights: expected model.safetensors, or an index of its "
            "shards."
        )
    if pickles := [file.name for file in files if file.suffix != ".safetensors"]:
        raise FormatError(
            f"`CKPT`: {path} holds its weights in pickles ({', '.join(pickles)}), and safetensors "
            "are read alone. Load the model with transformers, and save it with `save_pretrained`."
        )
    opened = [weight_file(file) for file in files]
    if len(opened) == 1:  # an index of one file is not written again
        opened = [replace(opened[0], name="model.safetensors")]
    return Checkpoint(path, config, opened, _companions(path))


def weight_file(file: Path) -> WeightFile:
    """Open a safetensors file of weights.

    Raises:
        FormatError: The file is damaged.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            return WeightFile(file, file.name, [*opened.keys()], opened.metadata() or {})
    except Exception as error:  # safetensors raises its own error, which is no public class
        raise FormatError(f"{file} is no complete safetensors file: {error}") from error


def _companions(path: Path) -> list[Path]:
    """List the files beside a checkpoint, with the other weights of a LightningModule.

    They will be copied, and copies may be published, so links that lead outside raise.
    """
    companions = find_companions(path)
    if companions.outside:
        links = ", ".join(
            f"{path / file} → {target}" for file, target in companions.outside.items()
        )
        raise FormatError(
            f"{path} holds links to files elsewhere, which would be copied into the export: "
            f"{links}. Put the files themselves there, or remove the links."
        )
    extra = [Path(OTHER_WEIGHTS)] * (path / OTHER_WEIGHTS).is_file()
    return [file for file in companions.files if str(file) not in _REPLACED] + extra


def require_finite(
    tensors: Iterable[tuple[str, Tensor]], path: Path, is_parameter: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint, and raise at the end if some are not finite.

    Only parameters must be free of Inf, since some buffers, such as masks, hold Inf by design.
    Dtypes that torch cannot check, such as packed four-bit types, are not checked.

    Raises:
        FormatError: Tensors are not finite. The message names all of them.
    """
    counts = {}
    for name, tensor in tensors:
        if tensor.dtype in PLAIN_DTYPES:
            # A generator that raises at its end costs no second pass over the files, and names all
            # tensors.
            is_bad = ~tensor.isfinite() if is_parameter(name) else tensor.isnan()
            if count := int(is_bad.sum()):
                counts[name] = count
        yield name, tensor
    if counts:
        raise FormatError(f"{path}: {not_finite(f'{len(counts)} tensors', counts)}")
