"""A streamed model as a checkpoint, written block by block."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from mrp_lightning.models.saving import cast, save_pretrained, stored_dtype
from mrp_lightning.models.streamed_blocks import StreamedBlocks

_INDEX = "model.safetensors.index.json"


def save_streamed(
    model: PreTrainedModel,
    streamed: StreamedBlocks,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    card: str | None = None,
) -> dict[str, str]:
    """Write a Hugging Face directory as `save_pretrained` does, with a file for each block.

    A shard in which a block lies as it is to be stored becomes its file without a copy, where the
    file system has hard links.

    Args:
        model: The model; it is not changed.
        streamed: Its blocks.
        directory: An existing directory, as `save_directory` gives it.
        tokenizer: Tokenizer to write beside the model, with its chat template.
        card: Text of the model card, `README.md`.

    Returns:
        The names of the files, by the names of the blocks in them.
    """
    directory = Path(directory)
    save_pretrained(model, directory, tokenizer=tokenizer, card=card, state=streamed.rest)
    (directory / _INDEX).unlink(missing_ok=True)
    written = sorted(directory.glob("model*.safetensors"))
    count = len(written) + len(streamed.blocks)
    files = [directory / f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for old, new in zip(written, files, strict=False):
        old.rename(new)
    mine = dict(zip(streamed.blocks, files[len(written) :], strict=True))
    for name, file in mine.items():
        _write_block(model, streamed, name, file)
    _write_index(directory / _INDEX, files)
    return {name: file.name for name, file in mine.items()}


def _write_block(model: PreTrainedModel, streamed: StreamedBlocks, name: str, file: Path) -> None:
    shard, dtype = streamed.shards.get(name), stored_dtype(model)
    if shard is not None and model.dtype == dtype:
        try:
            os.link(shard, file)
        except OSError:
            shutil.copyfile(shard, file)
        return
    with streamed.pinned(streamed.blocks[name]):
        tensors = streamed.tensors(name)
        if model.dtype != dtype:
            tensors = cast(tensors, dtype)
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(tensors, file, {"format": "pt"})


def _write_index(path: Path, files: list[Path]) -> None:
    """Say in which file each weight is, and how many bytes all have together."""
    places: dict[str, str] = {}
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            places |= dict.fromkeys(opened.keys(), file.name)
        with file.open("rb") as raw:  # the length of the header comes first
            total += file.stat().st_size - 8 - int.from_bytes(raw.read(8), "little")
    index = {"metadata": {"total_size": total}, "weight_map": places}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
