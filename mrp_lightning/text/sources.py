"""The sources of text: files, a dataset, Python's standard library, and published texts.

lab/paper.md gives the published texts, which are cut into windows by the protocol of SparseGPT.
"""

import hashlib
import os
import shlex
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from mrp_lightning.environment import extra, why_no_hub
from mrp_lightning.errors import DataError, first_line
from mrp_lightning.text.documents import (
    Conversation,
    divided,
    documents_of_files,
    files_of,
    no_bars,
)
from mrp_lightning.text.windows import (
    SEPARATOR,
    Cutter,
    Segments,
    Windows,
    segments_of_documents,
    segments_of_joined,
)
from mrp_lightning.upstream.other_names import hub_away

Split = Literal["train", "validation", "test"]
Bos = Literal["text", "window"]


class TextSource(ABC):
    """A text that is split into documents for training, validation and test.

    Attributes:
        name: The name of the text in reports.
        bos: Where BOS stands by default: before the whole text, or before each window.
    """

    name: str
    bos: Bos = "window"

    def documents(self, split: Split) -> Sequence[str]:
        """Return the documents of one split; raise a DataError if it is empty or no text."""
        documents = self._documents(split)
        if not any(document.strip() for document in documents):
            origin = f"{self.name}: " if self.name else ""
            raise DataError(
                f"{origin}the {self.label(split)} text is empty, or white space alone. Give one of "
                "some thousand words."
            )
        return documents

    def label(self, split: Split) -> str:
        """Return the name of a split's text in messages."""
        return split

    @abstractmethod
    def _documents(self, split: Split) -> Sequence[str]:
        """Read the documents of one split."""

    def local_files(self, split: Split) -> Sequence[Path]:  # noqa: ARG002
        """Return the files on this machine that hold one split; none of a text of the hub."""
        return ()

    def draw(self, cutter: Cutter, count: int, seed: int) -> Tensor:
        """Draw at most `count` random windows (windows, length) of train, int64; see `Cutter`."""
        documents, label = self.documents("train"), self.label("train")
        return cutter.within(documents, label).random(documents, count, seed, label)

    def windows(self, cutter: Cutter, split: Split, limit: int | None = None) -> Windows:
        """Cut the joined text of a split into consecutive windows, at most `limit`."""
        documents, label = self.documents(split), self.label(split)
        text = SEPARATOR.join(documents)
        return cutter.within(documents, label).consecutive(label, text, limit)


@dataclass(frozen=True)
class StandardLibrary(TextSource):
    """The source code of the running Python's standard library."""

    name: str = "Python's standard library"

    def _documents(self, split: Split) -> Sequence[str]:
        return list(standard_library(split))

    def local_files(self, split: Split) -> Sequence[Path]:
        """Return the source files of one split, sorted by path."""
        return list(_library_files(split))


def standard_library(split: Split) -> Iterator[str]:
    """Yield the source texts of one split, sorted by path.

    The SHA-256 of a file's path in the library decides its split, so that it is the same on every
    machine: 1 in 16 files is for testing, 1 in 16 for validation, the rest for training and
    calibration. Files that are empty or not UTF-8 are left out.
    """
    for path in _library_files(split):
        with suppress(UnicodeDecodeError):
            text = path.read_text(encoding="utf-8")
            if text.strip():
                yield text


def _library_files(split: Split) -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[Path] = []
    for directory, directories, names in os.walk(root):
        # These hold far more files than the library, and are not part of it.
        directories[:] = {*directories} - {"site-packages", "dist-packages"}
        paths += (Path(directory, name) for name in names if name.endswith(".py"))
    for path in sorted(paths):
        # `hash` of a string differs from process to process, and the number of a file from version
        # to version. A checksum of the path keeps each file in its split if others come or go.
        bucket = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()[0] % 16
        if split == {0: "test", 1: "validation"}.get(bucket, "train"):
            yield path


