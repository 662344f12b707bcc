"""Save a model as a Hugging Face directory: whole, or block by block."""

import json
import os
import shutil
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    convert_and_load_state_dict_in_model,
    revert_weight_conversion,
)
from transformers.utils import logging as transformers_logging

from mrp_lightning.environment import without_bars
from mrp_lightning.errors import SaveError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.models.integrity import misfits, required
from mrp_lightning.models.loading import as_dtype, cast, stored_dtype, wider_dtypes
from mrp_lightning.models.streaming import StreamedBlocks
from mrp_lightning.upstream.other_names import loading_weights_by
from mrp_lightning.upstream.torch_names import without_compiled

_INDEX = "model.safetensors.index.json"


def save_pretrained(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    card: str | None = None,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write a Hugging Face directory that `from_pretrained` loads.

    Args:
        model: The model; it is not changed.
        directory: An existing directory, as `save_directory` gives it.
        tokenizer: Tokenizer to write next to the model, with its chat template.
        dtype: Precision of the stored floating weights. `None` means that of the source checkpoint
            (`model.config.dtype`, and float32 for weights that are float32 in its files). Weights
            that transformers always keeps in float32, such as the biases of some routers, stay so.
        card: Text of the model card, `README.md`.
        state: The weights to write, by their names in the model; `None` means all.

    Raises:
        SaveError: The class of the model would not load the written files; see `check_saved`.
    """
    stored, requested = model.config.dtype, as_dtype(dtype)
    dtype = requested or stored_dtype(model)
    is_whole = state is None
    # The saved names must be those of the model's class, without `torch.compile`'s wrappers.
    tensors = model.state_dict() if state is None else state
    state = {without_compiled(name): tensor for name, tensor in tensors.items()}
    if model.dtype != dtype:
        # Without an argument, weights that were float32 in the source's files stay float32.
        wider = wider_dtypes(model, dtype, as_published=requested is None)
        state = cast(state, dtype, {without_compiled(name): x for name, x in wider.items()})
    try:
        with without_bars():
            model.save_pretrained(directory, state_dict=state, max_shard_size="5GB")
        model.config.dtype = dtype  # save_pretrained writes the dtype in memory
        model.config.save_pretrained(directory)
    finally:
        model.config.dtype = stored
    if is_whole:  # a part cannot load alone
        check_saved(model, directory)
    if tokenizer is not None:
        try:
            tokenizer.save_pretrained(directory)
        except Exception as error:
            if type(error) is not Exception:  # the type that tokenizers raises for all disk errors
                raise
            raise OSError(f"the tokenizer cannot be written: {error}") from error
    if card is not None:
        (Path(directory) / "README.md").write_text(card, encoding="utf-8")


def save_streamed(
    model: PreTrainedModel,
    streamed: StreamedBlocks,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    card: str | None = None,
) -> dict[str, str]:
    """Write a Hugging Face directory as `save_pretrained` does, with a file for each block.

    A journal shard that holds a block in its final form is hard-linked, not copied, if the file
    system allows it. A block that becomes narrower is written anew.

    Returns:
        The name of the file of each block.
    """
    narrowing = streamed.narrowing
    with nullcontext() if narrowing is None else narrowing.configured():
        save_pretrained(model, directory, tokenizer=tokenizer, card=card, state=streamed.rest)
        file_of = _save_blocks(model, streamed, Path(directory))
        check_saved(model, directory)
    return file_of


def _save_blocks(
    model: PreTrainedModel, streamed: StreamedBlocks, directory: Path
) -> dict[str, str]:
    """Write the blocks, name the files of the `rest` anew, and write the index of all."""
    narrowing = streamed.narrowing
    # The index of `save_pretrained` lists the rest alone, and by old names. A new one is written
    # last, when all files have their final names.
    (directory / _INDEX).unlink(missing_ok=True)
    written = sorted(directory.glob("model*.safetensors"))
    count = len(written) + len(streamed.blocks)
    files = [directory / f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for old, new in zip(written, files, strict=False):
        old.rename(new)
    file_of = dict(zip(streamed.blocks, files[len(written) :], strict=True))
    dtype, wider = stored_dtype(model), dict[str, torch.dtype]()
    if is_cast := model.dtype != dtype:
        wider = wider_dtypes(model, dtype, as_published=True)
    for name, file in file_of.items():
        shard = streamed.shards.get(name)
        # A shard is byte for byte the final file unless its dtype or its shapes change.
        if shard is not None and not is_cast and narrowing is None:
            try:
                os.link(shard, file)
            except OSError:
                shutil.copyfile(shard, file)
            continue
        with (
            streamed.pinned(block := streamed.blocks[name]),
            nullcontext() if narrowing is None else narrowing.saved(name),
        ):
            # The cast comes before the conversion of names: `wider` has those of the model.
            state = block.state_dict(prefix=f"{name}.")
            tensors = revert_weight_conversion(
                model, cast(state, dtype, wider) if is_cast else state
            )
            save_file({k: t.contiguous() for k, t in tensors.items()}, file, {"format": "pt"})
    _write_index(directory / _INDEX, files)
    return {name: file.name for name, file in file_of.items()}


def _write_index(path: Path, files: list[Path]) -> None:
    """Write the index: the file of each weight, and the total number of bytes."""
    weight_map: dict[str, str] = {}
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), file.name)
        with file.open("rb") as raw:  # the length of the header comes first
            total += file.stat().st_size - 8 - int.from_bytes(raw.read(8), "little")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_saved(model: PreTrainedModel, directory: str | os.PathLike[str]) -> None:
    """Check a newly written directory by loading it, on the meta device, with its model's class.

    Only the headers of the files are read. transformers converts names and stacked experts as in
    any loading. A SaveError is raised for weights that are missing, or have other shapes.
    """

    def load_weights(built: PreTrainedModel, _: Any, files: Any, loading: Any, *__: Any) -> Any:
        """Replace the step of `from_pretrained` that reads the weights."""
        stored: dict[str, Tensor] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                shapes = {name: opened.get_slice(name).get_shape() for name in [*opened.keys()]}
            stored |= {name: torch.empty(x, device="meta") for name, x in shapes.items()}
        on_meta = replace(loading, device_map={"": "meta"})
        return convert_and_load_state_dict_in_model(built, stored, on_meta)

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the error below lists the weights
    try:
        with loading_weights_by(load_weights), without_bars(), torch.inference_mode(False):
            loaded: Any = type(model).from_pretrained(
                directory, output_loading_info=True, ignore_mismatched_sizes=True
            )
    finally:
        transformers_logging.set_verbosity(verbosity)
    if problem := misfits("that was written", *loaded):
        raise SaveError(f"what was written would not load: {problem} {_REPAIR}")


_REPAIR = "Change the modules of the model or its `config`, so that the one fits the other."


def check_class(model: PreTrainedModel) -> None:
    """Raise a SaveError, before any work, for a model with other weights than its class gives.

    Such a model was modified after its construction, and no checkpoint of it would load.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return  # packed weights have other shapes, and cannot be pruned anyway
    # A copy, since building a model writes into its configuration, such as the attention kernel.
    built = build_without_weights(deepcopy(model.config), kind=type(model))
    shapes = {without_compiled(name): x.shape for name, x in model.state_dict().items()}
    expected = built.state_dict()
    absent = expected.keys() - shapes.keys()
    for name in absent - {*required(type(model), absent)}:
        del expected[name]
    kinds = {name: f"holds as {tuple(shape)}" for name, shape in shapes.items()}
    if wrong := [
        f"{name} {tuple(x.shape)}, which the model {kinds.get(name, 'has not')}"
        for name, x in expected.items()
        if shapes.get(name) != x.shape
    ]:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise SaveError(
            f"The pruned model could not be saved so that it loads again: by its `config`, a "
            f"{type(model).__name__} has the weights {'; '.join(wrong[:5])}{more}. {_REPAIR}"
        )
