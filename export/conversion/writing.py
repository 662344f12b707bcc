"""Write a pruned checkpoint file by file, some of its weights packed."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from export.conversion.checkpoint import Checkpoint
from export.conversion.selection import LayerChoice
from mrp_lightning.errors import OptionError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.storage.files import naming, save_text
from mrp_lightning.storage.json_files import as_json
from mrp_sparse.eight_bit_head import Head
from mrp_sparse.formats.eight_bit import EIGHT_BIT, VERSION, pack
from mrp_sparse.formats.packed_format import NOTE

_HEAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class HeadChoice:
    """A head that is written in 8 bits.

    Attributes:
        name: Name of its module in the model.
        table: Name of the embeddings that are tied to the head, and read from its 8 bits, if any.
        tensors: Names of the source's tensors that it replaces: its weight, which is converted, and
            then any copy under the name of the table.
        target: Name of the weight in the written files.
        shape: Shape of the weight; `dtype` is that in the source.
    """

    name: str
    table: str | None
    tensors: tuple[str, ...]
    target: str
    shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def dense_bytes(self) -> int:
        """Bytes of the weight in the source."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def packed_bytes(self) -> int:
        """Bytes of the 8-bit numbers and scales."""
        return EIGHT_BIT.num_bytes(self.shape, self.dtype, 0)

    @property
    def settings(self) -> dict[str, str | int]:
        """The entry `head` of the `quantization_config`."""
        return {"module": self.name, "format_version": VERSION}

    def convert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the tensors to write instead of a source tensor, one of `tensors`."""
        # The second name of a tied weight is not written: loading gives it the first one's 8 bits.
        if name != self.tensors[0]:
            return {}
        codes, scales = pack(tensor)
        return {self.target: codes, f"{self.target}_scales": scales}


def choose_head(checkpoint: Checkpoint) -> HeadChoice:
    """Return the head of a checkpoint, to be written in 8 bits.

    Raises:
        OptionError: The checkpoint is no transformers model, its head cannot have 8 bits, or its
            files hold no weight of the head, or two that differ.
        FormatError: See `Checkpoint.pretrained_config`.
    """
    if not checkpoint.config:
        raise OptionError("`--head-bits 8` is for transformers models, and this module is your own")
    model = build_without_weights(checkpoint.pretrained_config())
    try:
        head = Head.of(model)
    except OptionError as error:
        raise OptionError(f"`--head-bits 8`: {error}") from error
    parameters = [f"{head.name}.weight"] + ([] if head.table is None else [f"{head.table}.weight"])
    weights: dict[str, tuple[str, Tensor]] = {}
    for stored, parameter, is_converted, tensor in checkpoint.parameters(model):
        if parameter in parameters and not is_converted and tensor.dtype in _HEAD_DTYPES:
            weights[parameter] = stored, tensor
    if not weights:
        raise OptionError(
            f"`--head-bits 8`: {checkpoint.path} holds no weight of {head.name} in bfloat16, "
            "float16 or float32."
        )
    # Only one of the two is written, so they have to be equal for the export to be lossless up to
    # the rounding.
    if len(weights) > 1 and not torch.equal(*(tensor for _, tensor in weights.values())):
        raise OptionError(
            f"`--head-bits 8`: {checkpoint.path} holds a {parameters[0]} that differs from its "
            f"{parameters[1]}, and `tie_word_embeddings` of config.json ties them, so that one of "
            "them would be lost. Set it to false."
        )
    first = weights.get(parameters[0]) or weights[parameters[1]]
    others = {stored for stored, _ in weights.values()} - {first[0]}
    target = first[0] if parameters[0] in weights else parameters[0]
    shape = (first[1].shape[0], first[1].shape[1])
    dtype = first[1].dtype
    return HeadChoice(head.name, head.table, (first[0], *others), target, shape, dtype)


def write_packed(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    head: HeadChoice | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Write a checkpoint with some weights packed into an empty directory.

    There must be at least one layer, and all must have the same format; a `head` is written in 8
    bits. `settings` replace those of the format in the `quantization_config`, except for `None`.
    Yields the name of each layer when it is packed.
    """
    form = layers[0].form

    def convert(layer: LayerChoice, tensor: Tensor) -> dict[str, Tensor]:
        names = [layer.tensor, *form.companion_names(layer.tensor)]
        packed = dict(zip(names, form.pack(layer.matrix(tensor)), strict=True))
        # transformers lists unexpected tensors: the name of one tells users which package they
        # lack.
        is_first = layer is layers[0] and bool(source.config)
        note = {NOTE: torch.empty(0)} if is_first else {}
        return packed | note

    names = [layer.name for layer in layers]
    # A format of variable length needs the number of elements of each layer, to build the model's
    # empty tensors before the files are read.
    modules = {layer.name: layer.count for layer in layers} if form.counted else names
    written: dict[str, Any] = {"quant_method": form.quant_method}
    written |= {"format_version": form.version, "modules": modules}
    written |= {"head": head and head.settings} | dict(settings or {})
    present = {key: value for key, value in written.items() if value is not None}
    yield from write_converted(source, directory, layers, convert, present, head=head)


def write_converted(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    convert: Callable[[LayerChoice, Tensor], dict[str, Tensor]],
    settings: dict[str, Any],
    *,
    head: HeadChoice | None = None,
) -> Iterator[str]:
    """Write a checkpoint with the weights of some layers converted into an empty directory.

    Args:
        source: The checkpoint, whose other tensors are copied.
        directory: An empty directory.
        layers: The layers whose weights are converted.
        convert: Returns the tensors, by name, to write for a layer's weight.
        settings: The `quantization_config` to write.
        head: A head that is written in 8 bits.

    Yields:
        The names of the layers, as they are converted.
    """
    choices = {layer.tensor: layer for layer in layers}
    weight_map: dict[str, str] = {}
    total = 0
    for weights in source.files:
        tensors: dict[str, Tensor] = {}
        for name, tensor in weights.read().items():
            if name in choices:
                tensors |= convert(choices[name], tensor)
                yield choices[name].name
            elif head is not None and name in head.tensors:
                tensors |= head.convert(name, tensor)
            else:
                tensors[name] = tensor
        # No temporary file is needed: the whole directory is moved into place when it is complete.
        with naming(file := directory / weights.name):
            save_file(tensors, file, {"format": "pt", **weights.metadata})
        weight_map |= dict.fromkeys(tensors, weights.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(source.files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        save_text(directory / "model.safetensors.index.json", as_json(index))
    config = source.config | {"quantization_config": settings}
    save_text(directory / "config.json", as_json(config))
    for companion in source.companions:
        (directory / companion).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.path / companion, directory / companion)