@dataclass(frozen=True, kw_only=True)
class TextFiles(TextSource):
    """Text from files: a document for each text file, line of a .jsonl file, or row of a table.

    Attributes:
        train: The files of the split train.
        evaluation: The files of the splits validation and test.
        column: The key of the text in .jsonl files, and its column in tables.
        hold_out: Whether every tenth document of `train` is held out as the text of validation and
            test; of fewer than 20 documents, the last tenth of each.
        conversation: Formats a conversation as text.
    """

    train: Sequence[Path] = ()
    evaluation: Sequence[Path] = ()
    column: str = "text"
    hold_out: bool = False
    conversation: Conversation | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        """The names of the first eight files to train on, without their directories."""
        names = [path.name for path in self.train]
        return ", ".join(names if len(names) <= _LISTED else [*names[:_LISTED], "…"])

    def of(self, split: Split) -> Sequence[Path]:
        """Return the files of a split."""
        return self.train if self._argument(split) == "train_files" else self.evaluation

    def local_files(self, split: Split) -> Sequence[Path]:
        """Return the files of a split; raise a DataError if there are none."""
        if not (files := self.of(split)):
            problem = "this stage reads text, and was given none. Name files."
            raise DataError(problem, self._argument(split))
        return files

    def _argument(self, split: Split) -> str:
        return "train_files" if split == "train" or self.hold_out else "eval_files"

    def label(self, split: Split) -> str:
        """Return the name of a split's text in messages."""
        if not self.hold_out:
            return split
        return "calibration" if split == "train" else "held-out"

    def _documents(self, split: Split) -> Sequence[str]:
        files, argument = self.local_files(split), self._argument(split)
        texts = documents_of_files(files, self.column, argument, self.conversation)
        if not self.hold_out:
            return texts
        return divided(texts)[split != "train"]


_LISTED = 8  # files by name


@dataclass(frozen=True)
class DatasetText(TextSource):
    """The splits of a Hugging Face dataset; each document is read when it is indexed.

    Attributes:
        dataset: A name or directory, arguments of `datasets.load_dataset`, or a `DatasetDict`.
        column: The column of the text.
    """

    dataset: Any
    column: str

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name or path of the dataset, or "a dataset" for a loaded one."""
        return str((self._arguments or {}).get("path", "a dataset"))

    def local_files(self, split: Split) -> Sequence[Path]:  # noqa: ARG002
        """Return all files of a dataset on this machine, since its builder decides their splits."""
        if (arguments := self._arguments) is None:
            return ()
        names = _strings([arguments.get(key) for key in ("path", "data_dir", "data_files")])
        paths = [Path(name).expanduser() for name in names]
        # A directory may hold files of any kind, which its builder reads; `files_of` expands
        # wildcards, and finds nothing for a name on the hub.
        files = [
            f for path in paths for f in (path.rglob("*") if path.is_dir() else files_of(path))
        ]
        return sorted(file for file in files if file.is_file())

    @property
    def _arguments(self) -> dict[str, Any] | None:
        """The arguments of `load_dataset`; `None` for a loaded `DatasetDict`, which is a dict."""
        arguments = {"path": self.dataset} if isinstance(self.dataset, str) else self.dataset
        return arguments if type(arguments) is dict else None

    def _documents(self, split: Split) -> Sequence[str]:
        splits = self.dataset if self._arguments is None else _loaded(self._arguments)
        if not isinstance(splits, dict):
            raise DataError(
                "expected splits by name, as in a `DatasetDict`. Got a "
                f"{type(splits).__name__}. Leave out `split`, or give {{'train': …, 'test': …}} as "
                "a `datasets.DatasetDict`.",
                "dataset",
            )
        # Many data sets publish no test split. The reverse stays an error: a test split that stood
        # in for validation would be read before the test.
        name = "validation" if split == "test" and "test" not in splits else split
        if name not in splits:
            raise DataError(f"there is no split {name!r}, but {sorted(splits)}.", "dataset")
        if self.column not in splits[name].column_names:
            raise DataError(
                f"the dataset has no column {self.column!r}. Name one of "
                f"{splits[name].column_names}.",
                "text_column",
            )
        return splits[name][self.column]


def _strings(values: Any) -> Iterator[str]:
    """Yield the strings in nested lists and mappings."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _strings(value)


