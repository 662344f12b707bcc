"""Separate tokens from padding in the inputs of layers, by the attention masks of the forward."""

import inspect
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

_OF_TORCH = ("src_key_padding_mask", "tgt_key_padding_mask")
"""Argument names of torch's encoders and decoders for the mask (batch, length) of their input."""

_OF_ATTENTION = ("query", "key", "value", "key_padding_mask")
"""The names of the first arguments of torch's attention, in their order."""


@dataclass(frozen=True)
class _Masks:
    """The masks (batch, length) of a module: True for tokens, `None` where there is no padding."""

    own: Tensor | None  # of the module's hidden state
    memory: Tensor | None = None  # the encoder's output, which cross-attention reads
    of_memory: Tensor | None = None  # the mask of that output


class Padding:
    """Separates tokens from padding by the attention masks that modules receive in a forward.

    The mask of a layer's input is that of the innermost enclosing module that received one (for a
    decoder's layers, the decoder's mask), else that of the batch. The masks of torch's own encoders
    and decoders, in which True is padding, count as well.
    """

    def __init__(self, model: nn.Module) -> None:
        # By layer, the shapes of the first input that did not match its mask, and of that mask. All
        # rows of such an input count as tokens.
        self.unmatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._takers = [module for module in model.modules() if _takes_mask(module)]
        self._arguments = {
            id(m): list(inspect.signature(m.forward).parameters) for m in self._takers
        }
        self._tokens: dict[Hashable, tuple[Tensor, Tensor | None]] = {}
        self._parents = _parents(model)
        self._attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
        self._warned = False
        self._masks: dict[int, _Masks] = {}
        self._of_batch: Tensor | None = None
        self._inputs: dict[int, Tensor] = {}

    @contextmanager
    def follow(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Record the inputs of the modules that enclose these layers, to identify routed rows."""
        with ExitStack() as stack:
            stack.callback(self._inputs.clear)
            for module in {around: None for layer in layers for around in self.around(layer)}:
                hook = module.register_forward_pre_hook(self._note_input, with_kwargs=True)
                stack.enter_context(hook)
            yield

    def _note_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor) and hidden.is_floating_point():
            self._inputs[id(module)] = hidden
        else:
            self._inputs.pop(id(module), None)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the masks of all forwards in this context."""
        hooks = [(module, self._note) for module in self._takers]
        hooks += [(attention, self._warn) for attention in self._attentions]
        with ExitStack() as stack:
            stack.callback(self.start_batch, None)
            for module, hook in hooks:
                stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            yield

    def start_batch(self, batch: Any) -> None:
        """Drop the masks of the last batch, and read the mask of this one."""
        self._masks.clear()
        self._tokens.clear()
        self._inputs.clear()
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if _is_mask(mask):
            self._of_batch = self._tokens_of(mask)
        elif isinstance(mask, Tensor) and mask.ndim >= 2:
            self._of_batch = self._tokens_of(mask, _attended)
        else:
            self._of_batch = None

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(zip(self._arguments[id(module)], args, strict=False)) | kwargs
        mask, memory = arguments.get("attention_mask"), arguments.get("encoder_hidden_states")
        of_memory = arguments.get("encoder_attention_mask")
        if _is_mask(mask):
            self._masks[id(module)] = _Masks(
                self._tokens_of(mask),
                memory,
                self._tokens_of(of_memory) if _is_mask(of_memory) else None,
            )
            return
        for name in _OF_TORCH:
            if isinstance(mask := arguments.get(name), Tensor) and mask.ndim == 2:
                is_token = self._tokens_of(mask, _not_padding)
                # The mask is (batch, length) even if hidden states are (length, batch, columns).
                if is_token is not None and _is_length_first(module):
                    is_token = is_token.T
                self._masks[id(module)] = _Masks(is_token)

    def _warn(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn, once, if an attention receives a mask of padding, and no enclosing module does."""
        arguments = dict(zip(_OF_ATTENTION, args, strict=False)) | kwargs
        mask = arguments.get("key_padding_mask")
        if self._warned or mask is None or arguments.get("query") is not arguments.get("key"):
            return
        if self._masks_of(module).own is None and self._tokens_of(mask, _not_padding) is not None:
            self._warned = True
            log.warning(
                "Some batches have padding, by the `key_padding_mask` of an attention: it counts "
                "as tokens. Give it as `attention_mask` in the batch or to the model (1 for "
                "tokens), or calibrate without padding."
            )

    def around(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules that enclose a module, from the innermost up to the model."""
        while (parent := self._parents.get(id(module))) is not None:
            yield parent
            module = parent

    def _tokens_of(
        self, mask: Tensor, find: Callable[[Tensor], Tensor] = lambda mask: mask != 0
    ) -> Tensor | None:
        """Return a mask, True for tokens, `None` if all are; cached, as it synchronises a GPU."""
        key = id(mask), find  # the mask is stored, too, so that no other can have its id
        if key not in self._tokens:
            is_token = find(mask)
            self._tokens[key] = mask, None if bool(is_token.all()) else is_token
        return self._tokens[key][1]

    def rows(self, x: Tensor, module: nn.Module, name: str) -> Tensor | None:
        """Return which rows of a layer's input are tokens, bool (rows,); `None` if all count.

        x is (batch, length, ..., columns), of which each position is one row, or (rows, columns).
        If its shape does not match the mask, all rows count, and `unmatched` records the shapes.
        """
        masks = self._masks_of(module)
        is_token = masks.of_memory if x is masks.memory else masks.own
        if is_token is None:
            return None
        rows = self._token_rows(x, module, is_token)
        if rows is None:
            self.unmatched.setdefault(name, (tuple(x.shape), tuple(is_token.shape)))
        return rows

    def rows_of_output(self, x: Tensor) -> Tensor | None:
        """Return which rows of the model's output are tokens, bool (rows,); `None` if all count.

        x is (batch, length, columns); if no mask has its (batch, length), all rows count.
        """
        masks = [self._of_batch, *(masks.own for masks in self._masks.values())]
        fitting = (mask for mask in masks if mask is not None and mask.shape == x.shape[:-1])
        return next((mask.flatten().to(x.device) for mask in fitting), None)

    def in_order(self, x: Tensor, module: nn.Module) -> bool:
        """Return whether a layer's input rows are all positions in order, not a router's selection.

        Rows without a batch dimension are in order if there are as many as in the hidden state of
        the outermost enclosing module that received one; see `follow`.
        """
        inputs = [self._inputs[id(m)] for m in self.around(module) if id(m) in self._inputs]
        return x.ndim > 2 or any(i.shape[:-1].numel() == x.shape[:-1].numel() for i in inputs[-1:])

    def _token_rows(self, x: Tensor, module: nn.Module, is_token: Tensor) -> Tensor | None:
        """Return which rows are tokens, by the mask or outer modules' inputs; `None` if unknown."""
        # A router sends rows of its own input to an expert, in another order; the second layer of
        # an expert reads as many rows as the expert, in the same order.
        aligned = _is_aligned(x, is_token)
        if aligned and x.ndim > 2:
            return is_token.flatten().to(x.device)
        for around in self.around(module):
            hidden = self._inputs.get(id(around))
            if hidden is None:
                continue
            if hidden.ndim > 2 and _is_aligned(hidden, is_token):
                rows = _rows_taken_from(x, hidden, is_token)
                if rows is not None:
                    return rows
            if hidden.shape[:-1].numel() == x.shape[:-1].numel():
                return self._token_rows(hidden, around, is_token)
        return is_token.flatten().to(x.device) if aligned else None

    def _masks_of(self, module: nn.Module) -> _Masks:
        """Return the masks of the innermost enclosing module that has some, else the batch's."""
        within = (id(m) for m in (module, *self.around(module)) if id(m) in self._masks)
        return next((self._masks[key] for key in within), _Masks(self._of_batch))


def taken(x: Tensor, rows: Tensor | None) -> Tensor:
    """Select an input's `rows` that are tokens, (tokens, n, columns); `None` selects all of x."""
    return x if rows is None else x.reshape(rows.numel(), -1, x.shape[-1])[rows]


def _is_aligned(x: Tensor, is_token: Tensor) -> bool:
    """Return whether x has one row, or one group of rows, for each position of the mask."""
    leading = [size for size in x.shape[:-1] if size != 1]
    positions = [size for size in is_token.shape if size != 1]
    return leading[: len(positions)] == positions or leading == [is_token.numel()]


def _rows_taken_from(x: Tensor, source: Tensor, is_token: Tensor) -> Tensor | None:
    """Return which rows of x (..., columns) are copies of token rows of `source`, in any order.

    The result is bool (rows,), or `None` if x has a row that `source` (batch, length, columns)
    lacks.
    """
    columns = x.shape[-1]
    if x.dtype != source.dtype or source.shape[-1] != columns:
        return None
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(2**62, (columns,), generator=generator).to(x.device)
    as_integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]

    def hashes(rows: Tensor) -> Tensor:
        bits = rows.reshape(-1, columns).contiguous().view(as_integer)
        return (bits.to(torch.int64) * factors).sum(1)  # exact, modulo 2^64

    row_hashes, source_hashes = hashes(x), hashes(source)
    if not bool(torch.isin(row_hashes, source_hashes).all()):
        return None
    return torch.isin(row_hashes, source_hashes[is_token.flatten().to(x.device)])


def _takes_mask(module: nn.Module) -> bool:
    """Return whether a module can be called with the mask of its own hidden state."""
    try:
        names = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):  # compiled callables may have no signature
        return False
    # nn.Transformer takes two masks, and passes each to its encoder or decoder.
    return "attention_mask" in names or sum(name in names for name in _OF_TORCH) == 1


