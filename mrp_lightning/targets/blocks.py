"""The repeated blocks of a model, the unit in which it is calibrated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from mrp_lightning.targets.layers import is_linear
from mrp_lightning.targets.left_out import fused_weights
from mrp_lightning.targets.names import matches, require_matches
from mrp_lightning.upstream.torch_names import COMPILED, uncompiled


@dataclass(frozen=True, eq=False)
class Block:
    """One repeated block."""

    name: str  # the full one in the model
    module: nn.Module
    chain: str  # the list in which it stands, where one block feeds the next


def find_blocks(model: nn.Module, patterns: Sequence[str] = ()) -> list[Block]:
    """Find the maximal `ModuleList`s of blocks with linear layers, of encoder and decoder both.

    The blocks are in the order of the module tree; there are none where nothing repeats. Patterns
    name lists, or single blocks, that are taken instead.

    Raises:
        TargetError: A pattern matches nothing.
    """
    modules = dict(named_modules(model))
    if patterns:
        lists = [name for name, module in modules.items() if name and list(module.children())]
        exact = [n for n in lists if any(n == p or n.endswith(f".{p}") for p in patterns)]
        require_matches("blocks", patterns, lists)
        wild = [n for n in lists if any(matches(n, p) for p in patterns)]
        chosen = _outermost(exact or wild)
    else:
        chosen = _outermost([name for name, module in modules.items() if _is_block_list(module)])
    blocks = []
    for name in chosen:
        module = modules[name]
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            children = module.named_children()
            blocks += [Block(f"{name}.{i}", uncompiled(child), name) for i, child in children]
        else:
            blocks.append(Block(name, module, name.rpartition(".")[0]))
    return blocks


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` with modules that were compiled in place of their wrappers."""
    for name, module in model.named_modules():
        if not hasattr(module, COMPILED):
            yield without_wrappers(name), module


def without_wrappers(name: str) -> str:
    """A name without the parts that `torch.compile` adds."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def _is_block_list(module: nn.Module) -> bool:
    """Blocks are modules of several parts: a list of bare layers (heads, an MLP) is none."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(next(uncompiled(block).children(), None) is not None for block in module)
        and any(is_linear(part) or any(fused_weights(part)) for part in module.modules())
    )


def _outermost(names: list[str]) -> list[str]:
    outermost: list[str] = []
    for name in names:
        if not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost.append(name)
    return outermost
