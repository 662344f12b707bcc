"""Write a pruned checkpoint as a GGUF file, and compare that with the checkpoint's files.

The comparison reads both anew, and starts from the checkpoint: a tensor of its files that is not in
the GGUF file is an error, whatever the configuration says of it, unless models recompute it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from torch import Tensor

from export.conversion.checkpoint import Checkpoint
from export.gguf.families import layout_of_family
from export.gguf.layout import Layout
from export.gguf.like import layout_like
from export.gguf.types import AUTO, TYPES, encode, exact_type
from mrp_lightning.errors import FormatError, ParityError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.models.gguf import reading
from mrp_lightning.models.integrity import RECOMPUTED
from mrp_lightning.solver.grid import GridParameters
from mrp_lightning.storage.files import flush

_VOCABULARY = ("token_embd.weight", "output.weight")


@dataclass(frozen=True)
class Written:
    """A summary of a written file.

    Attributes:
        num_bytes: The bytes of all tensors.
        types: The number of tensors of each type.
        rounded: The relative error of each tensor that its type does not hold to the bit, by name.
        notes: Differences between llama.cpp and transformers on some texts.
    """

    num_bytes: int
    types: Mapping[str, int]
    rounded: Mapping[str, float]
    notes: Sequence[str] = ()


def write_gguf(
    checkpoint: Checkpoint, like: Path | None, out: Path, kind: str, vocabulary: str | None = None
) -> Written:
    """Write the weights of a checkpoint with their metadata and tokenizer.

    Matrices are stored in the given type, exactly if it can hold them, and norms and biases in
    float32. Zeros of the checkpoint are zeros in the file.

    Args:
        checkpoint: A dense Hugging Face checkpoint.
        like: A GGUF file of the same model, which may be wider, whose metadata and tokenizer are
            copied; None to make them from the checkpoint, for the architectures of `FAMILIES`.
        out: The file to write.
        kind: A name in `TYPES`, or auto: for each matrix the smallest type that holds it to the
            bit.
        vocabulary: The type of embeddings and head. None means `kind` if that is auto or floating
            point; else the smallest type with codes that holds them exactly, or, if none does,
            `kind`, but at least q8_0.

    Raises:
        FormatError: The checkpoint is packed or quantized; or `like` is damaged, or has an
            architecture whose tensors cannot be identified.
        OptionError: `like` holds another model, a type cannot hold a matrix, or without `like` the
            architecture or its tokenizer is unknown; or llama.cpp would compute another function.
        ParityError: A zero weight would not stay zero, or the file does not hold the checkpoint.
        OSError: The file could not be written completely.
    """
    if like is not None:
        with reading(like, "--like"):  # refuses a damaged file before the checkpoint is read
            pass
    checkpoint.require_dense()
    if not checkpoint.config:
        raise FormatError(
            f"{checkpoint.path} is no Hugging Face checkpoint. Give the directory that pruning "
            "wrote of a transformers model."
        )
    layout = layout_of_family(checkpoint) if like is None else layout_like(checkpoint, like)
    writer = GGUFWriter(out, layout.architecture)
    layout.write_fields(writer)
    encoded = {}
    for name, tensor in layout.tensors.items():
        # Norms and biases are a negligible part of the bytes, and float32 holds all 16-bit values
        # exactly.
        of_tensor = "f32" if tensor.ndim == 1 else kind
        known = layout.parameters.get(name)
        if name in _VOCABULARY:
            of_tensor = vocabulary or _type_of_vocabulary(tensor, kind, known)
        stored = encode(name, tensor, of_tensor, known)
        writer.add_tensor(name, stored.content, raw_dtype=stored.kind.stored_as)
        encoded[name] = stored
    for name, (content, stored_as) in layout.tables.items():
        writer.add_tensor(name, content, raw_dtype=stored_as)
    # The type of the file, which readers show, is the one that takes the most bytes.
    sizes: Counter[str] = Counter()
    for stored in encoded.values():
        sizes[stored.kind.name] += stored.content.nbytes
    writer.add_file_type(TYPES[max(sizes, key=sizes.__getitem__)].file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return Written(
        _write(writer, out),
        Counter(stored.kind.name for stored in encoded.values()),
        prove(checkpoint, layout, out),
        layout.notes,
    )


def _type_of_vocabulary(tensor: Tensor, kind: str, known: GridParameters | None) -> str:
    """Return the default type of embeddings or head in a file of a type.

    They lose most by few bits, so they have at least 8, unless they are on a grid of fewer.
    """
    grid = None if kind == AUTO else TYPES[kind].grid
    if grid is None:
        return kind
    return exact_type(tensor, known) or ("q8_0" if grid.bits < 8 else kind)


def _write(writer: GGUFWriter, out: Path) -> int:
    """Write the file, and return the bytes of its tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # The file is read back after the flush: before it, a part may exist in memory only.
    flush(out)
    try:
        return sum(tensor.n_bytes for tensor in GGUFReader(out).tensors)
    except (ValueError, IndexError) as error:
        raise OSError(f"{out} could not be written whole ({error}). Is the disk full?") from error


