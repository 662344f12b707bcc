"""The documents in files: text, lines of .jsonl, and the rows of tables; without torch."""

import json
import os
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from mrp_lightning.environment import extra
from mrp_lightning.errors import DataError, MissingFileError, first_line

TABLES = {".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""The builder of `datasets` that reads each kind of table."""
_CONVERSATIONS = ("messages", "conversations")
"""The keys of a conversation: a list of messages with `role` and `content`, or with ShareGPT's
`from` and `value`."""
_ROLES = {"human": "user", "gpt": "assistant"}
"""The roles of ShareGPT's names that differ from them."""
Conversation = Callable[[list[dict[str, Any]]], str]
"""Returns a conversation as the text that a model reads, by its chat template."""


def documents_of_files(
    paths: Sequence[Path],
    column: str,
    argument: str = "train_files",
    conversation: Conversation | None = None,
) -> list[str]:
    """Read the documents of files: a text file, a line of a .jsonl file, or a row of a table each.

    Args:
        paths: The files.
        column: The key of the text in a line or row; there, at `messages` or at `conversations`,
            also a conversation.
        argument: The argument that names the files, for errors.
        conversation: Formats a conversation as text; `None` if conversations are not allowed.
    """
    read = partial(_text_of_row, column, argument, conversation)
    documents = []
    for path in paths:
        kind = path.suffix.lower()
        if kind in TABLES:
            rows = enumerate(_table(path, kind, argument), start=1)
            documents += [read(row, f"{path}, row {number}") for number, row in rows]
            continue
        text = _text_of(path, argument)
        if kind == ".jsonl":
            # Not str.splitlines: JSON allows U+2028 and others in a string.
            lines = enumerate(text.split("\n"), start=1)
            documents += [read(line, f"{path}, line {n}") for n, line in lines if line.strip()]
        elif _is_json(text):
            raise DataError(
                f"{path} is JSON, and would be read with its brackets and quotes. Name it .json, "
                f"or .jsonl with an object a line, with a text under the key {column!r} "
                "(`text_column`).",
                argument,
            )
        else:
            documents.append(text)
    # Surrogates, which JSON can escape, become characters, or U+FFFD where one is alone.
    return [x.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for x in documents]


def _table(path: Path, kind: str, argument: str) -> Iterable[dict[str, Any]]:
    """Return the rows of a table."""
    with extra("data", f"Reading {path.name}"):
        from datasets import load_dataset
    options = {"sep": "\t"} if kind == ".tsv" else {}
    try:
        with no_bars():
            return load_dataset(TABLES[kind], data_files=str(path), split="train", **options)
    except Exception as error:  # builders of `datasets` raise errors of many types
        # `datasets` wraps the reader's error in one of its own that names no line or byte.
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        reason = first_line(cause)
        raise DataError(f"{path} cannot be read as {kind[1:]} ({reason}).", argument) from error


@contextmanager
def no_bars() -> Iterator[None]:
    """Silence the bars of `datasets`, which reads local tables faster than one can follow."""
    import datasets

    is_silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not is_silent:
            datasets.enable_progress_bars()


def _text_of(path: Path, argument: str) -> str:
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")  # Windows may begin a file with a byte order mark
        offset, reason = content.find(0), "as in binary files and UTF-16"
    except UnicodeDecodeError as error:
        offset, reason = error.start, error.reason
    if offset >= 0:  # a zero byte is valid UTF-8, but occurs in no text
        raise DataError(
            f"{path} must be UTF-8 text. The byte at offset {offset:,} is 0x{content[offset]:02x} "
            f"({reason}). Unpack a compressed file, convert one in another encoding (`iconv -f "
            "ENCODING -t utf-8`), or leave it out.",
            argument,
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _is_json(text: str) -> bool:
    """Return whether a text is a non-empty JSON array or object, or such an object is line 1."""
    start = text.lstrip()
    # The first line alone comes first: it shows JSON lines, which as a whole are no JSON. An empty
    # array or object counts as text, since it holds no document in any reading.
    for part, opening in ((start.partition("\n")[0], "{"), (start, ("[", "{"))):
        if part.startswith(opening):
            with suppress(ValueError, RecursionError):
                return bool(json.loads(part))
    return False


def _text_of_row(
    column: str, argument: str, conversation: Conversation | None, row: Any, position: str
) -> str:
    """Return the text of a row, which is a dictionary or a line of JSON."""
    problem = shorten(str(row), 60)
    if isinstance(row, str):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            row, problem = None, f"{problem} ({error})"
    if isinstance(row, dict):
        # The key that the user names goes before the others: tables may have both.
        value = next((row[key] for key in (column, *_CONVERSATIONS) if key in row), None)
        if isinstance(value, str):
            return value
        if conversation is not None and (messages := _messages(value)):
            return conversation(messages)
        is_there = column in row or value is not None
        problem = f"{type(value).__name__} there" if is_there else f"the keys {sorted(row)}"
    raise DataError(
        f"{position} is no object with a text under the key {column!r} (`text_column`), or with a "
        f"conversation under {' or '.join(map(repr, _CONVERSATIONS))}. Got {problem}.",
        argument,
    )


def _messages(value: Any) -> list[dict[str, Any]]:
    """Return a conversation's messages, with `role` and `content`; none if it is none."""
    messages = value if isinstance(value, list) else []
    if all(isinstance(m, dict) and "role" in m for m in messages):
        return messages
    if all(
        isinstance(m, dict) and isinstance(m.get("from"), str) and "value" in m for m in messages
    ):
        roles = [_ROLES.get(m["from"], m["from"]) for m in messages]
        return [{"role": r, "content": m["value"]} for r, m in zip(roles, messages, strict=True)]
    return []


def paths_of(files: Sequence[str | os.PathLike[str]] | str | os.PathLike[str] | None) -> list[Path]:
    """Return the paths in `train_files` or `eval_files`: none, one or several.

    An empty name, which as a path would be the working directory, raises a MissingFileError.
    """
    files = [files] if isinstance(files, str | os.PathLike) else files or []
    if "" in files:
        raise MissingFileError(
            "the name of a text file is empty (''). Name a file or a directory; the working "
            "directory is `.`."
        )
    return [Path(file).expanduser() for file in files]


def expanded(paths: Mapping[str, Iterable[Path]]) -> dict[str, list[Path]]:
    """Expand the directories and wildcards in the paths of each argument, sorted within each path.

    A directory stands for the text files and tables beneath it that are not hidden. A path with
    wildcards (`*`, `**`, `?`, `[…]`) stands for all files that match it, unless a file of that very
    name exists. A MissingFileError lists all paths that match no file.
    """
    files = {name: [(path, files_of(path)) for path in paths[name]] for name in paths}
    missing = {
        name: "; ".join(_why_missing(path) for path, each in matches if not each)
        for name, matches in files.items()
    }
    problems = {name: problem for name, problem in missing.items() if problem}
    if len(problems) == 1:
        ((name, problem),) = problems.items()
        raise MissingFileError(f"{problem}.", name)
    if problems:
        listed = "; ".join(f"`{name}`: {problem}" for name, problem in problems.items())
        raise MissingFileError(f"{listed}.")
    return {name: [file for _, each in files[name] for file in each] for name in files}


def _why_missing(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a directory without text files and tables"
    if path.exists():
        return (
            f"{path} is a pipe or a device, and text is read more than once. Write it to a file, "
            "or give it to `mrp-lightning prune` by standard input (`--text -`)"
        )
    is_url = re.match(r"https?:/", str(path)) is not None
    return f"no such file: {path}{' (download it first: no URLs are read)' * is_url}"


def files_of(path: Path) -> list[Path]:
    """Return the files that a path stands for; none if it matches no file."""
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if _is_text(file, path))
    # The directories that exist are names, also where these have brackets; the rest is a pattern.
    directory = next(each for each in path.parents if each.is_dir())
    pattern = str(path.relative_to(directory))
    return sorted(file for file in directory.glob(pattern) if file.is_file())


def _is_text(file: Path, directory: Path) -> bool:
    """Return whether a file in a directory is not hidden, and a table or begins as UTF-8 text."""
    if any(part.startswith(".") for part in file.relative_to(directory).parts):
        return False
    if not file.is_file() or file.suffix.lower() in TABLES:
        return file.is_file()
    with file.open("rb") as content:
        start = content.read(_SNIFFED)
    with suppress(UnicodeDecodeError):
        getincrementaldecoder("utf-8")().decode(start)  # may end within a character
        return 0 not in start
    return False


_SNIFFED = 8192  # bytes


_DOCUMENTS = 20
"""The number of documents from which on whole documents are held out, not the end of each."""


def divided(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the documents to calibrate on, and those that are held out: a tenth."""
    # The end of a document depends on its start, but a tenth of few documents is none or one.
    if len(texts) >= _DOCUMENTS:
        held_out = [text for i, text in enumerate(texts) if i % 10 == 9]
        return [text for i, text in enumerate(texts) if i % 10 != 9], held_out
    cuts = [(text, _last_tenth(text)) for text in texts]
    return [text[:cut] for text, cut in cuts], [text[cut:] for text, cut in cuts]


def _last_tenth(text: str) -> int:
    """Return the index at which the last tenth of a text begins, at a line's start if possible."""
    start = len(text) * 9 // 10
    line = text.find("\n", start) + 1
    # At least a twentieth of the text has to be left, which a long last line would take.
    return line if 0 < line < len(text) - len(text) // 20 else start
