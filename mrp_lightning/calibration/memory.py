"""Out of memory, as torch and Python say it, and what to lower; and how much was in use."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mrp_lightning.environment import is_out_of_memory
from mrp_lightning.errors import OutOfMemoryError, first_line


def peak_rss() -> int | None:
    """The most memory, in bytes, that this process has held so far; `None` on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def explained_out_of_memory(device: torch.device, *, offload: bool) -> Iterator[None]:
    """Say of an error inside that is one of memory what to lower, in an `OutOfMemoryError`.

    `offload` says whether blocks and activations stay on the CPU already.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, OutOfMemoryError) or not is_out_of_memory(error):
            raise
        lower = "Lower `data.batch_size` or `data.sequence_length` (those of your own dataloader)"
        if device.type == "cpu":
            step = (
                f"{lower}, calibrate on fewer samples, or load the model with `dtype: bfloat16` or "
                "`streaming: true`."
            )
        elif offload:
            step = f"{lower}; `offload` is on already."
        else:
            step = (
                "Set `offload: true` of the pruning callback, which keeps all blocks but one and "
                f"the activations in CPU memory. {lower}, if that is not enough."
            )
        raise OutOfMemoryError(
            f"Not enough memory to prune on {device}. {step} ({first_line(error)})"
        ) from error


def peak_memory(device: torch.device) -> int | None:
    """The most bytes in use so far: those of torch on a GPU, else those of the process in memory.

    On a GPU it is since torch's count was last reset, which pruning a layer does.
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_rss()
