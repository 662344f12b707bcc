"""Pruning a `CausalLM` whose blocks stay in files."""

from lightning.pytorch import LightningModule

from mrp_lightning.errors import OptionError, StrategyError, TargetError
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.contents import weights_beside
from mrp_lightning.models.streaming import StreamedBlocks
from mrp_lightning.targets.plan import Plan


def streamed_blocks(module: LightningModule) -> StreamedBlocks | None:
    """The blocks of a module that stay in files, `None` for one that is in memory."""
    return module.streamed if isinstance(module, CausalLM) else None


def start_streamed(module: LightningModule, *, processes: int, is_kept: bool) -> None:
    """Let a streamed model be dense, whatever an interrupted run has pruned in its journal.

    To a module in memory nothing is done. `is_kept` says whether the run keeps a journal, without
    which nothing would be left of what is pruned.
    """
    streamed = streamed_blocks(module)
    if streamed is None:
        return
    if not is_kept:
        raise OptionError(
            "`streaming` keeps each block in a file once it is pruned: the callback needs "
            "`save_dir`, and the trainer no `fast_dev_run`."
        )
    if own := weights_beside(module):
        raise OptionError(
            f"`streaming` saves the Hugging Face model alone, and {type(module).__name__} has "
            f"weights beside it: {', '.join(list(own)[:5])}. Load the model without `streaming`."
        )
    if processes > 1:
        raise StrategyError(
            f"`streaming` prunes in one process, which writes the blocks that it reads again. Got "
            f"{processes}. Use Trainer(devices=1), or load the model without `streaming`."
        )
    streamed.start_over()


def check_streamed_plan(module: LightningModule, plan: Plan) -> None:
    """Refuse a plan with blocks that do not stay in files, and layers that would never be read."""
    streamed = streamed_blocks(module)
    if streamed is None:
        return
    known = set(streamed.blocks.values())
    wrong = [block.name for block in plan.blocks if block.module not in known]
    wrong += [layer.name for layer in plan.outside if layer.parameter.is_meta]
    if wrong:
        raise TargetError(
            "`blocks`: with `streaming`, the blocks are those that are read from the files, "
            f"{', '.join(list(streamed.blocks)[:2])} and so on. Leave `blocks` out. Others are: "
            f"{', '.join(wrong)}."
        )
