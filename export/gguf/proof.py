"""Compare a written GGUF file with the files of its checkpoint, tensor by tensor.

The comparison reads both anew, and starts from the checkpoint: a tensor of its files that is not in
the GGUF file is an error, whatever the configuration says of it, unless models recompute it.
"""

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from torch import Tensor

from export.conversion.checkpoint import Checkpoint
from export.gguf.layout import Layout
from mrp_lightning.errors import ParityError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.models.integrity import RECOMPUTED


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