def prove(checkpoint: Checkpoint, layout: Layout, file: Path) -> dict[str, float]:
    """Return the rounding error of each tensor of a file that is not its checkpoint's to the bit.

    The error is the root mean square of the differences, relative to that of the tensor, by the
    tensor's name in the GGUF file.

    Args:
        checkpoint: The checkpoint, whose files are read again.
        layout: Where the GGUF file holds each parameter.
        file: The GGUF file.

    Raises:
        ParityError: The GGUF file lacks tensors of the checkpoint, or holds others of them than
            rounding explains. The message lists all.
    """
    stored = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    model = build_without_weights(checkpoint.pretrained_config())
    failures, errors, compared = [], {}, set()
    for name, parameter, is_converted, tensor in checkpoint.parameters(model):
        location = layout.locations.get(parameter)
        if location is None or location.stored not in stored:
            if not RECOMPUTED.search(parameter):
                failures.append(f"{name}: missing")
            continue
        entry = stored[location.stored]
        # A copy, since the reader's memory is read-only.
        values = torch.from_numpy(np.array(dequantize(entry.data, entry.tensor_type)))
        # transformers computes stacked experts from several tensors, once they are loaded.
        expected = layout.tensors[entry.name] if is_converted else location.arrange(tensor)
        compared.add(entry.name)
        if values.shape != expected.shape:
            failures.append(f"{name}: {tuple(values.shape)} in place of {tuple(expected.shape)}")
        elif not _same(values, expected):
            errors[entry.name] = error = _relative_error(values, expected)
            # The negation also catches NaN, which compares as false.
            if not error <= _MOST:
                failures.append(f"{name}: another tensor, by {error:.0%} of its size")
    # The other direction: a tensor of the GGUF file that no tensor of the checkpoint gave would
    # take part in the computation unproven.
    known = compared | layout.tables.keys()
    failures += [f"{name}: of no tensor of the checkpoint" for name in stored.keys() - known]
    for name, (content, _) in layout.tables.items():
        if name not in stored or stored[name].data.tobytes() != content.tobytes():
            failures.append(f"{name}: another table")
    if failures:
        listed = "\n".join(f"  {failure}" for failure in failures)
        raise ParityError(f"The GGUF file does not hold {checkpoint.path}:\n{listed}")
    return errors


_MOST = 0.5
"""The largest relative error that is believed to be rounding; that to 3 bits is about 0.2."""


def _same(values: Tensor, expected: Tensor) -> bool:
    """Return whether values of a file, float32, are a tensor to the bit, in its own precision.

    A tensor of bfloat16 numbers that is stored wider has the precision of bfloat16.
    """
    narrow = expected.bfloat16()
    if torch.equal(narrow.to(expected.dtype), expected):
        return torch.equal(values.bfloat16(), narrow)
    return torch.equal(values.to(expected.dtype), expected)


def _relative_error(values: Tensor, expected: Tensor) -> float:
    size = expected.double().norm()
    return float((values.double() - expected.double()).norm() / (size if size else 1.0))
