"""The head of a checkpoint, for `--head-bits 8`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping

from export.conversion.checkpoint import Checkpoint
from mrp_lightning.errors import OptionError
from mrp_lightning.models.checkpoint import build_without_weights, names_in_model
from mrp_sparse.eight_bit_head import Head
from mrp_sparse.formats.eight_bit import VERSION, pack

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class HeadChoice:
    """A head that is written in 8 bits.

    Attributes:
        name: Name of its module in the model.
        table: Name of the embeddings that are tied to it and read from its 8 bits, or `None`.
        tensors: Names of the tensors in the source's files whose place it takes: that of its
            weight, and maybe the same one under the name of the table.
        target: Name of its weight in the files that are written.
        shape: Shape of the weight.
        dtype: Dtype of the weight in the source.
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
        """Bytes of its numbers and scales."""
        return self.shape[0] * (self.shape[1] + self.dtype.itemsize)

    @property
    def settings(self) -> dict[str, str | int]:
        """`head` of the `quantization_config`."""
        return {"module": self.name, "format_version": VERSION}

    def convert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """What is written in place of a tensor of the source, one of `tensors`."""
        if name != self.tensors[0]:
            return {}
        codes, scales = pack(tensor)
        return {self.target: codes, f"{self.target}_scales": scales}


def choose_head(checkpoint: Checkpoint) -> HeadChoice:
    """Find the head of a checkpoint.

    Raises:
        OptionError: It is no model of transformers, or its head cannot have 8 bits.
        FormatError: See `Checkpoint.pretrained_config`.
    """
    if not checkpoint.config:
        raise OptionError("`--head-bits 8` is for transformers models, and this module is your own")
    model = build_without_weights(checkpoint.pretrained_config())
    try:
        head = Head.of(model)
    except OptionError as error:
        raise OptionError(f"`--head-bits 8`: {error}") from error
    name_in_model = names_in_model(model, get_model_conversion_mapping(model))
    mine = [f"{head.name}.weight"] + ([] if head.table is None else [f"{head.table}.weight"])
    found: dict[str, tuple[str, Tensor]] = {}
    for stored, tensor in checkpoint.tensors():
        parameter, is_converted = name_in_model(stored)
        if parameter in mine and not is_converted and tensor.dtype in _DTYPES:
            found[parameter] = stored, tensor
    if not found:
        raise OptionError(
            f"`--head-bits 8`: {checkpoint.path} holds no weight of {head.name} in bfloat16, "
            "float16 or float32."
        )
    first = found.get(mine[0]) or found[mine[1]]
    others = {stored for stored, _ in found.values()} - {first[0]}
    rows, columns = first[1].shape
    return HeadChoice(
        head.name,
        head.table,
        (first[0], *others),
        first[0] if mine[0] in found else mine[0],
        (rows, columns),
        first[1].dtype,
    )
