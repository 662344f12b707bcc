"""The parts of a LightningModule, and what a pruning changes in it: layers, head or units."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from transformers import PreTrainedModel

from mrp_lightning.calibration.offload import CPU, held_on_cpu
from mrp_lightning.calibration.walks import replaced
from mrp_lightning.errors import OptionError, PatternError, StrategyError, TargetError
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.trainer import ModuleRunner
from mrp_lightning.models.streaming import StreamedBlocks
from mrp_lightning.narrowing.blocks import shortening_plan
from mrp_lightning.narrowing.structure import BLOCKS
from mrp_lightning.narrowing.unit_parts import narrowing_plan
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.solver.grid import Grid
from mrp_lightning.targets.blocks import named_modules
from mrp_lightning.targets.layers import Layer, Linear, why_not_plain
from mrp_lightning.targets.plan import Plan, make_plan, refuse_unusual
from mrp_lightning.upstream.torch_names import uncompiled, without_compiled


def language_models(module: LightningModule) -> dict[str, PreTrainedModel]:
    """Return the outermost `PreTrainedModel`s of a module, by name."""
    models: dict[str, PreTrainedModel] = {}
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in models)
        if isinstance(part, PreTrainedModel) and not inside:
            models[name] = part
    return models


def checkpoint_root(module: LightningModule) -> tuple[str, nn.Module]:
    """Return the prefix of the saved module's names in the LightningModule, and the saved module.

    That is the only outermost `PreTrainedModel`, the module of a `ModuleRunner`, or the whole.
    """
    models = language_models(module)
    # Of several models none can stand for the whole, so that the LightningModule is saved.
    if len(models) == 1:
        name, model = next(iter(models.items()))
        return f"{without_compiled(name)}.", model
    if isinstance(module, ModuleRunner):
        return "model.", uncompiled(module.model)
    return "", module


def extra_weights(module: LightningModule) -> dict[str, Tensor]:
    """Return the tensors of a module's `state_dict` that are not saved with the model, by name.

    A tensor that is tied to a weight of the model is saved with the model.
    """
    _, model = checkpoint_root(module)
    # By identity, not by name: `keep_vars` gives the parameters themselves, so that a tied weight
    # is recognised under any name.
    inside = {id(x) for x in model.state_dict(keep_vars=True).values()}
    state = module.state_dict(keep_vars=True).items()
    return {name: x for name, x in state if isinstance(x, Tensor) and id(x) not in inside}


def is_built_later(module: LightningModule) -> bool:
    """Return whether the module may make its layers after the callbacks' `setup`."""
    complete = CausalLM if isinstance(module, CausalLM) else LightningModule
    hooks = ("setup", "configure_model")
    return any(is_overridden(hook, module, parent=complete) for hook in hooks)


def streamed_blocks(module: LightningModule) -> StreamedBlocks | None:
    """Return the blocks that stay in files, `None` for a module in memory."""
    return module.streamed if isinstance(module, CausalLM) else None


def start_streamed(module: LightningModule, *, processes: int, is_kept: bool) -> None:
    """Let a streamed model read its blocks from its checkpoint, not from an earlier run's shards.

    Raise an OptionError without a journal (`is_kept`), since pruned blocks of a streamed model
    exist nowhere else, or if the module has weights outside of its model.
    """
    streamed = streamed_blocks(module)
    if streamed is None:
        return
    if not is_kept:
        raise OptionError(
            "`streaming` keeps each block in a file once it is pruned: the callback needs "
            "`save_dir`, and the trainer no `fast_dev_run`."
        )
    if extra := extra_weights(module):
        raise OptionError(
            f"`streaming` saves the Hugging Face model alone, and {type(module).__name__} has "
            f"weights beside it: {', '.join(list(extra)[:5])}. Load the model without `streaming`."
        )
    if processes > 1:
        raise StrategyError(
            f"`streaming` prunes in one process, which writes the blocks that it reads again. Got "
            f"{processes}. Use Trainer(devices=1), or load the model without `streaming`."
        )
    # After the checks, which leave the model as an earlier run left it.
    streamed.start_over()


def _check_streamed(streamed: StreamedBlocks, plan: Plan) -> None:
    """Raise a TargetError if a plan has blocks that are not streamed, or outer layers in files."""
    streamed_modules = set(streamed.blocks.values())
    misplaced = [block.name for block in plan.blocks if block.module not in streamed_modules]
    misplaced += [layer.name for layer in plan.outside if layer.parameter.is_meta]
    if misplaced:
        raise TargetError(
            "`blocks`: with `streaming`, the blocks are those that are read from the files, "
            f"{', '.join(list(streamed.blocks)[:2])} and so on. Leave `blocks` out. Others are: "
            f"{', '.join(misplaced)}."
        )


@contextmanager
def blocks_on_cpu(
    module: LightningModule, blocks: Callable[[], Sequence[nn.Module]]
) -> Iterator[None]:
    """Run `configure_model` on the CPU, and keep the `blocks` there, once they exist.

    Lightning calls `configure_model` with the accelerator as the default device, and moves the
    whole module there before any hook of a callback could prevent it.
    """
    original = module.configure_model

    @functools.wraps(original)  # Lightning checks whether it is overridden
    def configure_model() -> None:
        with CPU:
            original()

    with replaced(module, "configure_model", configure_model), held_on_cpu(module, blocks):
        yield


def plan_for(module: LightningModule, settings: Settings) -> Plan:
    """Return the plan of a LightningModule's layers to prune by the settings; see `make_plan`."""
    recipe, (prefix, model) = settings.recipe, checkpoint_root(module)
    streamed, sparsity = streamed_blocks(module), recipe.pattern.sparsity
    plan = make_plan(
        module,
        recipe.pattern,
        targets=settings.targets,
        ignore=settings.ignore,
        blocks=settings.blocks,
        skip_indivisible=settings.skip_indivisible,
        prefix=prefix,
        allow_meta=streamed is not None,
        grid=recipe.grid,
    )
    if streamed is not None:
        _check_streamed(streamed, plan)
    if not any(plan.layers.values()):
        settings.require_blocks()
    head = _head(module, plan, recipe.for_head.grid)
    # The blocks stay in the plan, since the head is calibrated by a walk over them.
    if recipe.is_of_head_alone:
        plan = Plan(plan.blocks, {block.name: [] for block in plan.blocks}, outside=[])
    if settings.structure == BLOCKS:
        if streamed is not None:
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
    """Return the output head of a module, checked to fit its grid, or `None` without a grid."""
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
