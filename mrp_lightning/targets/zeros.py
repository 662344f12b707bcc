"""The layers of a model that are pruned already, told by their weights alone."""

from torch import nn

from mrp_lightning.targets.blocks import named_modules
from mrp_lightning.targets.layers import Layer, layers_of
from mrp_lightning.targets.left_out import why_not_plain

LEAST_SPARSITY = 0.05
"""Trained weights are exactly zero by chance only; nobody prunes to less than this."""


def pruned_layers(model: nn.Module) -> list[Layer]:
    """The layers with at least 5% zeros, in the order of the module tree, each weight once.

    A layer of nothing but zeros was initialised so.
    """
    found: dict[object, Layer] = {}
    for name, module in named_modules(model):
        for layer in layers_of(name, module):
            if layer.key in found or why_not_plain(layer) is not None:
                continue
            zeros = int((layer.weight == 0).sum())
            if LEAST_SPARSITY * layer.weight.numel() <= zeros < layer.weight.numel():
                found[layer.key] = layer
    return list(found.values())
