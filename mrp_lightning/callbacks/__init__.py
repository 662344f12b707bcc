"""Lightning callbacks that prune a model, keep it sparse in training, and save it."""

from mrp_lightning.callbacks.keep_best import KeepBest
from mrp_lightning.callbacks.keep_sparsity import KeepSparsity
from mrp_lightning.callbacks.pruning import MRPCallback, PruningCallback
from mrp_lightning.callbacks.saving import SaveEvaluation, SaveModel

__all__ = [
    "KeepBest",
    "KeepSparsity",
    "MRPCallback",
    "PruningCallback",
    "SaveEvaluation",
    "SaveModel",
]
