"""Removing whole units from what reads them: solve once for all consumers, measure, write."""

import torch

from mrp_lightning.errors import TargetError
from mrp_lightning.processes import Processes
from mrp_lightning.pruning.prune_layer import Calibrated, measured
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.solver.columns import remove_columns
from mrp_lightning.solver.problem import output_energy
from mrp_lightning.solver.recipe import Recipe
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.structure import Structure


def remove_units(
    layers: list[Layer],
    calibrated: Calibrated,
    structure: Structure,
    recipe: Recipe,
    processes: Processes,
) -> list[LayerReport]:
    """Set the columns of some units to zero in the layers that read them, and say what was done.

    The layers are pruned in place. They share the set, and so are solved as one, their rows below
    each other.

    Args:
        layers: The consumers of a block, which read the same input.
        calibrated: The Hessian of the input, and the target.
        structure: What is removed whole, and how much of it.
        recipe: The method, and the damping.
        processes: The processes that prune the model together; each solves all of it.

    Raises:
        TargetError: Other consumers of the units read another input.
        HessianError: The Hessian is unusable.
    """
    inputs, aim = calibrated.inputs, calibrated.aim
    parts = next(parts for parts in structure.blocks.values() if layers[0] in parts.consumers)
    if len(layers) != len(parts.consumers):
        raise TargetError(
            f"`structure: {structure.kind}`: {', '.join(x.name for x in parts.consumers)} read the "
            f"same {structure.kind}, but not the same input."
        )
    weights = [layer.weight for layer in layers]
    weight = torch.cat(weights)
    zeros = [int((weight == 0).sum()) / weight.numel() for weight in weights]
    with measured(weight.device) as used:
        solution = remove_columns(
            weight,
            inputs,
            structure.count,
            group=parts.group,
            method=recipe.method.name,
            damping=recipe.damping,
            target=None if aim is None else aim.target(weight, inputs, recipe),
        )
        # All processes have the same sums, and yet another machine might round otherwise.
        pruned = processes.like_first_(solution.weight.contiguous())
    rows = []
    for layer, dense, new, before in zip(
        layers, weights, pruned.split([len(w) for w in weights]), zeros, strict=True
    ):
        wide = torch.promote_types(dense.dtype, torch.float32)
        change = new.to(wide) - dense.to(wide)
        loss, energy = (output_energy(x, inputs.hessian) for x in (change, dense))
        rows.append(
            LayerReport(
                name=layer.name,
                shape=tuple(dense.shape),
                method=recipe.method.name,
                sparsity=structure.count / structure.units,
                loss=loss,
                relative_loss=loss / energy if energy else 0.0,
                damping=solution.damping_used,
                gap=solution.gap,
                tokens=calibrated.tokens,
                dead_inputs=solution.dead_inputs,
                zeros_before=before or None,
                raised_damping=(
                    solution.damping_ratio if solution.damping_ratio > recipe.damping else None
                ),
                target_loss=solution.target_loss,
                own_target=None if aim is None else aim.own,
                swaps=solution.swaps,
                **used,
            )
        )
    for layer, new in zip(layers, pruned.split([len(w) for w in weights]), strict=True):
        layer.write_(new)
    return rows
