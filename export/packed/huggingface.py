"""The quantizer plug-in with which `from_pretrained` reads packed directories.

It is registered when `export` is imported: transformers finds no plug-ins by itself. The packed
tensor is called `weight`, so that loading without it fails with a size mismatch; under any other
name transformers would put random weights in its place.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.quantizers import (
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from export.packed.format import FORMAT_VERSION, invalid_nibbles
from export.packed.layer import Sparse24Linear, is_packable
from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.models.loading import as_dtype
from mrp_lightning.models.skeleton import model_class

QUANT_METHOD = "mrp_sparse24"


@register_quantization_config(QUANT_METHOD)
class Sparse24Config(QuantizationConfigMixin):
    """`quantization_config` in the `config.json` of a packed directory.

    Args:
        modules: Names of the layers that are packed.
        format_version: Version of the format, see `docs/format.md`.
        quant_method: The name of the format.

    Raises:
        FormatError: The directory was written in another version of the format.
    """

    def __init__(
        self,
        modules: Sequence[str] = (),
        format_version: int = FORMAT_VERSION,
        quant_method: str = QUANT_METHOD,
    ) -> None:
        if format_version != FORMAT_VERSION:
            raise FormatError(
                f"`quantization_config.format_version` is {format_version!r}, but this version of "
                f"mrp-lightning reads {FORMAT_VERSION}. Install the version that wrote it, or "
                "export the pruned model again."
            )
        self.quant_method: Any = quant_method
        self.format_version = format_version
        self.modules = list(modules)


@register_quantizer(QUANT_METHOD)
class Sparse24Quantizer(HfQuantizer):
    """Put `Sparse24Linear` where the configuration says, before the weights are read."""

    quantization_config: Sparse24Config
    requires_calibration = True  # weights that are not packed cannot be packed while loading

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        pack_modules(model, self.quantization_config.modules)
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        layers = {name: model.get_submodule(name) for name in self.quantization_config.modules}
        damaged = []
        for name, layer in layers.items():
            assert isinstance(layer, Sparse24Linear)
            layer.weight.requires_grad_(False)
            offloaded = layer.weight_meta.device.type == "meta"
            if not offloaded and (count := invalid_nibbles(layer.weight_meta)):
                damaged.append(f"{name}.weight_meta ({count} of {2 * layer.weight_meta.numel()})")
        if damaged:
            raise FormatError(
                "The checkpoint is damaged or incomplete: these tensors hold nibbles that no 2:4 "
                f"weight has: {', '.join(damaged)}. Export the pruned model again."
            )
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> Any:
        """Put back the layers that the model's class has, with the zeros stored."""
        dtype = as_dtype(dtype)  # a configuration that was saved holds a name
        names = self.quantization_config.modules
        if any(model.get_submodule(name).weight.device.type == "meta" for name in names):
            raise OptionError(
                "Weights that are offloaded cannot be made dense: load the model without disk "
                "offload (`device_map`, `offload_folder`), then dequantize it."
            )
        with torch.device("meta"):
            original = type(model)(model.config)
        for name in names:
            packed, dense = model.get_submodule(name), original.get_submodule(name)
            assert isinstance(packed, Sparse24Linear)
            weight = packed.dense_weight().to(dtype)
            stored = weight if isinstance(dense, nn.Linear) else weight.T.contiguous()  # Conv1D
            dense.weight = nn.Parameter(stored)
            if packed.bias is not None:
                dense.bias = nn.Parameter(packed.bias.detach().to(dtype))
            model.set_submodule(name, dense.train(packed.training))
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """`save_pretrained` writes the packed tensors as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Packed weights are frozen."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The operator has a fake kernel."""
        return True


def pack_modules(model: nn.Module, names: Iterable[str]) -> None:
    """Replace linear layers by uninitialised packed ones of their shape.

    Raises:
        FormatError: Layers of these names do not exist or are not linear.
    """
    modules = dict(model.named_modules())
    names = list(names)
    unknown = [name for name in names if name not in modules or not is_packable(modules[name])]
    if unknown:
        raise FormatError(
            f"`quantization_config.modules` names what {type(model).__name__} does not have as "
            f"linear layers: {', '.join(unknown)}. The class must be the one that was exported."
        )
    for name in names:
        layer = Sparse24Linear.like(modules[name])
        model.set_submodule(name, layer.train(modules[name].training))


def load(directory: str | os.PathLike[str], **options: Any) -> PreTrainedModel:
    """A model, all of whose weights come from the directory.

    Args:
        directory: What `python -m export.to_sparse` wrote, packed or dense.
        **options: Options of `from_pretrained`, such as `dtype` and `device_map`.

    Raises:
        FileNotFoundError: There is no `config.json` in it.
        FormatError: Tensors are missing, unexpected, damaged or of another shape.
    """
    if not (Path(directory) / "config.json").is_file():
        raise FileNotFoundError(f"{directory} holds no config.json: not a model directory.")
    trust = {key: options[key] for key in ("trust_remote_code",) if key in options}
    config = AutoConfig.from_pretrained(directory, **trust)
    model, loading = model_class(config).from_pretrained(
        directory, output_loading_info=True, **options
    )
    problems = [
        f"{kind.replace('_', ' ')}: {', '.join(sorted(map(str, loading[kind])))}"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if loading[kind]
    ]
    if problems:
        raise FormatError(f"{directory} does not fit {type(model).__name__}: {'; '.join(problems)}")
    return model
