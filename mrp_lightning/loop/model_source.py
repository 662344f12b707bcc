"""The model of a `CausalLM`: from a name, a file or a configuration, or one that is loaded."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mrp_lightning.errors import OptionError, TargetError
from mrp_lightning.models.gguf import located
from mrp_lightning.models.loading import as_dtype, load_model, make_config
from mrp_lightning.models.streaming import StreamedBlocks, load_streamed
from mrp_lightning.models.tokenizers import load_tokenizer, tokenizer_beside
from mrp_lightning.targets.blocks import find_blocks


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The arguments of `CausalLM` by which its model and its tokenizer are loaded."""

    model: dict[str, Any] | str | os.PathLike[str] | PreTrainedConfig | torch.nn.Module
    dtype: str | torch.dtype | None
    revision: str | None
    trust_remote_code: bool
    gguf_file: str | None
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None
    attn_implementation: str | None
    streaming: bool

    @cached_property
    def place(self) -> str | None:
        """The directory, hub id or GGUF file that the model is read from, `None` if it is not."""
        if isinstance(self.model, str | os.PathLike):
            return located(os.fspath(self.model), self.gguf_file, self.revision)
        if self.gguf_file is not None:
            raise OptionError("`gguf_file` needs `model` to be the directory or hub id of it.")
        return None

    def load_model(self) -> tuple[Any, StreamedBlocks | None]:
        """The Hugging Face model, and its blocks that stay in files, if any do."""
        dtype, options = as_dtype(self.dtype), dict[str, Any]()
        if self.attn_implementation:
            options["attn_implementation"] = self.attn_implementation
        if self.place is not None:
            options |= self._hub
            if self.streaming:
                return load_streamed(self.place, dtype, _blocks_by_name, **options)
            return load_model(self.place, dtype, **options), None
        if self.streaming:
            raise OptionError(
                "`streaming` reads blocks from files: it needs `model` to be a directory or hub id."
            )
        given: Any = self.model
        if isinstance(given, dict | PreTrainedConfig):
            config = make_config(given) if isinstance(given, dict) else given
            options["dtype"] = dtype or torch.float32
            return AutoModelForCausalLM.from_config(config, **options), None
        if not isinstance(self.model, PreTrainedModel):
            raise TypeError(
                "`model` must be a path, a hub id, a transformers configuration or a transformers "
                f"model. Got {type(given).__name__}; another module needs its own "
                "LightningModule, with a `predict_step` that calls it."
            )
        empty = [name for name, p in self.model.named_parameters() if p.is_meta]
        if empty and len(empty) == len(list(self.model.parameters())):  # else its layers are listed
            more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
            raise TargetError(
                f"`model` is on the meta device, without values: {', '.join(empty[:3])}{more}. "
                "Load it with `from_pretrained`, or give its path, with `streaming=True` if it is "
                "larger than memory."
            )
        if self.revision is not None:
            raise OptionError("`revision` needs `model` to be a hub id; this model is loaded.")
        if self.attn_implementation:
            given.set_attn_implementation(self.attn_implementation)
        return given if dtype is None else given.to(dtype), None

    def load_tokenizer(self, model: Any) -> Any:
        """The tokenizer that is asked for, or else that which the model comes with, if any."""
        if self.tokenizer is not None:
            return load_tokenizer(self.tokenizer, **self._hub)
        beside = self.place or model.name_or_path
        return tokenizer_beside(beside, **self._hub) if beside else None

    def hyperparameters(self, model: Any) -> dict[str, Any]:
        """The arguments by which a checkpoint can be rebuilt.

        `trust_remote_code` is left out: a checkpoint must not be able to ask for it.
        """
        tokenizer = self.tokenizer
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = tokenizer.name_or_path
        return {
            "model": self.place or model.config.to_dict(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "revision": self.revision,
            "tokenizer": os.fspath(tokenizer) if tokenizer else None,
            "attn_implementation": self.attn_implementation,
            "streaming": self.streaming,
        }

    @property
    def _hub(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def _blocks_by_name(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {block.name: block.module for block in find_blocks(model)}