def _not_padding(mask: Tensor) -> Tensor:
    """Invert a mask of torch, which is True or −∞ for padding: True for tokens."""
    if mask.is_floating_point():
        return mask > torch.finfo(mask.dtype).min
    return mask == 0


_LEAST_SCORE = -1000.0
"""The largest addend to a score that excludes a position; biases by distance are larger."""


def _attended(mask: Tensor) -> Tensor:
    """Return which positions some query attends to, bool (batch, length).

    A mask (batch, ..., queries, length) is True or 1 for an attended pair, or is added to its
    score. A mask (batch, length) is added to the scores of all queries.
    """
    attends = mask > _LEAST_SCORE if mask.is_floating_point() else mask != 0
    return attends.flatten(1, -2).any(1) if mask.ndim > 2 else attends


def _is_length_first(module: nn.Module) -> bool:
    """Return whether the attention in a module takes hidden states as (length, batch, columns)."""
    inside = (m for m in module.modules() if isinstance(m, nn.MultiheadAttention))
    return any(not attention.batch_first for attention in inside)


def _is_mask(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a mask (batch, length): integers, or 0.0 and 1.0, not addends."""
    if not isinstance(value, Tensor) or value.ndim != 2:
        return False
    if not value.is_floating_point():
        return True
    # A mask of zeros alone is one to add, without padding.
    return bool(((value == 0) | (value == 1)).all()) and bool((value == 1).any())


def _parents(model: nn.Module) -> dict[int, nn.Module]:
    parents: dict[int, nn.Module] = {}
    for module in model.modules():
        for child in module.children():
            parents.setdefault(id(child), module)
    return parents
