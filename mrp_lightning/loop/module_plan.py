"""The plan of a LightningModule: the layers, the head or the units that a pruning changes."""

from dataclasses import replace

from lightning.pytorch import LightningModule

from mrp_lightning.errors import OptionError
from mrp_lightning.loop.module_parts import check_streamed_plan, checkpoint_root, streamed_blocks
from mrp_lightning.narrowing.blocks import shortening_plan
from mrp_lightning.narrowing.structure import BLOCKS
from mrp_lightning.narrowing.unit_parts import narrowing_plan
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.targets.plan import Plan, find_head, make_plan


def plan_for(module: LightningModule, settings: Settings) -> Plan:
    """Return the plan of a LightningModule's layers to prune by the settings; see `make_plan`.

    An OptionError is raised if `targets` names the head although `head_grid` is set, or if whole
    blocks of a streamed model are to be removed.
    """
    plan = make_plan(
        module,
        settings.recipe.pattern,
        targets=settings.targets,
        ignore=settings.ignore,
        blocks=settings.blocks,
        skip_indivisible=settings.skip_indivisible,
        prefix=checkpoint_root(module)[0],
        allow_meta=streamed_blocks(module) is not None,
        grid=settings.recipe.grid,
    )
    check_streamed_plan(module, plan)
    prefix, model = checkpoint_root(module)
    recipe, head = settings.recipe, None
    if recipe.head_grid is not None:
        head = find_head(module, model, recipe.head_grid, prefix)
        if any(layer.key == head.key for layer in plan.outside):
            raise OptionError(
                f"`targets` names {head.name}, which `head_grid` puts on a grid of its own. Leave "
                "out one or the other."
            )
    # The blocks stay in the plan, since the head is calibrated by a walk over them.
    if recipe.is_of_head_alone:
        plan = Plan(plan.blocks, {block.name: [] for block in plan.blocks}, outside=[])
    sparsity = recipe.pattern.sparsity
    if settings.structure == BLOCKS:
        if streamed_blocks(module) is not None:
            raise OptionError(
                "`structure: blocks` runs all blocks many times to choose among them, and "
                "`streaming` would read each from its file every time. Load the model without "
                "`streaming`; `offload: true` keeps all blocks but one in CPU memory."
            )
        return shortening_plan(model, sparsity, plan)
    if settings.structure is not None:
        plan = narrowing_plan(model, settings.structure, sparsity, plan)
    return replace(plan, head=head)
