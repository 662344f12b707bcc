"""A model that is dequantized once, where many runs start from it."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy

from transformers import PreTrainedModel

_LAST: ContextVar[dict[Hashable, PreTrainedModel] | None] = ContextVar("last", default=None)


@contextmanager
def dequantized_once() -> Iterator[None]:
    """Keep the last model that is dequantized in this context: who wants it again gets a copy.

    It takes the memory of one more model.
    """
    token = _LAST.set({})
    try:
        yield
    finally:
        _LAST.reset(token)


def dequantized(source: Hashable, make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A model that is the caller's own.

    Args:
        source: What decides the model: a file, its state, and how it is read.
        make: Reads it.
    """
    last = _LAST.get()
    if last is None:
        return make()
    if source not in last:
        last.clear()  # before the next one takes its memory
        last[source] = make()
    return deepcopy(last[source])
