"""Remove whole neurons or heads of a block: the same columns of all layers that read them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.structure import Structure
from mrp_lightning.pruning.block import Remover, WalkedBlock, calibrated_inputs
from mrp_lightning.pruning.prune_layers import Calibrated, measured
from mrp_lightning.records.block_result import LayerResult
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.solver.columns import ColumnRecipe, ColumnSolution, remove_columns
from mrp_lightning.solver.problem import output_energy
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer


class UnitRemover(Remover):
    """Set the columns of whole neurons or heads to zero in the layers that read them.

    The layers of a block that read the units share the removed set, and so are solved as one matrix
    with their rows stacked.

    Args:
        structure: The units, and the number of them to remove.
        recipe: The recipe, without a grid.
    """

    def __init__(self, structure: Structure, recipe: Recipe) -> None:
        self._structure, self._recipe = structure, recipe

    def prune(self, block: WalkedBlock) -> list[LayerResult]:
        """Remove units from all layers of the block that read them.

        Raises:
            TargetError: The layers that read the units have different inputs.
            HessianError: The Hessian is unusable.
        """
        parts = self._structure.blocks.get(block.name or "")
        if parts is None:
            return []
        results: list[LayerResult] = []
        for layers, calibrated in calibrated_inputs(block, results):
            if len(layers) != len(parts.consumers):
                raise TargetError(
                    f"`structure: {self._structure.kind}`: "
                    f"{', '.join(x.name for x in parts.consumers)} read the same "
                    f"{self._structure.kind}, but not the same input."
                )
            block.report_progress(layers[0].name)
            weights = [layer.weight for layer in layers]
            with measured(weights[0].device) as used:
                solution = self._solved(block, weights, parts.group, calibrated)
            new = solution.weight.split([len(weight) for weight in weights])
            changes = zip(layers, weights, new, strict=True)
            rows = [self._row(*change, solution, calibrated, used) for change in changes]
            # Written last, when nothing can fail any more: after an error all are untouched.
            for layer, weight in zip(layers, new, strict=True):
                layer.write_(weight)
            results += block.published(map(LayerResult, rows))
        return results

    def _solved(
        self, block: WalkedBlock, weights: Sequence[Tensor], group: int, calibrated: Calibrated
    ) -> ColumnSolution:
        """Remove the same columns of several weights.

        The loss of a set of columns is the sum over all rows that read it, so the weights are one
        matrix with their rows stacked.
        """
        weight, aim = torch.cat(list(weights)), calibrated.aim
        recipe = ColumnRecipe(
            count=self._structure.count,
            group=group,
            method=self._recipe.method.name,
            damping=self._recipe.damping,
        )
        target = None if aim is None else aim.target(weight, calibrated.inputs, self._recipe)
        solution = remove_columns(weight, calibrated.inputs, recipe, target)
        # All processes have the same sums, but different machines may round the solution
        # differently.
        like_first_ = block.job.processes.like_first_
        return replace(
            solution,
            weight=like_first_(solution.weight.contiguous()),
            removed=like_first_(solution.removed.contiguous()),
        )

    def _row(
        self,
        layer: Layer,
        dense: Tensor,
        new: Tensor,
        solution: ColumnSolution,
        calibrated: Calibrated,
        used: Mapping[str, Any],
    ) -> LayerReport:
        """Return the report's row of one stacked layer, with the loss of this layer's own rows."""
        # The loss of the stack is of all its rows; ½·tr(ΔHΔᵀ) of the rows of one layer is its part.
        # In float32, since Δ is small against both weights, and bfloat16 has 8 bits.
        wide = torch.promote_types(dense.dtype, torch.float32)
        change = new.to(wide) - dense.to(wide)
        hessian = calibrated.inputs.hessian
        return LayerReport.of(
            replace(solution, loss=output_energy(change, hessian)),
            self._recipe,
            name=layer.name,
            shape=dense.shape,
            energy=output_energy(dense, hessian),
            tokens=calibrated.tokens,
            sparsity=self._structure.count / self._structure.units,
            zeros_before=int((dense == 0).sum()) / dense.numel() or None,
            own_target=calibrated.own_target,
            **used,
        )
