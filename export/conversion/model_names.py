"""Which weight of a model each tensor in its files holds."""

import functools
import inspect
import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


class ParameterNames:
    """Names in the model of the tensors in its files, as `from_pretrained` finds them.

    Files may lack the prefix of the base model or have one too many, and keep the names of older
    versions of a model; transformers knows how to rename them.

    Args:
        model: The model, with or without weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._state = model.state_dict()

    def of(self, tensor: str) -> tuple[str, bool]:
        """The parameter, and whether it is computed from the tensor, alone or with others."""
        name, converter = self._rename(tensor, self._renamings, self._converters)
        if name not in self._state and tensor in self._state:
            name, converter = self._rename(tensor, [], [])
        return name, converter is not None

    def _rename(
        self,
        tensor: str,
        renamings: list[WeightRenaming],
        converters: list[WeightConverter],
    ) -> tuple[str, str | None]:
        return rename_source_key(
            tensor,
            renamings,
            converters,
            base_model_prefix=self._prefix,
            meta_state_dict=self._state,
        )


def is_read_directly(model: nn.Module, name: str) -> bool:
    """Whether a layer's weight is multiplied by the module that holds it, and not by the layer.

    Mamba multiplies by `self.dt_proj.weight`, and torch's `MultiheadAttention` by its `out_proj`'s:
    such code needs the dense matrix.
    """
    owner, _, child = name.rpartition(".")
    parent = model.get_submodule(owner)
    kind: Any = type(parent)
    return isinstance(parent, nn.MultiheadAttention) or child in _read_directly(kind)


@functools.cache
def _read_directly(kind: type) -> frozenset[str]:
    """Names of the children whose weights the code of a class multiplies with."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a class without a file, such as one typed at a prompt
        return frozenset()
    weight = r"self\.(\w+)\.weight\b"
    uses = rf"{weight}\s*@|@\s*{weight}|\blinear\([^()]*,\s*{weight}"
    return frozenset(name for found in re.findall(uses, source) for name in found if name)
