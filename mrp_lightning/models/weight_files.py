"""Which files of a model directory hold its weights."""

from pathlib import Path

from mrp_lightning.errors import FormatError
from mrp_lightning.json_files import read_json


def weight_files(directory: Path) -> list[Path]:
    """The files that transformers would read, in its order of preference.

    Links are followed: in the hub's cache all files are links. What an index names has to lie in
    the directory, so that a checkpoint from elsewhere cannot have other files of this machine read.

    Args:
        directory: A Hugging Face model directory.

    Returns:
        Their paths, none where there are no weights.

    Raises:
        FormatError: An index is damaged, or names files that are not there or not in the directory.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            return _in_index(index)
    return []


def _in_index(index: Path) -> list[Path]:
    content = read_json(index, "fetch it again")
    weight_map = content.get("weight_map", {})
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise FormatError(
            f"{index}: expected in `weight_map` the name of a file for each tensor. Fetch it again."
        )
    names = sorted(set(weight_map.values()))
    if not names:
        raise FormatError(f"{index} names no files: its `weight_map` is empty.")
    if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise FormatError(
            f"{index} names files outside of its directory, which are not read: "
            f"{', '.join(map(repr, outside))}. Do not use this checkpoint, or put the files into "
            "the directory and name them there."
        )
    if missing := [name for name in names if not (index.parent / name).is_file()]:
        raise FormatError(f"{index} names files that are not there: {', '.join(missing)}.")
    if not isinstance(content.get("metadata"), dict):
        raise FormatError(f"{index}: expected an object as `metadata`. Fetch it again.")
    return [index.parent / name for name in names]
