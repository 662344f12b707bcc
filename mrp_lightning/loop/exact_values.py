"""A LightningModule whose casts leave the tensors that its models keep in float32."""

from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from transformers import PreTrainedModel

from mrp_lightning.models.loading import wider_dtypes
from mrp_lightning.upstream.torch_names import recomputed_buffers


class ExactValues(LightningModule):
    """Casts its weights to another precision as transformers loads them in it.

    Buffers that are in no checkpoint, such as the frequencies of rotary positions, and the tensors
    that a class of transformers always keeps in float32, such as biases of routers, change only
    their device. Lightning's precisions `bf16-true` and `16-true` cast the whole module, and give
    the results of `dtype` this way.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        exact = _exact(self, fn(torch.empty(0)).dtype)

        def convert(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if id(tensor) in exact and applied.dtype != tensor.dtype:
                return tensor.to(applied.device)
            return applied

        return super()._apply(convert, recurse)


def _exact(module: nn.Module, dtype: torch.dtype) -> set[int]:
    """Return the identities of the tensors that keep their values in a module of this dtype."""
    exact = set()
    for part in module.modules():
        exact |= {id(tensor) for tensor in recomputed_buffers(part)}
        if isinstance(part, PreTrainedModel):
            wider = wider_dtypes(part, dtype, as_published=False)
            state = part.state_dict(keep_vars=True) if wider else {}
            exact |= {id(state[name]) for name in wider}
    return exact
