"""Calibration and evaluation data from texts, as a LightningDataModule."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from mrp_lightning.data.own_text import own_windows, writer_of
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.loop.distributed import one_share_each
from mrp_lightning.models.skeleton import longest_sequence
from mrp_lightning.models.tokenizers import load_tokenizer
from mrp_lightning.text.mixture import GIVEN, SELF, Mixture, NamedTexts, interleaved
from mrp_lightning.text.published import EVALUATION
from mrp_lightning.text.sources import GivenText, Split
from mrp_lightning.text.windows import SEPARATOR, Cutter, Windows
from mrp_sparse.arguments import checked

_Path = str | os.PathLike[str]
_USUAL_LENGTH = 2048  # tokens a window, in the papers


class TextDataModule(LightningDataModule):
    """Token windows of equal length: published texts, a dataset, files, or the model's own text.

    * `calibration` and `evaluation` name published texts, read by the protocol of SparseGPT
      (docs/data.md): `predict` draws pieces of single documents, `validate` and `test` cut each
      evaluation text into consecutive windows, and give a dictionary of dataloaders.
    * With `dataset` or files, `predict` starts each window at a random place of a random training
      document; if the document ends too soon, the next documents follow it. `fit` shuffles
      consecutive windows of the training documents; `validate` and `test` cut the evaluation text
      into consecutive windows. Without any of these arguments the text is the source of the running
      Python's standard library, split by a hash of each file's path.
    * With `calibration="self"`, the model that `predict` runs writes the windows itself before it
      is pruned, drawn from its own distribution. The windows are kept beside the pruned model
      (docs/self-calibration.md).

    Consecutive windows do not overlap, and the last partial one is dropped.

    Most windows start in the middle of a text and so lack the BOS of its start, which some families
    need. So the tokens that the tokenizer puts before a text are put before each window
    (`bos="window"`), except where a published protocol is followed. They count towards the
    `sequence_length` that the model reads, but neither they nor the first token after them are
    predicted: a batch for training or evaluation is then a mapping of `input_ids` and `labels`,
    with −100 for these tokens. If the tokenizer puts nothing before a text, `bos` has no effect.

    Args:
        train_files: UTF-8 text files (a document each) or .jsonl files (a document a line, under
            `text_column`), for `predict` and `fit`.
        eval_files: Files of the same kinds, for `validate` and `test`.
        dataset: A Hugging Face dataset with the splits train, validation and test: its name or
            directory, the arguments of `datasets.load_dataset` (such as `path` and `data_files`),
            or a loaded `DatasetDict`. Where it has no test split, `test` reads validation.
        calibration: The text for `predict`: a published one (c4, lambada, ptb, wikitext2); `self`,
            the model's own text; `stdlib`, Python's standard library; or a file. A mapping gives
            several of these their shares of the windows, such as `{self: 0.5, c4: 0.5}`, where
            `train_files` and `dataset` stand for what those arguments give.
        evaluation: Texts for `validate` and `test`: published ones (c4, ptb, wikitext2) and
            `stdlib`; or, by the name that results give to each, one of these or a file, such as
            `{code: stdlib, mine: test.txt}`.
        corpora_dir: Directory with local copies of the published texts, in the paths of their
            repositories (`allenai/c4/en/…`); nothing is fetched then. By default they come from
            the hub or, with `HF_HUB_OFFLINE=1`, from its cache.
        num_samples: Number of calibration windows.
        sequence_length: Tokens of a window, which is the context that perplexity is measured at. By
            default 2048, or the most that the model can read, if that is less.
        bos: Whether the tokens that the tokenizer puts before a text, usually BOS, are put once at
            the start of each text that is cut into windows (`text`, the default for the published
            texts, as in SparseGPT), or before every window (`window`, the default otherwise).
        batch_size: Windows a batch.
        seed: Seed of the draws of calibration windows, and of the order in which `fit` reads.
        text_column: Key of the text in .jsonl files, and its column in datasets.
        tokenizer: A tokenizer, or the directory or hub id of one; by default that of the model.

    Raises:
        FileNotFoundError: Files do not exist; it lists all. Published texts are looked for in
            `setup`; then it gives the commands that download them.
        OptionError: A value is of another type, a number is too small, text comes from two
            places, or a published text is unknown.
        DataError: Files are tables, such as JSON or CSV, and no text; or, raised in `setup` or when
            windows are made, no tokenizer is known, windows are longer than the model can read, or
            the text is too short for a window, or for that many.
    """

    @checked
    def __init__(
        self,
        train_files: Sequence[_Path] | _Path | None = None,
        eval_files: Sequence[_Path] | _Path | None = None,
        dataset: str | dict[str, Any] | None = None,
        *,
        calibration: dict[str, float] | str | None = None,
        evaluation: dict[str, str] | Sequence[str] | str | None = None,
        corpora_dir: _Path | None = None,
        num_samples: int = 128,
        sequence_length: int | None = None,
        bos: Literal["text", "window"] | None = None,
        batch_size: int = 1,
        seed: int = 0,
        text_column: str = "text",
        tokenizer: _Path | PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__()
        if bos not in (None, "text", "window"):
            raise OptionError(f"`data.bos` must be text or window. Got {bos!r}.")
        least = {"num_samples": (num_samples, 1), "batch_size": (batch_size, 1)}
        if sequence_length is not None:
            least["sequence_length"] = sequence_length, 2  # one is to be predicted
        if wrong := [
            f"`data.{name}` must be at least {few}; got {count}."
            for name, (count, few) in least.items()
            if count < few
        ]:
            raise OptionError(" ".join(wrong))
        self.calibration = calibration
        self.corpora_dir = Path(corpora_dir).expanduser() if corpora_dir is not None else None
        self._named = NamedTexts(calibration, evaluation, self.corpora_dir, text_column)
        self.evaluation = self._named.evaluation
        self.bos, self._given_bos = bos or self._named.bos, bos
        files = {"train_files": _paths(train_files), "eval_files": _paths(eval_files)}
        given: dict[str, Any] = {**files, "dataset": dataset}
        self._named.refuse_contradictions({name for name, text in given.items() if text})
        self._given = GivenText(**given, column=text_column)
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.sequence_length = sequence_length or _USUAL_LENGTH
        self._fits_model = sequence_length is None
        self._tokenizer: Any = tokenizer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that was given, or else that of the model that the trainer now runs."""
        if isinstance(self._tokenizer, str | os.PathLike):
            self._tokenizer = load_tokenizer(self._tokenizer)
        if self._tokenizer is not None:
            return self._tokenizer
        module = self.trainer.lightning_module if self.trainer else None
        return getattr(module, "tokenizer", None)

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def setup(self, stage: str) -> None:
        """Find the published texts, and fit the windows to the model.

        Args:
            stage: What the trainer is going to do: `fit`, `validate`, `test` or `predict`.

        Raises:
            DataError: Windows are longer than the model can read, or the stage has no text.
            FileNotFoundError: Files of published texts are missing; it gives the commands that
                download them.
        """
        module = self.trainer.lightning_module if self.trainer else None
        config = getattr(getattr(module, "model", None), "config", None)
        limit = longest_sequence(config) if isinstance(config, PreTrainedConfig) else None
        if self._fits_model:
            self.sequence_length = min(_USUAL_LENGTH, limit or _USUAL_LENGTH)
        elif limit is not None and self.sequence_length > limit:
            raise DataError(
                f"`data.sequence_length` is {self.sequence_length}, but the model's configuration "
                f"has only {limit} positions. Write `sequence_length: {limit}` or less."
            )
        if stage == "predict" and self._named.mixture is not None:
            self._named.mixture.counts(self.num_samples)
            if SELF in self._named.mixture:
                writer_of(self.trainer)
        if self._named.are_read(stage):
            self._named.locate(stage)
        elif not self._given.is_given:
            rank_zero_info(
                f"No text was given: `{getattr(stage, 'value', stage)}` reads the source code of "
                "Python's standard library. Other text is named by `data.train_files` and "
                "`data.eval_files`, `data.dataset`, or `data.calibration` and `data.evaluation`. "
                "With `data.calibration: self` the model writes the text to calibrate on itself."
            )

    @property
    def calibration_source(self) -> str:
        """The name of the text to calibrate on; of files their names without their directories."""
        return str(self._named.mixture or self._given.train_name)

    def predict_dataloader(self) -> DataLoader[Any]:
        """The calibration windows, in the order in which they were drawn."""
        return self._loader(self.calibration_windows())

    def train_dataloader(self) -> DataLoader[Any]:
        """All training windows, shuffled anew in every epoch."""
        windows = self._cutter("train").consecutive("train", self.documents("train"))
        return self._loader(windows, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any] | dict[str, DataLoader[Any]]:
        """The windows of the validation split, or of each published text."""
        return self._evaluation_loaders("validation")

    def test_dataloader(self) -> DataLoader[Any] | dict[str, DataLoader[Any]]:
        """The windows of the test split, or of each published text."""
        return self._evaluation_loaders("test")

    def _evaluation_loaders(self, split: Split) -> DataLoader[Any] | dict[str, DataLoader[Any]]:
        if not self._named.by_protocol:
            return self._loader(self._windows_of(split))
        return {
            name: self._loader(
                self._cutter(text).consecutive(text, *self._named.evaluation_text(text))
            )
            for name, text in self.evaluation.items()
        }

    def calibration_windows(self) -> Tensor:
        """The windows to calibrate on (num_samples, sequence_length), int64.

        They are drawn at random; those of several sources are evenly spread. All of several
        processes call it where the model writes some of them.

        Raises:
            DataError: A text is too short for a window, or for so many; or the model would have to
                write its own, and there is no trainer that runs it, or it writes nothing of use.
        """
        mixture = self._named.mixture or Mixture({GIVEN[0]: 1.0})
        counts = mixture.counts(self.num_samples)
        return interleaved([self._drawn(source, count) for source, count in counts.items()])

    def _drawn(self, source: str, count: int) -> Tensor:
        """Random windows of a source of the mixture, with their prefix."""
        if source == SELF:
            return own_windows(self.trainer, self.tokenizer, self.sequence_length, self.seed, count)
        cutter = Cutter.of(self.tokenizer, self.sequence_length, self.bos)
        if source in GIVEN:
            return cutter.random(self.documents("train"), count, self.seed)
        return self._named.windows(source, cutter, count, self.seed)

    def evaluation_windows(self, split: Split) -> Tensor:
        """Consecutive windows of a split's joined text (windows, sequence_length), int64.

        Args:
            split: Name of the split: train, validation or test.

        Raises:
            DataError: There is no such split, or it is too short for a window.
        """
        return self._windows_of(split).ids

    def _windows_of(self, split: Split) -> Windows:
        return self._cutter(split).consecutive(split, SEPARATOR.join(self.documents(split)))

    def _cutter(self, text: str) -> Cutter:
        """What cuts a text to evaluate or train on: BOS is where its protocol has it, if any."""
        bos = self._given_bos or ("text" if text in EVALUATION else "window")
        # Only now: a checkpoint that Lightning restores after `setup` may hold the tokenizer.
        return Cutter.of(self.tokenizer, self.sequence_length, bos)

    def documents(self, split: Split) -> Sequence[str]:
        """The texts of one split of the dataset, the files or the embedded text.

        Args:
            split: Name of the split: train, validation or test.

        Raises:
            DataError: The source has no such split, or it is empty.
        """
        if self._named.by_protocol and not (split == "train" and self._named.mixture):
            raise DataError(
                "TextDataModule: what `data.calibration` and `data.evaluation` name has no splits. "
                "Name the text of the other use, too; or give `data.dataset` or files instead."
            )
        return self._given.documents(split)

    def _loader(self, windows: Any, shuffle: bool = False) -> DataLoader[Any]:
        if shuffle:
            order = torch.Generator().manual_seed(self.seed)
            return DataLoader(windows, batch_size=self.batch_size, shuffle=True, generator=order)
        share = one_share_each(windows, self.trainer)
        return DataLoader(windows, batch_size=self.batch_size, sampler=share)


