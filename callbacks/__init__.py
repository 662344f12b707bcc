"""The callbacks by a short name; `mrp_lightning.callbacks` has the same, whatever is near."""

from mrp_lightning.callbacks import (
    KeepSparsity,
    MRPCallback,
    PruningCallback,
    SaveEvaluation,
    SaveModel,
)

__all__ = ["KeepSparsity", "MRPCallback", "PruningCallback", "SaveEvaluation", "SaveModel"]
