"""Lightning callbacks that prune a model, keep it sparse in training, and save it."""

from mrp_lightning.callbacks.keep_sparsity import KeepSparsity
from mrp_lightning.callbacks.mrp import MRPCallback
from mrp_lightning.callbacks.pruning import PruningCallback
from mrp_lightning.callbacks.save import SaveModel
from mrp_lightning.loop.save_evaluation import SaveEvaluation

__all__ = ["KeepSparsity", "MRPCallback", "PruningCallback", "SaveEvaluation", "SaveModel"]
