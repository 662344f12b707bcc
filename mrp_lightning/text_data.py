"""Text as token windows: random ones to calibrate on, consecutive ones to train and evaluate on."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from mrp_lightning.embedded.standard_library import Split, standard_library
from mrp_lightning.errors import DataError, OptionError

_SEPARATOR = "\n\n"  # between documents, as SparseGPT joins WikiText2


class TextDataModule(LightningDataModule):
    """Token windows of equal length from files, a dataset, or the embedded text.

    Without `train_files`, `eval_files` and `dataset` the text is the source of the running Python's
    standard library, split into train, validation and test by a hash of each file's path.

    `predict` gives the calibration set: each window starts at a random place of a random training
    document; where the document ends too soon, the next ones follow it. `fit` gives the training
    documents cut into consecutive windows, shuffled. `validate` and `test` give the evaluation text
    joined and cut into consecutive windows, in order, the last partial one dropped.

    Args:
        train_files: Text files (a document each) or .jsonl files (a document a line, under
            `text_column`), for `predict` and `fit`.
        eval_files: The same, for `validate` and `test`.
        dataset: A Hugging Face dataset with the splits train, validation and test: its name or
            directory, the arguments of `datasets.load_dataset` (such as `path` and `data_files`),
            or a loaded `DatasetDict`. Where it has no test split, `test` reads validation.
        num_samples: Calibration windows.
        sequence_length: Tokens a window.
        batch_size: Windows a batch.
        seed: Of the calibration windows and of the training order.
        text_column: The text's key in .jsonl files and datasets.
        tokenizer: Directory or hub id of the tokenizer; by default that of the model.

    Raises:
        FileNotFoundError: Files that do not exist, all listed.
        OptionError: A number is not positive, or text comes from two places.
        DataError: Later, when the text is needed: it is too short for one window, the window is
            longer than the model's positions, or no tokenizer is known.
    """

    def __init__(
        self,
        train_files: Sequence[str] | str | None = None,
        eval_files: Sequence[str] | str | None = None,
        dataset: str | dict[str, Any] | None = None,
        *,
        num_samples: int = 128,
        sequence_length: int = 2048,
        batch_size: int = 1,
        seed: int = 0,
        text_column: str = "text",
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        counts = {
            "num_samples": num_samples,
            "sequence_length": sequence_length,
            "batch_size": batch_size,
        }
        if wrong := {name: n for name, n in counts.items() if n < 1}:
            raise OptionError(f"TextDataModule: expected positive numbers. Got {wrong}.")
        if dataset is not None and (train_files or eval_files):
            raise OptionError(
                "TextDataModule: give either `dataset` or `train_files`/`eval_files`, not both."
            )
        self.files: dict[str, list[Path]] = {
            "train_files": _paths(train_files),
            "eval_files": _paths(eval_files),
        }
        if missing := [
            f"`{key}`: {path}"
            for key, paths in self.files.items()
            for path in paths
            if not path.is_file()
        ]:
            raise FileNotFoundError("TextDataModule: no such file: " + ", ".join(missing))
        self.dataset = dataset
        self.num_samples, self.sequence_length = num_samples, sequence_length
        self.batch_size, self.seed = batch_size, seed
        self.text_column, self._tokenizer_source = text_column, tokenizer
        self.tokenizer: Any = None

    def setup(self, stage: str) -> None:
        """Find the tokenizer, and check the window against the model."""
        module = self.trainer.lightning_module if self.trainer else None
        if self._tokenizer_source is not None:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self._tokenizer_source)
        elif self.tokenizer is None:
            self.tokenizer = getattr(module, "tokenizer", None)
        if self.tokenizer is None:
            raise DataError(
                "TextDataModule has no tokenizer: the model comes without one. "
                "Name a directory or hub id with `data.tokenizer`."
            )
        config = getattr(getattr(module, "model", None), "config", None)
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and self.sequence_length > positions:
            raise DataError(
                f"`data.sequence_length` is {self.sequence_length}, but the model has only "
                f"{positions} positions (`max_position_embeddings`)."
            )

    def predict_dataloader(self) -> DataLoader[Tensor]:
        """The calibration windows (num_samples, sequence_length)."""
        return self._loader(self.calibration_windows(), shuffle=False)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """All training windows, shuffled anew in every epoch."""
        documents = [document + _SEPARATOR for document in self.documents("train")]
        return self._loader(self._cut(self._tokenize(documents), "train"), shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The windows of the validation split."""
        return self._loader(self.evaluation_windows("validation"), shuffle=False)

    def test_dataloader(self) -> DataLoader[Tensor]:
        """The windows of the test split."""
        return self._loader(self.evaluation_windows("test"), shuffle=False)

    def calibration_windows(self) -> Tensor:
        """Random windows of the training text (num_samples, sequence_length), int64."""
        documents = self.documents("train")
        draw = random.Random(self.seed)
        windows = []
        for _ in range(self.num_samples):
            first = draw.randrange(len(documents))
            tokens: list[int] = []
            for step in range(len(documents)):
                document = documents[(first + step) % len(documents)] + _SEPARATOR
                tokens += self.tokenizer(document, add_special_tokens=not tokens)["input_ids"]
                if len(tokens) >= self.sequence_length:
                    break
            else:
                raise self._too_short("train", len(tokens))
            start = draw.randrange(len(tokens) - self.sequence_length + 1)
            windows.append(tokens[start : start + self.sequence_length])
        return torch.tensor(windows)

    def evaluation_windows(self, split: Split) -> Tensor:
        """Consecutive windows of a split's joined text (windows, sequence_length), int64."""
        text = _SEPARATOR.join(self.documents(split))
        return self._cut(self.tokenizer(text, verbose=False)["input_ids"], split)

    def documents(self, split: Split) -> Sequence[str]:
        """The texts of one split.

        Raises:
            DataError: The source has no such split, or it is empty.
        """
        if self.dataset is not None:
            documents = self._of_dataset(split)
        elif any(self.files.values()):
            documents = self._of_files("train_files" if split == "train" else "eval_files")
        else:
            documents = list(standard_library(split))
        if not len(documents):
            raise DataError(f"TextDataModule: the {split} split is empty.")
        return documents

    def _of_files(self, key: str) -> list[str]:
        if not self.files[key]:
            raise DataError(f"TextDataModule: `data.{key}` is needed here, but none was given.")
        documents = []
        for path in self.files[key]:
            text = path.read_text(encoding="utf-8")
            if path.suffix != ".jsonl":
                documents.append(text)
                continue
            for number, line in enumerate(text.splitlines(), start=1):
                if line.strip():
                    documents.append(self._of_line(line, f"{path}, line {number}"))
        return documents

    def _of_line(self, line: str, where: str) -> str:
        try:
            return json.loads(line)[self.text_column]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"`data.{{train,eval}}_files`: {where} is not a JSON object with the key "
                f"{self.text_column!r} (`data.text_column`)."
            ) from error

    def _of_dataset(self, split: Split) -> Sequence[str]:
        splits: Any = {"path": self.dataset} if isinstance(self.dataset, str) else self.dataset
        if type(splits) is dict:  # a DatasetDict is a dict, too
            from datasets import load_dataset

            splits = load_dataset(**splits)
        name = "validation" if split == "test" and "test" not in splits else split
        if name not in splits:
            raise DataError(f"`data.dataset` has no split {name!r}; it has {sorted(splits)}.")
        if self.text_column not in splits[name].column_names:
            raise DataError(
                f"`data.dataset` has no column {self.text_column!r}; name one of "
                f"{splits[name].column_names} with `data.text_column`."
            )
        return splits[name][self.text_column]

    def _tokenize(self, documents: Sequence[str]) -> list[int]:
        encoded = self.tokenizer(list(documents), add_special_tokens=False, verbose=False)
        return [token for tokens in encoded["input_ids"] for token in tokens]

    def _cut(self, tokens: list[int], split: str) -> Tensor:
        num_windows = len(tokens) // self.sequence_length
        if not num_windows:
            raise self._too_short(split, len(tokens))
        kept = torch.tensor(tokens[: num_windows * self.sequence_length])
        return kept.view(num_windows, self.sequence_length)

    def _too_short(self, split: str, num_tokens: int) -> DataError:
        return DataError(
            f"TextDataModule: the {split} text has only {num_tokens} tokens, less than one window "
            f"of `data.sequence_length` {self.sequence_length}. Give more text or shorter windows."
        )

    def _loader(self, windows: Tensor, *, shuffle: bool) -> DataLoader[Tensor]:
        order = torch.Generator().manual_seed(self.seed) if shuffle else None
        # A tensor is a sequence of windows, though not by its type.
        dataset: Any = windows
        return DataLoader(dataset, batch_size=self.batch_size, shuffle=shuffle, generator=order)


def _paths(files: Sequence[str] | str | None) -> list[Path]:
    files = [files] if isinstance(files, str) else files or []
    return [Path(file).expanduser() for file in files]
