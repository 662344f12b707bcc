"""Remove whole blocks from a model, if its configuration describes the blocks that stay.

As for units, the model is built twice without weights: by its configuration, and by one with fewer
blocks. Each block of the second must be made as the block of the first whose place it takes, but
for its number. So no model family needs code of its own: a configuration in which the kind of a
block follows from its number, as in a pattern of full and sliding attention without a list, is
recognised by a block that would become another one.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mrp_lightning.errors import OptionError, TargetError
from mrp_lightning.narrowing.structure import Attribute, set_attributes
from mrp_lightning.narrowing.unit_parts import UnfitError, built, differing_values, shapes_of
from mrp_lightning.targets.blocks import Block, named_modules
from mrp_lightning.targets.plan import Plan
from mrp_lightning.upstream.torch_names import uncompiled, without_compiled

_NUMBER = "num_hidden_layers"
_NOT_BY_BLOCK = ("_token_id", "_tokens", "architectures")
"""Ends of the names of entries whose lists have no value for each block."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ShorteningPlan(Plan):
    """The plan of removing whole blocks.

    The layers are all that could be pruned: the repair looks for one of them in each block.

    Attributes:
        count: The number of blocks to remove, at least one and not all.
        model: The model that holds them.
    """

    count: int
    model: PreTrainedModel


def shortening_plan(model: nn.Module, sparsity: float, plan: Plan) -> ShorteningPlan:
    """Return the plan of removing a fraction of the blocks, made from the plan of all layers.

    The fraction `sparsity` is rounded to whole blocks.

    Raises:
        TargetError: The model is none of transformers, has no list that holds all of its blocks,
            or no configuration of its class describes it with fewer blocks.
        OptionError: The sparsity removes no block, or all.
    """
    if not isinstance(model, PreTrainedModel):
        raise TargetError(
            "`structure: blocks` needs a transformers model, whose configuration says how many "
            f"blocks it has; got a {type(model).__name__}. Use `sparsity` or `pattern` without "
            "`structure`."
        )
    if not plan.blocks:
        raise _cannot(model, "no repeated blocks were found in it")
    _find_list(model, plan.blocks)
    number, count = len(plan.blocks), round(sparsity * len(plan.blocks))
    if not 0 < count < number:
        if number == 1:
            raise OptionError("`structure: blocks`: the model has one block, which has to stay.")
        raise OptionError(
            f"`structure: blocks`: `sparsity` {sparsity:g} would remove "
            f"{'none' if count == 0 else 'all'} of {number} blocks. Give at least "
            f"{1 / number:.3g} and at most {1 - 1 / number:.3g}."
        )
    shortened = ShorteningPlan(**vars(plan) | {"outside": []}, count=count, model=model)
    # Without its first block, every other one moves by one place: if all stay what they are, none
    # depends on its number.
    _renumbered(shortened, [0])
    return shortened


def remove_blocks(plan: ShorteningPlan, removed: Sequence[int]) -> ExitStack:
    """Remove blocks from a model in place, and from its configuration.

    The remaining blocks are numbered anew, also in the attributes (`layer_idx`) by which attention
    indexes a cache of keys and values. A TargetError is raised if the configuration does not
    describe them. The returned context, if it is entered, puts the blocks back at its end.
    """
    attributes = _renumbered(plan, removed)
    blocks = _find_list(plan.model, plan.blocks)
    rest = nn.ModuleList(block for k, block in enumerate(blocks) if k not in set(removed))
    owners = [
        (owner, name, rest)
        for owner in plan.model.modules()
        for name, child in owner.named_children()
        if child is blocks
    ]
    config = plan.model.config.get_text_config()
    entries = config_without(plan, removed).items()
    return set_attributes([*owners, *attributes, *((config, *entry) for entry in entries)])


def renumbered(name: str, removed: Sequence[str]) -> str | None:
    """Return the name of a module, such as `model.layers.7.mlp.down_proj`, once blocks are removed.

    It is `None` for a module in one of the `removed` blocks, at least one, such as
    `model.layers.3`.
    """
    path = removed[0].rpartition(".")[0]
    number, _, rest = name.removeprefix(f"{path}.").partition(".")
    if not name.startswith(f"{path}.") or not number.isdigit():
        return name
    if f"{path}.{number}" in removed:
        return None
    before = sum(int(block.rpartition(".")[2]) < int(number) for block in removed)
    return f"{path}.{int(number) - before}" + f".{rest}" * bool(rest)


def config_without(plan: ShorteningPlan, removed: Sequence[int]) -> dict[str, Any]:
    """Return the entries of the configuration that change without some blocks, by name.

    These are the number of blocks, and all lists with a value for each block, such as
    `layer_types`.
    """
    kept, number = _kept(plan, removed), len(plan.blocks)
    entries: dict[str, Any] = {_NUMBER: len(kept)}
    for name, value in plan.model.config.get_text_config().to_dict().items():
        is_by_block = isinstance(value, list | tuple) and not name.endswith(_NOT_BY_BLOCK)
        if is_by_block and len(value) == number:
            entries[name] = [value[k] for k in kept]
    return entries


