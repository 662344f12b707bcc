"""Lightning callbacks that prune and save."""

from callbacks.pruning import MRPCallback, PruningCallback
from callbacks.save import SaveModel

__all__ = ["MRPCallback", "PruningCallback", "SaveModel"]
