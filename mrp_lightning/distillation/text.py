"""The text of a distillation: windows that the teacher wrote and windows of given text."""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from mrp_ground.arguments import checked
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.storage.files import move_durably
from mrp_lightning.text.mixture import SELF, WindowSource, beside_files, interleaved
from mrp_lightning.text.sources import TextSource

_Path = str | os.PathLike[str]
_HELD_OUT = 10
"""One of so many windows is held out."""
_HELD, _TRAINED = "held-out", "trained"


class DistillationText(TextDataModule):
    """Windows to distil on: half written by the teacher, half of the text given.

    A tenth of the windows is held out, of each text its own: `fit` validates on them by the name of
    their text. Of files every tenth document is held out or, of fewer than 20, the end of each, so
    that no held-out token is trained on; of text that the teacher writes, every tenth window.
    `fit` goes on within an epoch where a checkpoint was saved. `predict` reads the windows that
    `fit` trains on: a pruning that is to be distilled is calibrated on the same text.

    Args:
        train_files: Text files, as of `TextDataModule`.
        calibration: The shares of the texts, as of `TextDataModule`. By default half of the windows
            are the teacher's own text and half are of `train_files`, or all are the teacher's.
        tokens: The number of tokens to draw, the held-out ones left out. `fit` passes over them
            again if it takes more steps.
        sequence_length: Tokens a window.
        num_samples: The most windows that `predict` reads; `None` for all.
        batch_size: Windows a batch.
        seed: Seed of the draws and of their order.
        keep: A safetensors file that keeps the windows: written after they are drawn, and read in
            their place if it exists.
        **options: `dataset`, `corpora_dir`, `text_column`, `bos` and `tokenizer`, as of
            `TextDataModule`.

    Raises:
        OptionError: `tokens` is less than ten windows. `TextDataModule` raises more.
    """

    @checked
    def __init__(
        self,
        train_files: Sequence[_Path] | _Path | None = None,
        *,
        calibration: dict[str, float] | str | None = None,
        tokens: int = 200_000,
        sequence_length: int = 512,
        num_samples: int | None = None,
        batch_size: int = 4,
        seed: int = 0,
        keep: _Path | None = None,
        **options: Any,
    ) -> None:
        if tokens < _HELD_OUT * sequence_length:
            raise OptionError(
                f"expected at least ten windows, {_HELD_OUT * sequence_length} tokens. Got "
                f"{tokens}.",
                "tokens",
            )
        if calibration is None:
            calibration = beside_files(0.5) if train_files else SELF
        self._count = -(-tokens // sequence_length)
        super().__init__(
            train_files,
            calibration=calibration,
            hold_out=bool(train_files),
            num_samples=self._count if num_samples is None else min(self._count, num_samples),
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=seed,
            **options,
        )
        self.keep = None if keep is None else Path(keep)
        self._windows: dict[str, Tensor] = {}
        self._epoch: _ResumedLoader | None = None
        self._read = 0

    @property
    def steps(self) -> int:
        """The number of batches in `tokens`; an OptionError if it is 0."""
        steps = self._count // self.batch_size
        if steps == 0:
            raise OptionError(
                f"expected at least a step, {self.batch_size * self.sequence_length} tokens. Got "
                f"{self._count * self.sequence_length}. Give more, or smaller batches.",
                "tokens",
            )
        return steps

    def setup(self, stage: str) -> None:
        """Check the texts as for `predict`, whose windows they are, for `fit`, too."""
        super().setup("predict" if stage in ("fit", "validate") else stage)

    def train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the windows that are not held out, in a new order in every epoch.

        A batch is a tensor of token ids, int64 (batch_size, sequence_length).
        """
        windows: Any = self._trained()
        state = self.state_dict()
        self._epoch = _ResumedLoader(
            windows, batch_size=self.batch_size, sampler=_Shuffled(len(windows), self.seed)
        )
        self._epoch.load_state_dict(state)
        return self._epoch

    def calibration_windows(self) -> Tensor:
        """Return the first `num_samples` of the windows to train on, of all texts interleaved."""
        return self._trained()[: self.num_samples]

    @property
    def own_windows(self) -> int:
        """The number of windows that the teacher writes, the held-out ones included."""
        own = self._mixture().counts(self._count).get(SELF, 0)
        return own and own + max(1, own // _HELD_OUT)

    def _trained(self) -> Tensor:
        parts = [w for name, w in self._drawn().items() if name.startswith(_TRAINED)]
        return interleaved(parts)

    # Not only as the loader's: Lightning restores no loader that exists before the checkpoint is
    # read, as where the learning rate depends on its length.
    def state_dict(self) -> dict[str, Any]:
        """Return `read`, the number of batches of the present epoch that were trained on."""
        return {"read": self._read} if self._epoch is None else self._epoch.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next epoch behind the batches that were read."""
        self._read = state_dict["read"]
        if self._epoch is not None:
            self._epoch.load_state_dict(state_dict)

    def val_dataloader(self) -> dict[str, DataLoader[Any]]:
        """Return a loader of the held-out windows for each text, by its name, in a fixed order."""
        return {
            name.removeprefix(f"{_HELD}/"): DataLoader(cast(Any, windows), self.batch_size)
            for name, windows in self._drawn().items()
            if name.startswith(_HELD)
        }

    def _drawn(self) -> dict[str, Tensor]:
        """Return all windows by use and text, drawn once; a collective call of all processes."""
        if not self._windows:
            if self.keep is not None and self.keep.is_file():
                self._windows = load_file(self.keep)
            else:
                self._windows = self._draw()
                if self.keep is not None:
                    _save(self._windows, self.keep)
        return self._windows

    def _draw(self) -> dict[str, Tensor]:
        mixture, cutter = self._mixture(), self._cutter(self.bos)
        windows: dict[str, Tensor] = {}
        for name, count in mixture.counts(self._count).items():
            source = mixture.sources[name]
            held = max(1, count // _HELD_OUT)
            trained, evaluated = _split(source, name, cutter, count, held, self.seed)
            text = "own" if name == SELF else "text" if name in ("", "train_files") else name
            windows[f"{_TRAINED}/{text}"] = trained
            windows[f"{_HELD}/{text}"] = evaluated
        lengths = {window.shape[1] for window in windows.values()}
        if len(lengths) > 1:
            raise DataError(
                "a text has fewer tokens than a window. Give more text, or shorter windows.",
                "sequence_length",
            )
        return {name: window.contiguous() for name, window in windows.items()}


def _split(
    source: WindowSource, name: str, cutter: Any, count: int, held: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return `count` windows to train on and at most `held` to evaluate on."""
    if isinstance(source, TextSource) and name == "train_files":
        return source.draw(cutter, count, seed), source.windows(cutter, "validation", held).ids
    drawn = source.draw(cutter, count + held, seed)
    is_held = torch.zeros(len(drawn), dtype=torch.bool)
    is_held[:: max(1, len(drawn) // held)] = True
    return drawn[~is_held], drawn[is_held][:held]


@rank_zero_only
def _save(windows: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file, which appears when it is complete."""
    part = file.with_name(f".{file.name}.part")
    save_file(windows, part)
    move_durably(part, file)


class _Shuffled(Sampler[int]):
    """The order of an epoch, by the seed and the epoch's number alone."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch; Lightning calls it before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return iter(torch.randperm(self.length, generator=generator).tolist())


class _ResumedLoader(DataLoader[Any]):
    """A loader that begins its next epoch behind the first `read` batches, and counts on."""

    read = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches that were read."""
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next epoch behind the batches that were read."""
        self.read = state["read"]

    def __iter__(self) -> Any:
        # In an epoch's first read, not before: Lightning makes the iterator before it restores.
        self.read = skipped = self.read if self.read < len(self) else 0
        for batch in islice(super().__iter__(), skipped, None):
            self.read += 1
            yield batch
        self.read = 0
