"""The windows that a model wrote, kept in files, so that they are not written again."""

import hashlib
import json
import logging
import re
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
_NAME = re.compile(r"windows-([0-9]{1,9})-([0-9]{1,9})\.safetensors")
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
    """The windows of one sampling that are written, in a file for each batch.

    Args:
        directory: Where they are, `None` to keep none.
        length: Tokens a window.
    """

    def __init__(self, directory: Path | None, length: int) -> None:
        self.directory, self.length = directory, length

    def read(self, count: int) -> dict[int, Tensor]:
        """Those of the first windows (length,) that are kept, by number, in whatever batches."""
        found: dict[int, Tensor] = {}
        for file in sorted(self.directory.glob("windows-*")) if self.directory else ():
            batch = _NAME.fullmatch(file.name)
            if batch is None:
                continue
            windows = range(int(batch[1]), int(batch[2]))
            if windows.start < count and (written := self._read(file, windows)) is not None:
                found.update(zip(windows, written, strict=True))
        return {n: window for n, window in found.items() if n < count}

    def _read(self, file: Path, windows: range) -> Tensor | None:
        """The windows (windows, length) of a file, `None` where they are not there whole."""
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
        if self.directory is None:
            return
        make_directories(self.directory)
        file = self.directory / f"windows-{windows.start}-{windows.stop}.safetensors"
        partial = file.with_name(f".{file.name}.{token_hex(4)}.partial")
        try:
            save_file({"input_ids": written.contiguous()}, partial)
            move_durably(partial, file)
        finally:
            partial.unlink(missing_ok=True)
