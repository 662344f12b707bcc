"""Accurate post-training sparsity for language models.

Shapes in the docstrings: `rows` and `columns` are a weight's output and input features, `tokens`
the calibration tokens that a layer saw.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mrp_lightning.environment import __version__ as __version__
from mrp_lightning.errors import (
    DataError,
    DependencyError,
    FormatError,
    HessianError,
    MethodError,
    NumericalWarning,
    OptionError,
    ParityError,
    PatternError,
    SaveError,
    StrategyError,
    TargetError,
)

if TYPE_CHECKING:
    from mrp_lightning.data.data_module import TextDataModule
    from mrp_lightning.distillation.module import Distillation
    from mrp_lightning.distillation.text import DistillationText
    from mrp_lightning.loop.causal_lm import CausalLM
    from mrp_lightning.loop.trainer import Trainer
    from mrp_lightning.loop.vocabulary import cut_vocabulary
    from mrp_lightning.pruning.arguments import BlockTuning
    from mrp_lightning.records.block_result import BlockResult
    from mrp_lightning.records.report import PruningReport
    from mrp_lightning.records.rows import BlockReport, LayerReport
    from mrp_lightning.solver.columns import ColumnSolution, prune_columns
    from mrp_lightning.solver.hessian import HessianAccumulator
    from mrp_lightning.solver.pruning import Solution, prune_weight
    from mrp_lightning.solver.recipe import Recipe

__all__ = ["BlockReport", "BlockResult", "BlockTuning", "CausalLM", "ColumnSolution", "DataError"]
__all__ += ["DependencyError", "Distillation", "DistillationText", "FormatError"]
__all__ += ["HessianAccumulator", "HessianError", "LayerReport", "MethodError", "NumericalWarning"]
__all__ += ["OptionError", "ParityError", "PatternError", "PruningReport", "Recipe", "SaveError"]
__all__ += ["Solution", "StrategyError", "TargetError", "TextDataModule", "Trainer"]
__all__ += ["cut_vocabulary", "prune_columns", "prune_weight"]

# Imported on first access (PEP 562): torch takes seconds, Lightning and transformers some more.
_LAZY = {
    "BlockReport": "mrp_lightning.records.rows",
    "BlockResult": "mrp_lightning.records.block_result",
    "BlockTuning": "mrp_lightning.pruning.arguments",
    "CausalLM": "mrp_lightning.loop.causal_lm",
    "ColumnSolution": "mrp_lightning.solver.columns",
    "Distillation": "mrp_lightning.distillation.module",
    "DistillationText": "mrp_lightning.distillation.text",
    "HessianAccumulator": "mrp_lightning.solver.hessian",
    "LayerReport": "mrp_lightning.records.rows",
    "PruningReport": "mrp_lightning.records.report",
    "Recipe": "mrp_lightning.solver.recipe",
    "Solution": "mrp_lightning.solver.pruning",
    "TextDataModule": "mrp_lightning.data.data_module",
    "Trainer": "mrp_lightning.loop.trainer",
    "cut_vocabulary": "mrp_lightning.loop.vocabulary",
    "prune_columns": "mrp_lightning.solver.columns",
    "prune_weight": "mrp_lightning.solver.pruning",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mrp_lightning' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
