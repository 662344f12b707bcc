"""The keys and values of a text that a model writes, in memory that is taken once.

A cache that is copied to grow moves as much memory again for each token, and one of a fixed size
lets every token attend to all places, also to those that are empty.
"""

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


class FilledLayer(DynamicLayer):
    """Those of a layer that attends to all tokens, in room for as many as there will be.

    Args:
        length: Tokens of a window, at the end.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the memory, as the first keys and values (windows, heads, tokens, size) are."""
        super().lazy_initialization(key_states, value_states)
        self._room = [
            states.new_empty(*states.shape[:2], self._length, states.shape[3])
            for states in (key_states, value_states)
        ]
        self.keys, self.values = (room[:, :, :0] for room in self._room)

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of further tokens; returns all, as views of the room."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:stop] = states
        self.keys, self.values = (room[:, :, :stop] for room in self._room)
        return self.keys, self.values


def cache_for(config: PreTrainedConfig, length: int) -> Cache:
    """A cache for windows of a length, by what kinds of layers the model's configuration names.

    Layers with a sliding window keep that alone, and recurrent ones their state, as in
    transformers' own cache.
    """
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    cache.layers = [
        FilledLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache
