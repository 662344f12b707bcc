"""Lightning callbacks that prune, keep what was pruned in training, and save."""

from callbacks.evaluation import SaveEvaluation
from callbacks.keep_sparsity import KeepSparsity
from callbacks.mrp import MRPCallback
from callbacks.pruning import PruningCallback
from callbacks.save import SaveModel

__all__ = ["KeepSparsity", "MRPCallback", "PruningCallback", "SaveEvaluation", "SaveModel"]