def _kept(plan: ShorteningPlan, removed: Sequence[int]) -> list[int]:
    return [k for k in range(len(plan.blocks)) if k not in set(removed)]


def _find_list(model: PreTrainedModel, blocks: Sequence[Block]) -> nn.ModuleList:
    """Return the one `ModuleList` that holds all blocks; raise a TargetError if there is none."""
    modules = [block.module for block in blocks]
    for _, module in named_modules(model):
        if isinstance(module, nn.ModuleList) and [*map(uncompiled, module)] == modules:
            return module
    chains = ", ".join(dict.fromkeys(block.chain for block in blocks))
    raise _cannot(model, f"its blocks are not those of one list, but of {chains}")


def _renumbered(plan: ShorteningPlan, removed: Sequence[int]) -> list[Attribute]:
    """Return the attributes of modules that change without some blocks, with their new values."""
    model, number = plan.model, len(plan.blocks)
    if getattr(model.config.get_text_config(), _NUMBER, None) != number:
        raise _cannot(model, f"its configuration has no `{_NUMBER}` that is {number}")
    try:
        dense, shorter = built(model, {}), built(model, config_without(plan, removed))
    except UnfitError as unfit:
        raise _cannot(model, f"its configuration cannot say fewer of them ({unfit})") from unfit
    blocks = _find_list(model, plan.blocks)
    path = next(without_compiled(name) for name, m in model.named_modules() if m is blocks)
    numbers = {f"{path}.{k}.": f"{path}.{i}." for i, k in enumerate(_kept(plan, removed))}
    gone = tuple(f"{path}.{k}." for k in removed)
    comparison = _Comparison(dense, shorter, path, numbers, gone)
    if (reason := comparison.why_other()) is not None:
        raise _cannot(
            model,
            "no configuration of it describes the blocks that stay, since their kind follows from "
            f"their number ({reason})",
        )
    modules = {without_compiled(name): module for name, module in model.named_modules()}
    return [(modules[name], key, value) for name, key, value in comparison.changes()]


@dataclass(frozen=True, eq=False)
class _Comparison:
    """A model built twice without weights: with all blocks, and without some of them."""

    dense: PreTrainedModel
    shorter: PreTrainedModel
    path: str  # the name of the list of blocks
    numbers: dict[str, str]
    """The start of the names in each block that stays, such as `model.layers.7.`, and that in the
    shorter model."""
    gone: tuple[str, ...]  # the start of the names in each block that is removed

    def why_other(self) -> str | None:
        """Return why the shorter model is not the dense one without some blocks, else `None`."""
        fewer, stored = shapes_of(self.shorter), self.dense.state_dict()
        # What is outside of the blocks and in no checkpoint may vanish, as the frequencies of
        # Gemma 3's full attention do with the last block of that kind.
        expected = {
            self._renamed(name): shape
            for name, shape in shapes_of(self.dense).items()
            if not name.startswith(self.gone)
            and (name in fewer or name in stored or self._is_in_block(name))
        }
        different = [n for n in {**expected, **fewer} if expected.get(n) != fewer.get(n)]
        if different:
            return f"{different[0]} would get another shape, appear or vanish"
        for name, module, other in self._pairs():
            if type(module) is not type(other):
                kinds = type(module).__name__, type(other).__name__
                return f"{name}, a {kinds[0]}, becomes a {kinds[1]}"
            for key, value, new in differing_values(module, other):
                if self._is_in_block(name) and not self._is_number(name, value, new):
                    return f"`{key}` of {name} is {value} and becomes {new}"
        return None

    def changes(self) -> list[tuple[str, str, Any]]:
        """Return the names of modules of the dense model, their attributes, and new values."""
        return [
            (name, key, new)
            for name, module, other in self._pairs()
            for key, _, new in differing_values(module, other)
        ]

    def _pairs(self) -> list[tuple[str, nn.Module, nn.Module]]:
        """Return each module that stays, by its name in the dense model, and its counterpart."""
        shorter = dict(self.shorter.named_modules())
        return [
            (name, module, shorter[self._renamed(name)])
            for name, module in self.dense.named_modules()
            if not f"{name}.".startswith(self.gone) and self._renamed(name) in shorter
        ]

    def _renamed(self, name: str) -> str:
        for old, new in self.numbers.items():
            if f"{name}.".startswith(old):
                return (new + f"{name}."[len(old) :])[:-1]
        return name

    def _is_in_block(self, name: str) -> bool:
        return f"{name}.".startswith(tuple(self.numbers))

    def _is_number(self, name: str, value: object, new: object) -> bool:
        """Return whether values of a module in a block are the number of the block and its new."""
        names = name, self._renamed(name)
        old, renamed = (n[len(self.path) + 1 :].partition(".")[0] for n in names)
        # `True` equals 1, but numbers no block.
        return type(value) is type(new) is int and (str(value), str(new)) == (old, renamed)


def _cannot(model: nn.Module, why: str) -> TargetError:
    return TargetError(
        f"`structure: blocks`: a {type(model).__name__} cannot lose blocks: {why}. Use another "
        "`structure`, or `sparsity` or `pattern` without one."
    )
