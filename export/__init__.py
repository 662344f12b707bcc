"""Make a 2:4-pruned checkpoint small and fast."""

from export.format import pack, unpack
from export.layer import Sparse24Linear

__all__ = ["Sparse24Linear", "pack", "unpack"]
