"""The text of a distillation: windows that the teacher wrote and windows of given text."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from mrp_ground.arguments import checked
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.storage.files import move_durably
from mrp_lightning.text.mixture import SELF, WindowSource, interleaved
from mrp_lightning.text.sources import StandardLibrary, TextFiles

_Path = str | os.PathLike[str]
_HELD_OUT = 10
"""One of so many windows is held out."""
_HELD, _TRAINED = "held-out", "trained"


class DistillationText(TextDataModule):
    """Windows to distil on: half written by the teacher, half of the text given.

    A tenth of the windows is held out, of each text its own: `fit` validates on them by the name of
    their text. Of files every tenth document is held out or, of fewer than 20, the end of each, so
    that no held-out token is trained on; of Python's library, files of its own; of text that the
    teacher writes, and of datasets and published texts, every tenth window.
    `fit` goes on within an epoch where a checkpoint was saved. `predict` reads the windows that
    `fit` trains on: a pruning that is to be distilled is calibrated on the same text.

    Args:
        train_files: Text files, as of `TextDataModule`.
        calibration: The shares of the texts, as of `TextDataModule`. By default half of the windows
            are the teacher's own text and half are of `train_files` or the `dataset`, or all are
            the teacher's.
        tokens: The number of tokens to draw, the held-out ones left out. `fit` passes over them
            again if it takes more steps.
        sequence_length: Tokens a window.
        num_samples: The most windows that `predict` reads; `None` for all.
        batch_size: Windows a batch.
        seed: Seed of the draws and of their order.
        keep: A safetensors file that keeps the windows: written after they are drawn, and read in
            their place if it exists. It must hold those of the same arguments.
        **options: `dataset`, `corpora_dir`, `text_column`, `bos` and `tokenizer`, as of
            `TextDataModule`.

    Raises:
        OptionError: `tokens` is less than ten windows, or `keep` holds other windows.
            `TextDataModule` raises more.
        DataError: A text is too short for its share of `tokens`.
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
            given = "train_files" if train_files else "dataset"
            is_own = not train_files and options.get("dataset") is None
            calibration = SELF if is_own else {SELF: 0.5, given: 0.5}
        self._count = -(-tokens // max(1, sequence_length))  # less is refused below
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
        self._progress = _Progress()

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
        order = _Shuffled(len(windows), self.seed)
        return _ResumedLoader(
            windows, progress=self._progress, batch_size=self.batch_size, sampler=order
        )

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
        return self._progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Begin the next epoch behind the batches that were read."""
        self._progress.load_state_dict(state_dict)

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
                self._windows = self._kept(self.keep)
            else:
                self._windows = self._draw()
                if self.keep is not None:
                    _save(self._windows, self.keep, self._drawn_by)
        return self._windows

    @property
    def _drawn_by(self) -> dict[str, str]:
        """The arguments that decide the windows, by name."""
        return {
            "calibration": self._mixture().name,
            "tokens": str(self._count * self.sequence_length),
            "sequence_length": str(self.sequence_length),
            "seed": str(self.seed),
        }

    def _kept(self, file: Path) -> dict[str, Tensor]:
        """Read the windows of a file, in the order of the texts."""
        with safe_open(file, framework="pt") as tensors:
            stored, present = tensors.metadata() or {}, self._drawn_by
            differing = [f"`{n}: {stored.get(n)}`" for n in present if stored.get(n) != present[n]]
            if differing:
                raise OptionError(
                    f"{file} holds windows of {', '.join(differing)}. Give the same, or name "
                    "another file.",
                    "keep",
                )
            return {name: tensors.get_tensor(name) for name in self._names()}

    def _names(self) -> list[str]:
        """Return the names of the parts of the windows, by text and use."""
        texts = map(_name_of, self._mixture().shares)
        return [f"{use}/{text}" for text in texts for use in (_TRAINED, _HELD)]

    def _draw(self) -> dict[str, Tensor]:
        mixture, cutter = self._mixture(), self._cutter(self.bos)
        windows: dict[str, Tensor] = {}
        counts = mixture.counts(self._count)
        # Own text comes last: a fault of the others shows before it is written.
        for name in sorted(counts, key=lambda name: name == SELF):
            count, text = counts[name], _name_of(name)
            held = max(1, count // _HELD_OUT)
            trained, evaluated = _split(mixture.sources[name], cutter, count, held, self.seed)
            if len(trained) < count:
                tokens = int(len(trained) / mixture.shares[name]) * self.sequence_length
                raise DataError(
                    f"{mixture.sources[name].name or 'the text'} is enough for {len(trained):,} "
                    f"windows of {self.sequence_length} tokens, and its share is {count:,}. Give "
                    f"more text, or at most {tokens:,} tokens.",
                    "tokens",
                )
            windows[f"{_TRAINED}/{text}"] = trained
            windows[f"{_HELD}/{text}"] = evaluated
        lengths = {window.shape[1] for window in windows.values()}
        if len(lengths) > 1:
            raise DataError(
                "a text has fewer tokens than a window. Give more text, or shorter windows.",
                "sequence_length",
            )
        return {name: windows[name].contiguous() for name in self._names()}


def _name_of(source: str) -> str:
    """Return the name by which a source's windows are kept and validated on."""
    return {SELF: "own", "": "text", "train_files": "text"}.get(source, source)


def _split(
    source: WindowSource, cutter: Any, count: int, held: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return at most `count` windows to train on and at most `held` to evaluate on."""
    if isinstance(source, TextFiles):
        source = replace(source, hold_out=True)
    if isinstance(source, TextFiles | StandardLibrary):
        return source.draw(cutter, count, seed), source.windows(cutter, "validation", held).ids
    drawn = source.draw(cutter, count + held, seed)
    is_held = torch.zeros(len(drawn), dtype=torch.bool)
    is_held[torch.arange(held) * len(drawn) // held] = True
    return drawn[~is_held], drawn[is_held]


@rank_zero_only
def _save(windows: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file, which appears when it is complete."""
    part = file.with_name(f".{file.name}.part")
    save_file(windows, part, metadata)
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


@dataclass
class _Progress:
    """The number of batches of the present epoch that were read."""

    read: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return `read`, the number of batches."""
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of batches."""
        self.read = state["read"]


class _ResumedLoader(DataLoader[Any]):
    """A loader that begins its next epoch behind the batches that were read, and counts on."""

    def __init__(self, *arguments: Any, progress: _Progress, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # An object, since Lightning makes another loader of these arguments for several processes.
        self.progress = progress
        self.state_dict, self.load_state_dict = progress.state_dict, progress.load_state_dict

    def __iter__(self) -> Any:
        # In an epoch's first read, not before: Lightning makes the iterator before it restores.
        progress = self.progress
        progress.read = skipped = progress.read if progress.read < len(self) else 0
        for batch in islice(super().__iter__(), skipped, None):
            progress.read += 1
            yield batch
        progress.read = 0
