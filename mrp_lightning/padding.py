"""Telling tokens from padding in the input of a layer, by the attention masks of the forward."""

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


class Padding:
    """Watches the `attention_mask` that modules are called with.

    A layer's padding is told by the mask of the innermost module around it that was given one: a
    decoder's layers by the decoder's mask. Where no module takes a mask, it is that of the batch.

    Args:
        model: The module whose forward runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._takers = {
            name: module
            for name, module in model.named_modules()
            if "attention_mask" in inspect.signature(module.forward).parameters
            and any(True for _ in module.children())
        }
        self._parents = _parents(model)
        self._kept: dict[int, Tensor | None] = {}
        self._of_batch: Tensor | None = None
        self._warned: set[str] = set()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note the masks of every forward that runs in this context."""
        handles = [
            module.register_forward_pre_hook(self._note, with_kwargs=True)
            for module in self._takers.values()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.start_batch(None)

    def start_batch(self, batch: Any) -> None:
        """Forget the masks of the last batch, and take this one's own."""
        self._kept.clear()
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        self._of_batch = _tokens(mask)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if mask is None and args:
            bound = inspect.signature(module.forward).bind_partial(*args)
            mask = bound.arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self._kept[id(module)] = _tokens(mask)

    def tokens(self, x: Tensor, module: nn.Module, name: str) -> Tensor:
        """The rows of a layer's input that are tokens.

        Args:
            x: (batch, length, ..., columns), or (batch · length, columns).
            module: The layer.
            name: For the warning that the rows of a layer cannot be told apart.

        Returns:
            (rows, ..., columns), or `x` itself where there is no padding.
        """
        kept = self._mask_for(module)
        if kept is None:
            return x
        kept = kept.to(x.device)
        if x.shape[:2] == kept.shape and x.ndim > 2:
            return x[kept]
        if x.ndim == 2 and x.shape[0] == kept.numel():
            return x[kept.flatten()]
        if name not in self._warned:
            self._warned.add(name)
            log.warning(
                "%s: its input %s cannot be matched with the attention mask %s, so padding counts "
                "in its statistics. Calibrate it on batches without padding.",
                name,
                tuple(x.shape),
                tuple(kept.shape),
            )
        return x

    def _mask_for(self, module: nn.Module) -> Tensor | None:
        around: nn.Module | None = module
        while around is not None:
            if id(around) in self._kept:
                return self._kept[id(around)]
            around = self._parents.get(id(around))
        return self._of_batch


def _tokens(mask: Any) -> Tensor | None:
    """(batch, length), True for tokens; `None` where all are, or where this is no such mask."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    kept = mask != 0
    if mask.is_floating_point() and not torch.equal(kept.to(mask.dtype), mask):
        return None
    return None if bool(kept.all()) else kept


def _parents(model: nn.Module) -> dict[int, nn.Module]:
    parents: dict[int, nn.Module] = {}
    for module in model.modules():
        for child in module.children():
            parents.setdefault(id(child), module)
    return parents


def longest_input(batch: Any) -> int:
    """Number of positions of the token ids in a batch, 0 where there are none."""
    ids: Any = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if isinstance(ids, Sequence) and ids:
        ids = ids[0]
    is_ids = isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point()
    return ids.shape[1] if is_ids else 0
