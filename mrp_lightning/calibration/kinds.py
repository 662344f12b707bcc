"""Telling kinds of batches apart, for which a model may do other things."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

_MOST = 8
"""How many kinds are tried. Keys that name samples would make every batch a kind of its own."""


def one_of_each_kind(batches: Sequence[Any]) -> list[Any]:
    """The first batch of each kind, of eight at most, in the order of the batches."""
    found: dict[Hashable, Any] = {}
    for batch in batches:
        found.setdefault(kind(batch), batch)
    return list(found.values())[:_MOST]


def kind(data: Any) -> Hashable:
    """What a batch is made of: its keys, where it has `None`, the dtypes and ranks of its tensors.

    The lengths of tensors and of lists, and numbers and texts, do not tell kinds apart; whether an
    `attention_mask` leaves anything out does.
    """
    if isinstance(data, Tensor):
        return data.dtype, data.ndim
    if isinstance(data, Mapping):
        return frozenset((key, _is_padded(key, value), kind(value)) for key, value in data.items())
    if isinstance(data, tuple):
        return tuple(map(kind, data))
    if isinstance(data, list):
        return frozenset(map(kind, data))
    if is_dataclass(data) and not isinstance(data, type):
        return type(data), tuple(kind(getattr(data, field.name)) for field in fields(data))
    return (type(data),)


def _is_padded(key: Any, value: Any) -> bool:
    return key == "attention_mask" and isinstance(value, Tensor) and not bool(value.all())
