"""The published texts of the paper, as token windows by the protocol of SparseGPT.

docs/data.md gives the sources.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from mrp_lightning.environment import extra, why_no_hub
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.text.windows import (
    Cutter,
    check_amount,
    segments_of_documents,
    segments_of_text,
    tokenize,
)


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """The documents of a corpus that are read for one use, and how they are joined."""

    files: tuple[str, ...]  # their paths in the repository
    separator: str | None
    """Text between the documents, which are joined and tokenized as one text; `None` where windows
    are drawn from single documents."""
    documents: int | None = None  # how many are read, from the first; all if `None`
    windows: int | None = None  # how many are kept, from the first; all if `None`


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A dataset repository of the Hugging Face hub, and the protocol of SparseGPT for it."""

    name: str  # in configurations and results
    repository: str  # owner and name on the hub
    revision: str  # a commit; a branch where no public source names one
    column: str  # holds the text
    calibration: Excerpt  # what calibration windows are drawn from
    evaluation: Excerpt | None  # what perplexity is measured on, if it is


_WIKITEXT2 = Corpus(
    name="wikitext2",
    repository="Salesforce/wikitext",
    revision="b08601e04326c79dfdd32d625aee71d232d685c3",
    column="text",
    calibration=Excerpt(files=("wikitext-2-raw-v1/train-00000-of-00001.parquet",), separator=" "),
    evaluation=Excerpt(files=("wikitext-2-raw-v1/test-00000-of-00001.parquet",), separator="\n\n"),
)
_PTB = Corpus(
    name="ptb",
    repository="ptb-text-only/ptb_text_only",
    revision="refs/convert/parquet",
    column="sentence",
    calibration=Excerpt(files=("penn_treebank/train/0000.parquet",), separator=" "),
    evaluation=Excerpt(files=("penn_treebank/test/0000.parquet",), separator=" "),
)
_C4 = Corpus(
    name="c4",
    repository="allenai/c4",
    revision="607bd4c8450a42878aa9ddc051a65a055450ef87",
    column="text",
    calibration=Excerpt(files=("en/c4-train.00000-of-01024.json.gz",), separator=None),
    evaluation=Excerpt(
        files=("en/c4-validation.00000-of-00008.json.gz",),
        separator=" ",
        documents=1100,
        windows=256,
    ),
)
_LAMBADA = Corpus(
    name="lambada",
    repository="cimec/lambada",
    revision="main",
    column="text",
    calibration=Excerpt(
        files=(
            "plain_text/train-00000-of-00002.parquet",
            "plain_text/train-00001-of-00002.parquet",
        ),
        separator=None,
    ),
    evaluation=None,  # the paper measures it as a zero-shot task
)

CORPORA = {corpus.name: corpus for corpus in (_WIKITEXT2, _PTB, _C4, _LAMBADA)}
CALIBRATION = sorted(CORPORA)
EVALUATION = sorted(name for name, corpus in CORPORA.items() if corpus.evaluation)


@dataclass(frozen=True)
class PublishedTexts:
    """The published texts on this machine."""

    directory: Path | None  # that of copies; `None` for the hub and its cache

    def locate(self, names: Iterable[str], use: str) -> None:
        """Find, or fetch, what is read of some texts for `calibration` or `evaluation`.

        Raises:
            FileNotFoundError: Files are missing; it gives the commands that download them.
        """
        corpora = [CORPORA[name] for name in names]
        locate([(corpus, getattr(corpus, use)) for corpus in corpora], self.directory)

    def windows(self, name: str, cutter: Cutter, count: int, seed: int) -> Tensor:
        """Random windows (count, length) of a text to calibrate on, int64.

        Raises:
            DataError: It is too short for a window, or for so many.
        """
        corpus, excerpt = CORPORA[name], CORPORA[name].calibration
        documents, draws = self._documents(corpus, excerpt), cutter.draws(count, seed)
        check_amount(documents, cutter.tokenizer, draws, name)
        if excerpt.separator is None:
            windows = segments_of_documents(documents, cutter.tokenizer, draws, name)
        else:
            tokens = tokenize(cutter.tokenizer, excerpt.separator.join(documents))
            windows = segments_of_text(tokens, draws, name)
        return cutter.after_prefix(windows)

    def evaluation_text(self, name: str) -> tuple[str, int | None]:
        """A text that perplexity is measured on, and on how many of its first windows.

        Raises:
            OptionError: There is no such text.
        """
        if name not in EVALUATION:
            raise OptionError(
                f"{name!r} is no published text to evaluate on. These are {', '.join(EVALUATION)}."
            )
        corpus = CORPORA[name]
        excerpt = corpus.evaluation
        assert excerpt is not None
        assert excerpt.separator is not None
        return excerpt.separator.join(self._documents(corpus, excerpt)), excerpt.windows

    def _documents(self, corpus: Corpus, excerpt: Excerpt) -> Sequence[str]:
        (paths,) = locate([(corpus, excerpt)], self.directory)
        return read_documents(corpus, excerpt, paths)


