"""Models that are larger than memory: loaded without their blocks, and saved block by block."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mrp_lightning.errors import OptionError
from mrp_lightning.models.gguf import find_gguf
from mrp_lightning.models.loading import load_model
from mrp_lightning.models.streamed_blocks import StreamedBlocks
from mrp_lightning.upstream import loading_weights_by

FindBlocks = Callable[[nn.Module], Mapping[str, nn.Module]]


def load_streamed(
    source: str, dtype: torch.dtype | None, find_blocks: FindBlocks, **options: Any
) -> tuple[PreTrainedModel, StreamedBlocks]:
    """A causal language model whose blocks stay in the safetensors files of its checkpoint.

    Args:
        source: Directory or hub id of the model.
        dtype: Precision to load the weights in; `None` keeps the checkpoint's.
        find_blocks: Finds the blocks of the model, by name, once it is built.
        **options: `revision`, `trust_remote_code` and `attn_implementation`.

    Raises:
        OptionError: The weights are not in safetensors files, or packed.
        TargetError: The model has no blocks, or their weights are tied to others; and what
            `load_model` refuses.
    """
    if file := find_gguf(source):
        raise _no_safetensors(file.name)
    streamed: list[StreamedBlocks] = []

    def load_weights(model: PreTrainedModel, _: Any, files: Any, loading: Any, *__: Any) -> Any:
        """Stands in for what `from_pretrained` calls once the model is built without weights."""
        if loading.hf_quantizer is not None:
            raise OptionError(
                f"`streaming` prunes weights that are matrices, and those of {source} are packed. "
                "Give the dense checkpoint."
            )
        others = [Path(f).name for f in files if not f.endswith(".safetensors")]
        if others:
            raise _no_safetensors(", ".join(others))
        streamed.append(StreamedBlocks(model, find_blocks(model), [*map(Path, files)], loading))
        return streamed[0].load_rest(), None

    with loading_weights_by(load_weights):
        model = load_model(source, dtype, **options)
    streamed[0].install()
    return model, streamed[0]


def _no_safetensors(files: str) -> OptionError:
    return OptionError(
        f"`streaming` reads single weights from safetensors files, and these are not: {files}. "
        "Load the model without `streaming` where it fits into memory, save it with "
        "`save_pretrained`, and give that directory."
    )
