"""One model packed and dense, with all other tensors shared, and the memory that it takes."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from mrp_lightning.packed.sparse24_linear import Sparse24Linear


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


def storage_bytes(model: nn.Module) -> int:
    """Bytes that the weights take in memory: each storage once, in all layouts that are kept.

    A 2:4 tensor subclass gives the `nbytes` of its dense matrix; its parts are counted instead.
    """
    storages: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in _parts(tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _parts(tensor: Tensor) -> list[Tensor]:
    flatten: Callable[[], tuple[list[str], Any]] | None
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]
