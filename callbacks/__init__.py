"""Lightning callbacks that prune and save."""

from callbacks.evaluation import SaveEvaluation
from callbacks.pruning import MRPCallback, PruningCallback
from callbacks.save import SaveModel

__all__ = ["MRPCallback", "PruningCallback", "SaveEvaluation", "SaveModel"]
