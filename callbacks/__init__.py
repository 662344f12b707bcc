"""Lightning callbacks that prune, keep what was pruned in training, and save."""

from callbacks.keep_sparsity import KeepSparsity
from callbacks.mrp import MRPCallback
from callbacks.pruning import PruningCallback
from callbacks.save import SaveModel
from mrp_lightning.loop.save_evaluation import SaveEvaluation

__all__ = ["KeepSparsity", "MRPCallback", "PruningCallback", "SaveEvaluation", "SaveModel"]
