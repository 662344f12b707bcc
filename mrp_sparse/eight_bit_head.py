"""A head of 8 bits: the layer that maps hidden states to logits, at half of its 16-bit bytes.

An embedding table that is tied to the head is read from the same 8 bits, and stores no tensors.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from mrp_ground.errors import OptionError
from mrp_sparse.formats.eight_bit import EIGHT_BIT, unpack, why_not_rounded
from mrp_sparse.packed_linear import CAST, PackedLinear, is_in_source


class EightBitLinear(PackedLinear):
    """y = x Wᵀ + b with W of 8 bits: each row is whole numbers from −127 to 127 times a scale.

    The compiled CPU kernels multiply the numbers as they are, but for float64; all else unpacks W.
    `from_linear` takes the numbers that are nearest to the weights, as `pack` rounds them.

    Attributes:
        weight: The numbers, int8 (out_features, in_features).
        weight_scales: A scale for each row, (out_features,), in the layer's dtype.
    """

    FORMAT = EIGHT_BIT
    weight_scales: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the scales, the bias and the activations."""
        return self.weight_scales.dtype


class EightBitTable(nn.Module):
    """Embeddings read from the rows of a head of 8 bits. The module has no tensors of its own.

    Args:
        head: The head, which may be moved to another device later.
    """

    def __init__(self, head: EightBitLinear) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple, so that it is no submodule of this one

    @property
    def weight(self) -> Tensor:
        """The numbers of the head, int8 (rows, columns)."""
        return self._head[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (...) to embeddings (..., columns)."""
        return unpack(self.weight[ids], self._head[0].weight_scales[ids])


@dataclass(frozen=True)
class Head:
    """The names of a model's head, and of the embeddings that are tied to it.

    Attributes:
        name: Name of the linear layer that gives the logits.
        table: Name of the embeddings that are tied to it, `None` where they have their own weight.
    """

    name: str
    table: str | None

    @classmethod
    def of(cls, model: Any) -> Self:
        """Return the head of a transformers model, if it can have 8 bits.

        Raises:
            OptionError: There is no linear head, its columns are no multiple of 16, or its weight
                is tied to other modules than plain embeddings, or the model casts to its dtype.
        """
        layer = model.get_output_embeddings()
        kind = type(model).__name__
        # No subclasses: they may compute more than x Wᵀ + b.
        if type(layer) is not nn.Linear:
            head = "none" if layer is None else f"a {type(layer).__name__}"
            raise OptionError(f"a head of 8 bits is made of a linear layer; {kind} has {head}")
        if reason := why_not_rounded(layer.in_features):
            raise OptionError(reason)
        names = {id(module): name for name, module in model.named_modules()}
        name = names[id(layer)]
        if is_in_source(model, name, CAST):
            raise OptionError(f"{kind} casts to the dtype of its head's weight: to whole numbers")
        tied = _tied_to(model, f"{name}.weight", layer.weight)
        if not tied:
            return cls(name, None)
        embeddings = model.get_input_embeddings()
        table = names.get(id(embeddings))
        # `max_norm` rescales rows of the weight itself when they are read, and subclasses may scale
        # the result: rows of 8 bits do neither.
        if type(embeddings) is not nn.Embedding or embeddings.max_norm or tied != {table}:
            raise OptionError(
                f"the head of {kind} is tied to {', '.join(sorted(tied))}, where its 8 bits would "
                "do other things than in plain embeddings"
            )
        return cls(name, table)

    def put(self, model: Any, layer: EightBitLinear) -> None:
        """Replace the head of a model, and the embeddings that are tied to it, in place."""
        model.set_submodule(self.name, layer)
        if self.table is not None:
            model.set_submodule(self.table, EightBitTable(layer).train(layer.training))
            # Neither weight is a parameter any more, which transformers could tie.
            weights = {f"{self.name}.weight", f"{self.table}.weight"}
            ties = model.all_tied_weights_keys
            model.all_tied_weights_keys = {a: b for a, b in ties.items() if not {a, b} & weights}

    def put_dense(self, model: Any, original: Any) -> None:
        """Replace the head of 8 bits, and its embeddings, by dense modules with the same values.

        Args:
            model: The model with a head of 8 bits.
            original: A model of the same class on the meta device, whose modules are used.
        """
        packed: EightBitLinear = model.get_submodule(self.name)
        dense = packed.give(original.get_submodule(self.name))
        model.set_submodule(self.name, dense)
        if self.table is not None:
            table = original.get_submodule(self.table).train(packed.training)
            # One parameter for both, so that training and saving see them as tied again.
            table.weight = dense.weight
            model.set_submodule(self.table, table)
            model.all_tied_weights_keys = original.all_tied_weights_keys


def _tied_to(model: Any, name: str, weight: Tensor) -> set[str]:
    """Return the names of the other modules that share this weight, or will after loading.

    While a model is loaded, tied weights are still two parameters: the class declares the ties.
    """
    pairs = [{target, source} for target, source in model.all_tied_weights_keys.items()]
    group = {n for n, p in model.named_parameters(remove_duplicate=False) if p is weight} | {name}
    # Each pass adds the pairs that touch the group, so that chains of ties are closed after at most
    # as many passes as there are pairs.
    for _ in pairs:
        group = group.union(*(pair for pair in pairs if pair & group))
    return {tied.rpartition(".")[0] for tied in group - {name}}


def round_head(model: Any) -> None:
    """Round the head of a transformers model to 8 bits, in place.

    Embeddings that are tied to the head are read from the same 8 bits.

    Raises:
        OptionError: The head cannot have 8 bits; see `Head.of`.
    """
    Head.of(model).put(model, EightBitLinear.from_linear(model.get_output_embeddings()))
