"""A short name for `mrp_lightning.callbacks`.

Use the long name if your project has a folder called `callbacks`.
"""

from mrp_lightning.callbacks import (
    KeepBest,
    KeepSparsity,
    MRPCallback,
    PruningCallback,
    SaveEvaluation,
    SaveModel,
)

__all__ = [
    "KeepBest",
    "KeepSparsity",
    "MRPCallback",
    "PruningCallback",
    "SaveEvaluation",
    "SaveModel",
]
