"""The windows that a model wrote, kept in files, so that they are not written again."""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrp_lightning.files import make_directories, move_durably
from mrp_lightning.journal.manifest import digest
from mrp_lightning.samples.writing import Sampling

log = logging.getLogger(__name__)

DIRECTORY = ".own-text"
"""The directory of kept windows, beside the runs that are calibrated on them. It may be deleted."""
_RULE = 1
"""By which rule tokens are drawn: raised when the same sampling gives other windows."""


def key_of(sampling: Sampling, configuration: str, weights: Iterator[tuple[str, Tensor]]) -> str:
    """A name for the windows of a sampling of one model.

    Args:
        sampling: What is written.
        configuration: What the model computes with its weights, as a text.
        weights: All of its tensors, by name, which are read once.
    """
    about = {
        "rule": _RULE,
        "length": sampling.length,
        "seed": sampling.seed,
        "prefix": sampling.prefix.tolist(),
        "first": None if len(sampling.prefix) else digest([("first", sampling.first)]),
        "configuration": configuration,
        "weights": digest(weights),
    }
    text = json.dumps(about, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class KeptWindows:
    """The batches of windows of one sampling, a file each.

    Args:
        directory: Where they are, `None` to keep none.
        length: Tokens a window.
    """

    def __init__(self, directory: Path | None, length: int) -> None:
        self.directory, self.length = directory, length

    def read(self, windows: range) -> Tensor | None:
        """The windows (windows, length) of a batch, `None` where they are not kept whole."""
        file = self._file(windows)
        if file is None or not file.is_file():
            return None
        try:
            found = load_file(file)["input_ids"]
        except (OSError, SafetensorError, KeyError) as error:
            log.warning("%s is damaged (%s): these windows are written again.", file, error)
            return None
        is_whole = found.shape == (len(windows), self.length) and found.dtype == torch.int64
        return found if is_whole else None

    def keep(self, windows: range, written: Tensor) -> None:
        """Write a batch to its file, in one step.

        Raises:
            OSError: It cannot be written.
        """
        file = self._file(windows)
        if file is None:
            return
        make_directories(file.parent)
        partial = file.with_name(f".{file.name}.{token_hex(4)}.partial")
        try:
            save_file({"input_ids": written.contiguous()}, partial)
            move_durably(partial, file)
        finally:
            partial.unlink(missing_ok=True)

    def _file(self, windows: range) -> Path | None:
        if self.directory is None:
            return None
        return self.directory / f"windows-{windows.start}-{windows.stop}.safetensors"
