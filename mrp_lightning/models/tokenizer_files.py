"""A tokenizer as the contents of its files, which a checkpoint can hold."""

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedTokenizerBase

from mrp_lightning.errors import DataError
from mrp_lightning.models.tokenizers import load_tokenizer


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """The files that `save_pretrained` writes, by name."""
    with TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}


def tokenizer_from_files(files: dict[str, bytes]) -> PreTrainedTokenizerBase:
    """The tokenizer of such files; no code comes with it.

    Raises:
        DataError: The files are no tokenizer.
    """
    is_right = isinstance(files, dict) and all(
        isinstance(name, str) and Path(name).name == name != ".." and isinstance(content, bytes)
        for name, content in files.items()
    )
    if not is_right:
        raise DataError(
            "The checkpoint's tokenizer is no mapping of names of files to their bytes. Name a "
            "tokenizer with `tokenizer`, and load the model's weights alone."
        )
    with TemporaryDirectory() as directory:
        for name, content in files.items():
            Path(directory, name).write_bytes(content)
        return load_tokenizer(directory)