def locate(needed: Sequence[tuple[Corpus, Excerpt]], directory: Path | None) -> list[list[Path]]:
    """The paths of each corpus's files on this machine.

    A directory has local copies as `<repository>/<path>` or `<name>/<path>`, such as
    `allenai/c4/en/…`; nothing is fetched then. `None` asks the hub and its cache.

    Raises:
        FileNotFoundError: Files are missing; it gives the commands that download them.
    """
    find = _cached if directory is None else partial(_copied, directory)
    found: list[list[Path]] = []
    missing: dict[str, list[str]] = {}
    reasons: list[OSError] = []
    for corpus, excerpt in needed:
        found.append([])
        for file in excerpt.files:
            try:
                found[-1].append(find(corpus, file))
            except OSError as error:
                missing.setdefault(corpus.name, []).append(file)
                reasons.append(error)
    if missing:
        raise _missing(missing, directory, reasons[0]) from reasons[0]
    return found


def read_documents(corpus: Corpus, excerpt: Excerpt, paths: Sequence[Path]) -> Sequence[str]:
    """The documents in Parquet or JSON Lines files, read from disk when they are asked for.

    Raises:
        DataError: The files cannot be read, or have no such column.
    """
    with extra("data", "Reading published texts"):
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    builder = "parquet" if excerpt.files[0].endswith(".parquet") else "json"
    names = ", ".join(map(str, paths))
    try:
        table = load_dataset(builder, data_files=list(map(str, paths)), split="train")
    except (DatasetsError, ValueError, EOFError) as error:
        raise DataError(
            f"{corpus.name}: {names} cannot be read as {builder}. Download it again. ({error})"
        ) from error
    if corpus.column not in table.column_names:
        raise DataError(
            f"{corpus.name}: expected the column {corpus.column!r} in {names}, as "
            f"{corpus.repository} has it. Got {table.column_names}."
        )
    documents = table[corpus.column]
    return documents if excerpt.documents is None else documents[: excerpt.documents]


def _cached(corpus: Corpus, file: str) -> Path:
    """The file in the hub's cache, fetched if it is not there."""
    from huggingface_hub import hf_hub_download

    repository, revision = corpus.repository, corpus.revision
    away = why_no_hub() is not None
    found = hf_hub_download(
        repository, file, repo_type="dataset", revision=revision, local_files_only=away
    )
    return Path(found)


def _copied(directory: Path, corpus: Corpus, file: str) -> Path:
    """The file in a directory of local copies."""
    for copy in (directory / corpus.repository / file, directory / corpus.name / file):
        if copy.is_file():
            return copy
    raise FileNotFoundError(f"no {directory / corpus.repository / file}")


def _missing(
    missing: dict[str, list[str]], directory: Path | None, reason: OSError
) -> FileNotFoundError:
    commands = []
    for name, files in missing.items():
        corpus = CORPORA[name]
        target = ["--local-dir", str(directory / corpus.repository)] if directory else []
        source = ["--repo-type", "dataset", "--revision", corpus.revision]
        commands.append(shlex.join(["hf", "download", corpus.repository, *files, *source, *target]))
    names, download = ", ".join(missing), " && ".join(commands)
    if directory:
        return FileNotFoundError(
            f"`data.corpora_dir`: {directory} lacks files of {names}. Download them: {download}"
        )
    return FileNotFoundError(
        f"The hub did not give the files of {names}. Download them where there is a network: "
        f"{download}. Copies elsewhere (`--local-dir DIR/OWNER/NAME`) are found with "
        f"`data.corpora_dir: DIR`. ({why_no_hub() or reason})"
    )
