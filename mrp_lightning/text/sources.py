"""The documents of text files and datasets, or of the embedded text."""

import hashlib
import json
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from mrp_lightning.environment import extra, why_no_hub
from mrp_lightning.errors import DataError, first_line
from mrp_lightning.upstream.other_names import hub_away

Split = Literal["train", "validation", "test"]


def standard_library(split: Split) -> Iterator[str]:
    """The source files of one split, sorted by path.

    The SHA-256 of a file's path in the library decides its split, so that it is the same on every
    machine: 1 in 16 files is for testing, 1 in 16 for validation, the rest for training and
    calibration. Files that are empty or not UTF-8 are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if "site-packages" in relative.parts or "dist-packages" in relative.parts:
            continue
        if _split_of(relative.as_posix()) != split:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield text


def _split_of(relative: str) -> Split:
    bucket = hashlib.sha256(relative.encode()).digest()[0] % 16
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


_TABLES = {".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""Files that are no text as they are, and what `datasets` reads them as."""


@dataclass(frozen=True, kw_only=True)
class GivenText:
    """A text in splits: a dataset, or existing files; without either, the standard library."""

    train_files: Sequence[Path]  # text or .jsonl files of the split train
    eval_files: Sequence[Path]  # those of the splits validation and test
    dataset: Any
    """A name or directory, arguments of `datasets.load_dataset`, a `DatasetDict`, or `None`."""
    column: str  # of the text in a dataset, and its key in .jsonl files

    def __post_init__(self) -> None:
        files = {"train_files": self.train_files, "eval_files": self.eval_files}
        if missing := [
            f"`{key}`: {path}" + " is a directory; name files" * path.is_dir()
            for key, paths in files.items()
            for path in paths
            if not path.is_file()
        ]:
            raise FileNotFoundError("TextDataModule: no such file: " + ", ".join(missing))
        if tables := [(key, path) for key, paths in files.items() for path in paths if _kind(path)]:
            key, first = tables[0]
            split = "train" if key == "train_files" else "test"
            asked = {"path": _kind(first), "data_files": {split: str(first)}}
            asked |= {"sep": "\t"} if first.suffix.lower() == ".tsv" else {}
            named = ", ".join(f"`data.{key}`: {path}" for key, path in tables)
            raise DataError(
                f"{named}: this is no text, but holds text between commas, quotes or brackets. "
                "Give text files (such as .txt), .jsonl files with a text a line under the key "
                f"{self.column!r} (`data.text_column`), or a dataset, such as `data.dataset: "
                f"{json.dumps(asked)}` with `data.text_column`."
            )

    @property
    def is_given(self) -> bool:
        """Whether it is the user's; the standard library is not."""
        return self.dataset is not None or bool(self.train_files or self.eval_files)

    @property
    def train_name(self) -> str:
        """The name of the split train for people who read of it."""
        if isinstance(self.dataset, dict):
            return str(self.dataset.get("path", "a dataset"))
        if self.dataset is not None:
            return self.dataset if isinstance(self.dataset, str) else "a dataset"
        names = ", ".join(path.name for path in self.train_files)
        return names or "Python's standard library"

    def documents(self, split: Split) -> Sequence[str]:
        """The documents of one split.

        Raises:
            DataError: There is no such split, or it is empty, or it does not hold text.
        """
        documents: Sequence[str]
        if self.dataset is not None:
            documents = documents_of_dataset(self.dataset, split, self.column)
        elif self.train_files or self.eval_files:
            is_training = split == "train"
            paths = self.train_files if is_training else self.eval_files
            if not paths:
                key = "train_files" if is_training else "eval_files"
                raise DataError(f"TextDataModule: `data.{key}` is needed here, but was not given.")
            documents = documents_of_files(paths, self.column)
        else:
            documents = list(standard_library(split))
        if not any(document.strip() for document in documents):
            raise DataError(f"TextDataModule: the {split} split is empty, or white space alone.")
        return documents


def _kind(path: Path) -> str | None:
    return _TABLES.get(path.suffix.lower())