def _loaded(arguments: dict[str, Any]) -> Any:
    """Call `datasets.load_dataset`, which falls back to its cache if the hub cannot be reached."""
    with extra("data", "`dataset`"):
        from datasets import load_dataset
    source = arguments.get("path")
    is_here = Path(str(source)).expanduser().exists() or "data_files" in arguments
    away = None if is_here else why_no_hub()
    try:
        with hub_away() if away else nullcontext():
            return load_dataset(**arguments)
    except Exception as error:  # of many types, also those of the libraries that download files
        raise DataError(
            f"{source} cannot be loaded ({away or first_line(error)}). Check the name, or fetch it "
            "where there is a network; or give files in `train_files` and `eval_files`, or let the "
            "model write the text (`calibration: self`).",
            "dataset",
        ) from error


@dataclass(frozen=True, kw_only=True)
class PublishedText(TextSource):
    """A dataset repository of the Hugging Face hub, read by the protocol of SparseGPT.

    Attributes:
        repository: Its owner and name on the hub.
        revision: The commit that is read, or a branch if the papers name no commit.
        column: The column of the text.
        train: The files in the repository from which calibration windows are drawn.
        test: The files on which perplexity is measured; empty if none.
        segments: The function that draws calibration windows.
        separator: The string that joins the documents of `test`, which are tokenized as one text.
        num_documents: Number of documents of `test` that are read, from the first; `None` for all.
        num_windows: Number of windows of `test` that are evaluated, from the first; `None` for all.
        directory: The directory of local copies; `None` for the hub and its cache.
    """

    name: str
    repository: str
    revision: str
    column: str
    train: tuple[str, ...]
    test: tuple[str, ...] = ()
    segments: Segments = segments_of_documents
    separator: str = " "
    num_documents: int | None = None
    num_windows: int | None = None
    directory: Path | None = None
    bos: Bos = "text"

    def _documents(self, split: Split) -> Sequence[str]:
        paths = [str(path) for path in find_files([self], split)]
        with extra("data", "Reading published texts"):
            from datasets import load_dataset
            from datasets.exceptions import DatasetsError
        builder = "parquet" if paths[0].endswith(".parquet") else "json"
        listed = ", ".join(paths)
        try:
            with no_bars():
                table = load_dataset(builder, data_files=paths, split="train")
        except (DatasetsError, ValueError, EOFError) as error:
            raise DataError(
                f"{self.name}: {listed} cannot be read as {builder}. Download it again. ({error})"
            ) from error
        if self.column not in table.column_names:
            raise DataError(
                f"{self.name}: expected the column {self.column!r} in {listed}, as "
                f"{self.repository} has it. Got {table.column_names}."
            )
        documents = table[self.column]
        is_part = split != "train" and self.num_documents is not None
        return documents[: self.num_documents] if is_part else documents

    def draw(self, cutter: Cutter, count: int, seed: int) -> Tensor:
        """Draw at most `count` random windows (windows, length), int64, as SparseGPT does."""
        # Not `Cutter.within`: the protocol has windows of the full length, or none.
        return cutter.random(self.documents("train"), count, seed, self.name, self.segments)

    def windows(self, cutter: Cutter, split: Split, limit: int | None = None) -> Windows:
        """Cut the joined text into consecutive windows, at most `num_windows` and `limit`."""
        text = self.separator.join(self.documents(split))
        limits = [each for each in (self.num_windows, limit) if each is not None]
        return cutter.consecutive(self.name, text, min(limits, default=None))

    def local_files(self, split: Split) -> Sequence[Path]:
        """Return the local copies in `directory`; none of a text from the hub."""
        return [] if self.directory is None else find_files([self], split)

    def path_of(self, file: str) -> Path:
        """Return the local path of a file, downloaded if need be; an `OSError` if there is none."""
        # A given directory is complete or an error: one run never mixes two copies.
        if self.directory is not None:
            for folder in (self.repository, self.name):
                if (copy := self.directory / folder / file).is_file():
                    return copy
            raise FileNotFoundError(f"no {self.directory / self.repository / file}")
        from huggingface_hub import hf_hub_download

        away = why_no_hub() is not None
        options: dict[str, Any] = {"revision": self.revision, "local_files_only": away}
        return Path(hf_hub_download(self.repository, file, repo_type="dataset", **options))


