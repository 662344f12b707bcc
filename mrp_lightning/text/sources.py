"""The documents of a user's own text files and datasets."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrp_lightning.environment import extra
from mrp_lightning.errors import DataError


def documents_of_files(paths: Sequence[Path], column: str) -> list[str]:
    """A document a text file, or a line of a .jsonl file.

    Args:
        paths: The files.
        column: The text's key in .jsonl files.

    Raises:
        DataError: A line is no JSON object with that key.
    """
    documents = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            documents.append(text)
            continue
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                documents.append(_of_line(line, column, f"{path}, line {number}"))
    return documents


def _of_line(line: str, column: str, where: str) -> str:
    try:
        return json.loads(line)[column]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"`data.{{train,eval}}_files`: {where} is not a JSON object with the key "
            f"{column!r} (`data.text_column`)."
        ) from error


def documents_of_dataset(dataset: Any, split: str, column: str) -> Sequence[str]:
    """The documents of one split of a dataset, read when they are asked for.

    Args:
        dataset: Name or directory, arguments of `datasets.load_dataset`, or a `DatasetDict`.
        split: train, validation or test; validation where there is no test.
        column: The text's.

    Raises:
        DataError: There is no such split or column.
    """
    splits: Any = {"path": dataset} if isinstance(dataset, str) else dataset
    if type(splits) is dict:  # a DatasetDict is a dict, too
        with extra("data", "`data.dataset`"):
            from datasets import load_dataset

        splits = load_dataset(**splits)
    name = "validation" if split == "test" and "test" not in splits else split
    if name not in splits:
        raise DataError(f"`data.dataset` has no split {name!r}; it has {sorted(splits)}.")
    if column not in splits[name].column_names:
        raise DataError(
            f"`data.dataset` has no column {column!r}; name one of "
            f"{splits[name].column_names} with `data.text_column`."
        )
    return splits[name][column]
