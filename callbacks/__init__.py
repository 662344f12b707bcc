"""A short name for `mrp_lightning.callbacks`.

Use the long name if your project has a folder called `callbacks`.
"""

from mrp_lightning.callbacks import (
    KeepSparsity,
    MRPCallback,
    PruningCallback,
    SaveEvaluation,
    SaveModel,
)

__all__ = ["KeepSparsity", "MRPCallback", "PruningCallback", "SaveEvaluation", "SaveModel"]
