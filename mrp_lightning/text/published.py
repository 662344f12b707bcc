"""The published texts of the paper, and how they are read: docs/data.md gives the sources."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mrp_lightning.environment import extra, why_no_hub
from mrp_lightning.errors import DataError, OptionError


@dataclass(frozen=True, kw_only=True)
class Part:
    """One use of a corpus.

    Attributes:
        files: Paths of its files in the repository.
        separator: What stands between the documents, which are joined and tokenized as one text.
            `None` where windows are drawn from single documents.
        documents: How many documents are read, from the first; `None` is all.
        windows: How many windows are kept, from the first; `None` is all.
    """

    files: tuple[str, ...]
    separator: str | None
    documents: int | None = None
    windows: int | None = None


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A dataset repository of the Hugging Face hub, and the protocol of SparseGPT for it.

    Attributes:
        name: What configurations and results call the corpus.
        repository: Owner and name of the repository on the hub.
        revision: Commit of the repository, or where no public source names one, its branch.
        column: Name of the column that holds the text.
        calibration: The part that calibration windows are drawn from.
        evaluation: The part that perplexity is measured on; `None` where it is not.
    """

    name: str
    repository: str
    revision: str
    column: str
    calibration: Part
    evaluation: Part | None


_WIKITEXT2 = Corpus(
    name="wikitext2",
    repository="Salesforce/wikitext",
    revision="b08601e04326c79dfdd32d625aee71d232d685c3",
    column="text",
    calibration=Part(files=("wikitext-2-raw-v1/train-00000-of-00001.parquet",), separator=" "),
    evaluation=Part(files=("wikitext-2-raw-v1/test-00000-of-00001.parquet",), separator="\n\n"),
)
_PTB = Corpus(
    name="ptb",
    repository="ptb-text-only/ptb_text_only",
    revision="refs/convert/parquet",
    column="sentence",
    calibration=Part(files=("penn_treebank/train/0000.parquet",), separator=" "),
    evaluation=Part(files=("penn_treebank/test/0000.parquet",), separator=" "),
)
_C4 = Corpus(
    name="c4",
    repository="allenai/c4",
    revision="607bd4c8450a42878aa9ddc051a65a055450ef87",
    column="text",
    calibration=Part(files=("en/c4-train.00000-of-01024.json.gz",), separator=None),
    evaluation=Part(
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
    calibration=Part(
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


def check_names(names: Iterable[str], known: Sequence[str], argument: str) -> None:
    """Refuse names that are not published texts.

    Args:
        names: What the user asks for.
        known: Names of the published texts that can be had.
        argument: What the user calls the option, for the message.

    Raises:
        OptionError: Names are unknown; it lists them, and those that are known.
    """
    if unknown := [name for name in names if name not in known]:
        raise OptionError(
            f"`data.{argument}`: {', '.join(map(repr, unknown))} unknown. The published texts are "
            f"{', '.join(known)}; other text is given as `data.dataset`, or as `data.train_files` "
            "and `data.eval_files`."
        )


def locate(needed: Sequence[tuple[Corpus, Part]], directory: Path | None) -> list[list[Path]]:
    """The paths of each corpus's files on this machine.

    Args:
        needed: Corpora, and the part that is wanted of each.
        directory: Directory with local copies as `<repository>/<path>` or `<name>/<path>`, such as
            `allenai/c4/en/…`; nothing is fetched then. `None` asks the hub and its cache.

    Raises:
        FileNotFoundError: Files are missing; it gives the commands that download them.
    """
    find = _cached if directory is None else partial(_copied, directory)
    found: list[list[Path]] = []
    missing: dict[str, list[str]] = {}
    reasons: list[OSError] = []
    for corpus, part in needed:
        found.append([])
        for file in part.files:
            try:
                found[-1].append(find(corpus, file))
            except OSError as error:
                missing.setdefault(corpus.name, []).append(file)
                reasons.append(error)
    if missing:
        raise _missing(missing, directory, reasons[0]) from reasons[0]
    return found


def read_documents(corpus: Corpus, part: Part, paths: Sequence[Path]) -> Sequence[str]:
    """The documents in some files; they are read from disk when they are asked for, not before.

    Args:
        corpus: The corpus that the files belong to.
        part: The part of it that they are.
        paths: Paths of the files: Parquet, or a JSON object a line.

    Raises:
        DataError: The files cannot be read, or have no such column.
    """
    with extra("data", "Reading published texts"):
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    builder = "parquet" if part.files[0].endswith(".parquet") else "json"
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
    return documents if part.documents is None else documents[: part.documents]


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
