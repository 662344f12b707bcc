"""Check names of models, texts and outputs, and packages, before a command loads torch."""

from collections.abc import Sequence
from pathlib import Path

from mrp_lightning.environment import require_extra
from mrp_lightning.errors import DataError
from mrp_lightning.models.locations import find_gguf, require_model
from mrp_lightning.storage.outputs import check_output_dir
from mrp_lightning.text.documents import TABLES, divided, documents_of_files, expanded

_FEWEST_BYTES = 8
"""The fewest bytes of text that is held out: of tokens, which are no more, eight are needed."""
_SHORT = 2**20
"""The bytes of files that are read to count their text; more is enough in any case."""


def check_model(source: str, gguf_file: str | None = None) -> None:
    """Raise if there is no such model, or the packages are missing that read it.

    Raises:
        DependencyError: A GGUF file cannot be read. `require_model` raises more.
    """
    if gguf_file is None:
        require_model(source)
    if gguf_file or find_gguf(source):
        require_extra("gguf", f"Reading {Path(gguf_file or source).name}")


def check_directory(source: str | Path, argument: str) -> None:
    """Raise a FileNotFoundError if there is no such directory; its content is checked later."""
    if not Path(source).expanduser().exists():
        raise FileNotFoundError(
            f"`{argument}`: there is no directory {source}. Give a model's, with its config.json."
        )


def check_output(path: str | Path | None, *, overwrite: bool) -> None:
    """Raise if `--out` names what may not be written; see `check_output_dir`.

    The checksums of what may be replaced are read later.
    """
    if path is not None and not overwrite:
        check_output_dir(path, argument="--out")


def check_text(files: Sequence[str] | None, column: str | None) -> None:
    """Raise if the files of `--text`, of which a tenth is held out, are missing or too short.

    Raises:
        DataError: The held-out text has fewer bytes than the fewest tokens, or is no text.
        DependencyError: The files hold tables, and `datasets` is not installed.
        MissingFileError: Names match no file.
    """
    if not files or "-" in files:
        return
    paths = [Path(name).expanduser() for name in files]
    text_files = expanded({"train_files": paths})["train_files"]
    if any(file.suffix.lower() in TABLES for file in text_files):
        require_extra("data", "Reading tables")
        return  # a package reads them, and takes its time to load
    if sum(file.stat().st_size for file in text_files) > _SHORT:
        return
    # A conversation has at least a byte for each of its own: its template adds to it.
    texts = documents_of_files(text_files, column or "text", "train_files", str)
    held_out = sum(len(text.strip().encode()) for text in divided(texts)[1])
    if held_out < _FEWEST_BYTES:
        whole = sum(len(text.encode()) for text in texts)
        raise DataError(
            f"the text has {whole:,} bytes, of which a tenth is held out: too few to evaluate on. "
            "Give some thousand words.",
            "train_files",
        )
