"""A head of 8 bits: what maps hidden states to logits reads half of its bytes a token.

An embedding table that is tied to the head has the same 8 bits, and no tensors of its own.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from mrp_sparse.errors import OptionError
from mrp_sparse.formats.eight_bit import why_not_rounded
from mrp_sparse.layers.eight_bit_linear import EightBitLinear, EightBitTable


@dataclass(frozen=True)
class Head:
    """Where a model has its head.

    Attributes:
        name: Name of the linear layer that gives the logits.
        table: Name of the embeddings that are tied to it, `None` where they have their own weight.
    """

    name: str
    table: str | None

    @classmethod
    def of(cls, model: Any) -> Self:
        """Find the head of a model of transformers, and whether it can have 8 bits.

        Raises:
            OptionError: It cannot: there is none, its columns are no multiple of 16, or its weight
                is tied to other modules than plain embeddings.
        """
        layer = model.get_output_embeddings()
        kind = type(model).__name__
        if type(layer) is not nn.Linear:
            found = "none" if layer is None else f"a {type(layer).__name__}"
            raise OptionError(f"a head of 8 bits is made of a linear layer; {kind} has {found}")
        if reason := why_not_rounded(layer.in_features):
            raise OptionError(reason)
        names = {id(module): name for name, module in model.named_modules()}
        name = names[id(layer)]
        tied = _tied_to(model, f"{name}.weight", layer.weight)
        if not tied:
            return cls(name, None)
        embeddings = model.get_input_embeddings()
        table = names.get(id(embeddings))
        if type(embeddings) is not nn.Embedding or embeddings.max_norm or tied != {table}:
            raise OptionError(
                f"the head of {kind} is tied to {', '.join(sorted(tied))}, where its 8 bits would "
                "do other things than in plain embeddings"
            )
        return cls(name, table)

    @classmethod
    def named(cls, model: Any, name: str) -> Self:
        """The head that a file says has 8 bits.

        Raises:
            OptionError: The model has no such head that could have them.
        """
        if not hasattr(model, "get_output_embeddings"):
            raise OptionError(f"{name}: a head of 8 bits is for models of transformers")
        head = cls.of(model)
        if head.name != name:
            raise OptionError(f"{name}: the head of {type(model).__name__} is {head.name}")
        return head

    def put(self, model: Any, layer: EightBitLinear) -> None:
        """Give the model a head of 8 bits in place of its own, and the table that goes with it."""
        model.set_submodule(self.name, layer)
        if self.table is not None:
            model.set_submodule(self.table, EightBitTable(layer).train(layer.training))
            # Neither is a parameter now that transformers could tie.
            weights = {f"{self.name}.weight", f"{self.table}.weight"}
            ties = model.all_tied_weights_keys
            model.all_tied_weights_keys = {a: b for a, b in ties.items() if not {a, b} & weights}

    def put_dense(self, model: Any, original: Any, dtype: torch.dtype | None) -> None:
        """Give the model back the head and the table of `original`, with the weight of 8 bits.

        `original` is of the same class, on the meta device.
        """
        packed: EightBitLinear = model.get_submodule(self.name)
        dense = packed.give(original.get_submodule(self.name), dtype)
        model.set_submodule(self.name, dense)
        if self.table is not None:
            table = original.get_submodule(self.table).train(packed.training)
            table.weight = dense.weight
            model.set_submodule(self.table, table)
            model.all_tied_weights_keys = original.all_tied_weights_keys


def _tied_to(model: Any, name: str, weight: Tensor) -> set[str]:
    """Names of the other modules that have this weight, or will have it once it is loaded.

    While weights are being loaded, tied ones are two parameters yet: the model's class tells.
    """
    pairs = [{target, source} for target, source in model.all_tied_weights_keys.items()]
    group = {n for n, p in model.named_parameters(remove_duplicate=False) if p is weight} | {name}
    for _ in pairs:
        group = group.union(*(pair for pair in pairs if pair & group))
    return {found.rpartition(".")[0] for found in group - {name}}


def round_head(model: Any) -> None:
    """Give a model of transformers a head of 8 bits, in place.

    Embeddings that are tied to it are read from the same 8 bits.

    Raises:
        OptionError: It cannot have one; see `Head.of`.
    """
    Head.of(model).put(model, EightBitLinear.from_linear(model.get_output_embeddings()))
