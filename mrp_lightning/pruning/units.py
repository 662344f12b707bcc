"""Remove whole neurons or heads of a block: the same columns of all layers that read them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.errors import TargetError
from mrp_lightning.narrowing.structure import BlockParts, Structure
from mrp_lightning.pruning.block import LayerSolver, Remover, WalkedBlock, calibrated_inputs
from mrp_lightning.pruning.prune_layers import Calibrated, measured
from mrp_lightning.records.block_result import LayerResult
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.solver.columns import ColumnSolution, remove_columns
from mrp_lightning.solver.problem import output_energy
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer


class UnitRemover(Remover):
    """Set the columns of whole neurons or heads to zero in the layers that read them.

    The layers of a block that read the units share the removed set, and so are solved as one matrix
    with their rows stacked.

    Args:
        structure: The units, and the number of them to remove.
        recipe: The recipe; with a grid, the remaining weights of all layers are quantised to it.
    """

    def __init__(self, structure: Structure, recipe: Recipe) -> None:
        self._structure = structure
        # The grid comes after the removal: scales of groups must not count columns that are gone.
        self._recipe = replace(recipe, grid=None)
        self._solver = None if recipe.grid is None else LayerSolver(recipe.grid_alone)

    def prune(self, block: WalkedBlock) -> list[LayerResult]:
        """Remove units of the block, and with a grid quantise what remains of all its layers.

        Quantisation takes a second calibration pass, since layers then read the remaining units.

        Raises:
            TargetError: The layers that read the units have different inputs.
            HessianError: The Hessian is unusable.
        """
        parts = self._structure.blocks.get(block.name or "")
        narrowed: list[LayerResult] = []
        layers = block.layers
        if parts is not None:
            narrowed, kept = self._remove(block, parts)
            if kept is None:
                return narrowed  # the caller refuses a block that is wider than the others
            layers = [parts.remainder(layer, kept) for layer in layers]
        if self._solver is None:
            return narrowed
        results = {result.name: result for result in narrowed}
        # The second calibration sees the block without the units, so that each Hessian is that of
        # the inputs which the quantised layer gets.
        quantised = self._solver.prune(replace(block, layers=layers), narrowed)
        results |= {result.name: result for result in quantised}
        for whole, layer in zip(block.layers, layers, strict=True):
            result = results[layer.name]
            # A layer that makes the units has lost rows, which the solver did not see.
            if result.is_pruned and len(layer.weight) < len(whole.weight):
                results[layer.name] = self._of_producer(result, whole)
                block.on_result(results[layer.name])
        return list(results.values())

    def put_on_grid(self, block: WalkedBlock, results: Sequence[LayerResult]) -> list[LayerResult]:
        """Quantise the layers that waited for the tuning of their block."""
        return list(results) if self._solver is None else self._solver.put_on_grid(block, results)

    @property
    def _removed(self) -> float:
        """The fraction of the units that is removed."""
        return self._structure.count / self._structure.units

    def _of_producer(self, result: LayerResult, layer: Layer) -> LayerResult:
        row = replace(result.row, shape=tuple(layer.weight.shape), sparsity=self._removed)
        return replace(result, row=row)

    def _remove(
        self, block: WalkedBlock, parts: BlockParts
    ) -> tuple[list[LayerResult], Tensor | None]:
        """Remove units from all layers of a block that read them.

        Returns:
            The results of these layers, and the numbers of the units that remain, on the CPU;
            `None` if the layers have no usable input.
        """
        results: list[LayerResult] = []
        kept = None
        for layers, calibrated in calibrated_inputs(replace(block, layers=list(parts.consumers))):
            if isinstance(calibrated, str):
                results += block.left_dense(layers, calibrated)
                continue
            if len(layers) != len(parts.consumers):
                raise TargetError(
                    f"`structure: {self._structure.kind}`: "
                    f"{', '.join(x.name for x in parts.consumers)} read the same "
                    f"{self._structure.kind}, but not the same input."
                )
            block.remember(layers)
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
            # On the CPU, since it indexes weights that may be on other devices.
            kept = (~solution.removed).nonzero()[:, 0].cpu()
        return results, kept

    def _solved(
        self, block: WalkedBlock, weights: Sequence[Tensor], group: int, calibrated: Calibrated
    ) -> ColumnSolution:
        """Remove the same columns of several weights.

        The loss of a set of columns is the sum over all rows that read it, so the weights are one
        matrix with their rows stacked.
        """
        weight, aim = torch.cat(list(weights)), calibrated.aim
        solution = remove_columns(
            weight,
            calibrated.inputs,
            self._structure.count,
            group=group,
            method=self._recipe.method.name,
            damping=self._recipe.damping,
            target=None if aim is None else aim.target(weight, calibrated.inputs, self._recipe),
        )
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
            sparsity=self._removed,
            zeros_before=int((dense == 0).sum()) / dense.numel() or None,
            own_target=None if calibrated.aim is None else calibrated.aim.own,
            **used,
        )
