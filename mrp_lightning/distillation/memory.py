"""The memory of a training step, measured on a few tokens before the first."""

import torch
from torch import Tensor

from mrp_lightning.distillation.divergence import LOGITS_MEMORY
from mrp_lightning.distillation.module import Distillation
from mrp_lightning.targets.blocks import find_blocks, pruned_layers

_TOKENS = 16
"""The tokens on which activations are measured: enough for tensors per window to be few."""


def needed_memory(module: Distillation, tokens: int) -> int:
    """Return about how many bytes a training step needs, beside both models.

    Each kept weight has a float32 value and two moments, and each weight of a pruned layer a place
    in a mask. Of two points of a step the larger counts: the end of the forward pass, with all
    activations and the last step's float32 gradients of what is kept, or the end of the backward
    pass, with the gradients of all trained weights. Activations are what autograd saves for a few
    tokens, in proportion: attention must not save its matrix of weights (`sdpa` does not). With
    gradient checkpointing they are those of one block, and the inputs of all.

    Args:
        module: The pruned and the dense model.
        tokens: The number of tokens of a batch.
    """
    model = module.model
    tables = {id(p) for table in module.embeddings() for p in table.parameters()}
    trained = [p for p in model.parameters() if module.train_embeddings or id(p) not in tables]
    pruned = pruned_layers(model)
    removed = sum(int((layer.view == 0).sum()) for layer in pruned)
    masks = sum(layer.view.numel() for layer in pruned)  # bool
    kept = sum(parameter.numel() for parameter in trained) - removed
    forward = 4 * kept + tokens * _activations(module)
    backward = sum(parameter.nbytes for parameter in trained)
    return 12 * kept + masks + max(forward, backward) + LOGITS_MEMORY


def _activations(module: Distillation) -> int:
    """Return the bytes per token that autograd saves in a forward pass, weights left out."""
    model = module.model
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=model.device)
    wanted = {p: p.requires_grad for p in model.parameters()}
    is_training = model.training
    model.train().requires_grad_(True)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            hidden = module.student.hidden(ids, None)
        whole = sum(saved.values()) // _TOKENS
    finally:
        model.train(is_training)
        for parameter, requires in wanted.items():
            parameter.requires_grad_(requires)
    if not module.gradient_checkpointing:
        return whole
    blocks = max(1, len(find_blocks(model)))
    return whole // blocks + blocks * hidden[0, 0].nbytes
