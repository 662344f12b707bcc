"""Lightning callbacks that prune."""

from callbacks.pruning import MRPCallback, PruningCallback

__all__ = ["MRPCallback", "PruningCallback"]