def find_files(texts: Iterable[PublishedText], split: Split) -> list[Path]:
    """Return the local paths of a split's files of published texts, downloaded if need be.

    The message of a FileNotFoundError gives the commands that download what is missing.
    """
    paths: list[Path] = []
    commands: dict[PublishedText, list[str]] = {}
    reasons: list[OSError] = []
    # All files are tried before the first error, so that one message has every command.
    for text in texts:
        for file in text.train if split == "train" else text.test:
            try:
                paths.append(text.path_of(file))
            except OSError as error:
                commands.setdefault(text, ["hf", "download", text.repository]).append(file)
                reasons.append(error)
    if not commands:
        return paths
    for text, command in commands.items():
        command += ["--repo-type", "dataset", "--revision", text.revision]
        if text.directory is not None:
            command += ["--local-dir", str(text.directory / text.repository)]
    names = ", ".join(text.name for text in commands)
    download = " && ".join(map(shlex.join, commands.values()))
    problem = f"`corpora_dir`: {text.directory} lacks files of {names}. Download them: {download}"
    if text.directory is None:
        problem = (
            f"The hub did not give the files of {names}. Download them where there is a network: "
            f"{download}. Copies elsewhere (`--local-dir DIR/OWNER/NAME`) are found with "
            f"`corpora_dir: DIR`. ({why_no_hub() or reasons[0]})"
        )
    raise FileNotFoundError(problem) from reasons[0]


_WIKITEXT2 = PublishedText(
    name="wikitext2",
    repository="Salesforce/wikitext",
    revision="b08601e04326c79dfdd32d625aee71d232d685c3",
    column="text",
    train=("wikitext-2-raw-v1/train-00000-of-00001.parquet",),
    test=("wikitext-2-raw-v1/test-00000-of-00001.parquet",),
    segments=segments_of_joined,
    separator="\n\n",
)
_PTB = PublishedText(
    name="ptb",
    repository="ptb-text-only/ptb_text_only",
    revision="refs/convert/parquet",
    column="sentence",
    train=("penn_treebank/train/0000.parquet",),
    test=("penn_treebank/test/0000.parquet",),
    segments=segments_of_joined,
)
_C4 = PublishedText(
    name="c4",
    repository="allenai/c4",
    revision="607bd4c8450a42878aa9ddc051a65a055450ef87",
    column="text",
    train=("en/c4-train.00000-of-01024.json.gz",),
    test=("en/c4-validation.00000-of-00008.json.gz",),
    num_documents=1100,
    num_windows=256,
)
_LAMBADA = PublishedText(  # the paper measures it as a zero-shot task
    name="lambada",
    repository="cimec/lambada",
    revision="main",
    column="text",
    train=("plain_text/train-00000-of-00002.parquet", "plain_text/train-00001-of-00002.parquet"),
)

PUBLISHED = {text.name: text for text in (_WIKITEXT2, _PTB, _C4, _LAMBADA)}
CALIBRATION = sorted(PUBLISHED)
EVALUATION = sorted(name for name, text in PUBLISHED.items() if text.test)