def documents_of_files(paths: Sequence[Path], column: str) -> list[str]:
    """The documents of UTF-8 files: each text file, and the text of each line of a .jsonl file.

    Raises:
        DataError: A file is not UTF-8 text, with the offset of the first byte that is none; or it
            is JSON as a whole; or a line is no JSON object with a text under the key `column`.
    """
    documents = []
    for path in paths:
        text = _text_of(path)
        if path.suffix != ".jsonl":
            if _is_json(text):
                raise DataError(
                    f"`data.{{train,eval}}_files`: {path} is JSON, and would be read with its "
                    "brackets and quotes. Give its texts as a .jsonl file, an object a line with "
                    f"the text under the key {column!r} (`data.text_column`)."
                )
            documents.append(text)
            continue
        # str.splitlines would also cut at U+2028 and others, which JSON allows inside a string.
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                documents.append(_of_line(line, column, f"{path}, line {number}"))
    return documents


def _text_of(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _no_utf8(path, error.start, error.object[error.start], error.reason) from error
    if "\0" in text:  # UTF-8 allows it, but no text has it
        raise _no_utf8(path, path.read_bytes().index(0), 0, "as in binary files and UTF-16")
    return text


def _is_json(text: str) -> bool:
    """Whether a text is a JSON array or object, or lines of such: the first line tells that."""
    start = text.lstrip()
    first_line = start.partition("\n")[0]
    for part, opening in ((first_line, "{"), (start, ("[", "{"))):
        if part.startswith(opening):
            with suppress(ValueError, RecursionError):
                return bool(json.loads(part))
    return False


def _no_utf8(path: Path, offset: int, byte: int, reason: str) -> DataError:
    return DataError(
        f"`data.{{train,eval}}_files`: {path} must be UTF-8 text. The byte at offset {offset:,} is "
        f"0x{byte:02x} ({reason}). Convert the file (iconv -f latin1 -t utf-8, if it is Latin-1), "
        "or leave it out."
    )


def _of_line(line: str, column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _no_text(where, column, f"{shorten(line, 60)} ({error})") from error
    if not isinstance(row, dict):
        raise _no_text(where, column, shorten(line, 60))
    if column not in row:
        raise _no_text(where, column, f"the keys {sorted(row)}")
    if not isinstance(row[column], str):
        raise _no_text(where, column, f"{type(row[column]).__name__} there")
    return row[column]


def _no_text(where: str, column: str, got: str) -> DataError:
    return DataError(
        f"`data.{{train,eval}}_files`: {where} is not a JSON object with a text under the key "
        f"{column!r} (`data.text_column`). Got {got}."
    )


def _loaded(arguments: dict[str, Any]) -> Any:
    """What `datasets.load_dataset` gives; where the hub is away, from its cache and at once."""
    with extra("data", "`data.dataset`"):
        from datasets import load_dataset
    source = arguments.get("path")
    is_here = Path(str(source)).expanduser().exists() or "data_files" in arguments
    away = None if is_here else why_no_hub()
    try:
        with hub_away() if away else nullcontext():
            return load_dataset(**arguments)
    except Exception as error:  # of each builder, and of whichever library fetches its files
        raise DataError(
            f"`data.dataset`: {source} cannot be loaded ({away or first_line(error)}). Check the "
            "name, or fetch it where there is a network; or give files in `data.train_files` and "
            "`data.eval_files`, or let the model write the text (`data.calibration: self`)."
        ) from error


def documents_of_dataset(dataset: Any, split: Split, column: str) -> Sequence[str]:
    """The documents of one split of a dataset; each is read when it is asked for.

    `dataset` is as in `GivenText`; validation stands in for a missing test split.

    Raises:
        DataError: It cannot be loaded, has no such split or column, or is one split alone.
    """
    splits: Any = {"path": dataset} if isinstance(dataset, str) else dataset
    if type(splits) is dict:  # a DatasetDict is a dict, too
        splits = _loaded(splits)
    if not isinstance(splits, dict):
        raise DataError(
            "`data.dataset` must have its splits by name, as a `DatasetDict`; got a "
            f"{type(splits).__name__}. Leave out `split`, or give {{'train': …, 'test': …}} as a "
            "`datasets.DatasetDict`."
        )
    name = "validation" if split == "test" and "test" not in splits else split
    if name not in splits:
        raise DataError(f"`data.dataset` has no split {name!r}; it has {sorted(splits)}.")
    if column not in splits[name].column_names:
        raise DataError(
            f"`data.dataset` has no column {column!r}; name one of "
            f"{splits[name].column_names} with `data.text_column`."
        )
    return splits[name][column]