def _paths(files: Sequence[_Path] | _Path | None) -> tuple[Path, ...]:
    files = [files] if isinstance(files, str | os.PathLike) else files or []
    return tuple(Path(file).expanduser() for file in files)


_DOCUMENTS = 20  # from so many on, whole ones are held out


class HeldOutText(TextDataModule):
    """A `TextDataModule` that evaluates on a part of its `train_files`, and calibrates on the rest.

    Every tenth document is held out or, where there are few, the last tenth of each.
    """

    def documents(self, split: Split) -> Sequence[str]:
        """The texts of one split.

        Args:
            split: `train` is what is calibrated on; the other two are what is held out.

        Raises:
            DataError: The files are empty, or no text.
        """
        texts, is_training = super().documents("train"), split == "train"
        if len(texts) >= _DOCUMENTS:
            return [text for i, text in enumerate(texts) if (i % 10 != 9) == is_training]
        cuts = [_cut(text) for text in texts]
        return [t[:cut] if is_training else t[cut:] for t, cut in zip(texts, cuts, strict=True)]


def _cut(text: str) -> int:
    """Where the last tenth of a text begins: at a line, if one begins there."""
    place = len(text) * 9 // 10
    line = text.find("\n", place) + 1
    return line if 0 < line < len(text) - len(text) // 20 else place
