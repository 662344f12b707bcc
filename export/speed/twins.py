"""One model packed and dense, with all other tensors shared."""

import copy
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from mrp_sparse.layers.sparse24_linear import Sparse24Linear


def packed_copy(model: PreTrainedModel, names: Iterable[str]) -> PreTrainedModel:
    """The model with these layers packed; all other tensors are shared with the original."""
    shared: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    sparse = copy.deepcopy(model, shared)
    for name in names:
        sparse.set_submodule(name, Sparse24Linear.from_linear(model.get_submodule(name)))
    return sparse


def dense_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its packed layers dense; all other tensors are shared with the original."""
    shared: dict[int, Any] = {id(p): p for p in (*model.parameters(), *model.buffers())}
    dense = copy.deepcopy(model, shared)
    for name, module in model.named_modules():
        if isinstance(module, Sparse24Linear):
            dense.set_submodule(name, module.to_linear())
    return dense
