"""The plan of a LightningModule: the layers, the head or the units that a pruning changes."""

from dataclasses import replace

from lightning.pytorch import LightningModule
from torch import nn

from mrp_lightning.errors import OptionError, PatternError, TargetError
from mrp_lightning.loop.module_parts import check_streamed_plan, checkpoint_root, streamed_blocks
from mrp_lightning.narrowing.blocks import shortening_plan
from mrp_lightning.narrowing.structure import BLOCKS
from mrp_lightning.narrowing.unit_parts import narrowing_plan
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.solver.grid import Grid
from mrp_lightning.targets.blocks import named_modules
from mrp_lightning.targets.layers import Layer, Linear, why_not_plain
from mrp_lightning.targets.plan import Plan, make_plan, refuse_unusual


def plan_for(module: LightningModule, settings: Settings) -> Plan:
    """Return the plan of a LightningModule's layers to prune by the settings; see `make_plan`.

    An OptionError is raised if `targets` names the head although `head_grid` is set, or if whole
    blocks of a streamed model are to be removed.
    """
    recipe, (prefix, model) = settings.recipe, checkpoint_root(module)
    is_streamed, sparsity = streamed_blocks(module) is not None, recipe.pattern.sparsity
    plan = make_plan(
        module,
        recipe.pattern,
        targets=settings.targets,
        ignore=settings.ignore,
        blocks=settings.blocks,
        skip_indivisible=settings.skip_indivisible,
        prefix=prefix,
        allow_meta=is_streamed,
        grid=recipe.grid,
    )
    check_streamed_plan(module, plan)
    head = _head(module, plan, recipe.for_head.grid)
    # The blocks stay in the plan, since the head is calibrated by a walk over them.
    if recipe.is_of_head_alone:
        plan = Plan(plan.blocks, {block.name: [] for block in plan.blocks}, outside=[])
    if settings.structure == BLOCKS:
        if is_streamed:
            raise OptionError(
                "`structure: blocks` runs all blocks many times to choose among them, and "
                "`streaming` would read each from its file every time. Load the model without "
                "`streaming`; `offload: true` keeps all blocks but one in CPU memory."
            )
        return shortening_plan(model, sparsity, plan)
    if settings.structure is not None:
        plan = narrowing_plan(model, settings.structure, sparsity, plan)
    return replace(plan, head=head)


def _head(module: LightningModule, plan: Plan, grid: Grid | None) -> Layer | None:
    """Return the output head of a module, checked to fit its grid, or `None` without a grid.

    Raises:
        TargetError: The model has no linear head, or its weight is not a plain tensor.
        PatternError: The groups of the grid do not fit its columns.
        OptionError: The head is one of the layers of the plan.
    """
    if grid is None:
        return None
    prefix, model = checkpoint_root(module)
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    name = next((n for n, part in named_modules(module) if part is outputs), None)
    if name is None or not isinstance(outputs, nn.Linear):
        kind = "none" if outputs is None else f"a {type(outputs).__name__}"
        raise TargetError(
            "`head_grid` needs a transformers model with a linear output head, as "
            f"`get_output_embeddings` returns it; {type(model).__name__} has {kind}. Leave "
            "`head_grid` out, or name a layer in `targets`."
        )
    head = Linear(name.removeprefix(prefix), outputs)
    if reason := why_not_plain(head):
        refuse_unusual({head.name: reason})
    if not grid.divides(head.columns):
        raise PatternError(
            f"`head_grid` {grid} does not fit {head.name}: {head.columns} columns do not divide "
            f"into groups of {grid.columns_together}. Take another grid, or leave it out."
        )
    if any(layer.key == head.key for layer in plan.outside):
        raise OptionError(
            f"`targets` names {head.name}, which `head_grid` puts on a grid of its own. Leave out "
            "one or the other."
        )
    return head
