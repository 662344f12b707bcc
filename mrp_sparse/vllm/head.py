"""A head of 8 bits in vLLM, and the embeddings that are read from it where they are tied."""

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from mrp_sparse.formats import eight_bit
from mrp_sparse.vllm.linear import PackedMethod


class EightBitMethod(PackedMethod):
    """Method of a layer of 8 bits: multiply with it as a head, or look up embeddings in it."""

    def __init__(self) -> None:
        super().__init__(eight_bit.EIGHT_BIT)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Return the embeddings (..., columns) of token ids (...)."""
        return eight_bit.unpack(layer.weight[input_], layer.weight_scales[input_])

    def tie_weights(self, layer: ParallelLMHead, embed_tokens: Any) -> ParallelLMHead:
        """Let a head use the tensors of the embeddings, which are read under their name."""
        layer.tied_to = (embed_tokens,)  # in a tuple, so that it is no submodule of the head
        # The parameters are still empty. Their loaders fill the table, and the head takes its
        # tensors in `process_weights_after_loading`.
        for name in ("weight", "weight_scales"):
            setattr(layer, name, getattr(embed_tokens, name))
        layer.arrivals = embed_tokens.arrivals
        return layer

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that all was read; a tied head takes the tensors of its embeddings.

        Raises:
            FormatError: Tensors are damaged or missing.
        """
        (table,) = getattr(layer, "tied_to", (layer,))
        # vLLM calls this for the table and for the head, in either order. The first call finishes
        # the table and deletes `packed_parts`; the second only assigns.
        if hasattr(table, "packed_parts"):
            super().process_weights_after_loading(table)
        layer.weight, layer.weight_scales = table.weight, table.weight_scales
        for name in ("arrivals", "packed_parts"):
            layer.__dict__.pop(name, None)
