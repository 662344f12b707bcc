"""The plan of a pruning: every layer, in its block, checked before any work starts."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from mrp_lightning.errors import PatternError, TargetError, counted
from mrp_lightning.solver.grid import Grid
from mrp_lightning.solver.patterns import Pattern
from mrp_lightning.targets.blocks import (
    Block,
    as_patterns,
    find_blocks,
    listed,
    matches,
    named_modules,
    refuse_not_finite,
    require_matches,
)
from mrp_lightning.targets.layers import (
    Expert,
    Layer,
    fused_weights,
    is_adapter,
    is_linear,
    is_recurrent,
    layers_of,
    other_weights,
    packed_weights,
    why_no_layer,
    why_not_plain,
)
from mrp_lightning.upstream.torch_names import without_compiled


@dataclass(frozen=True)
class Skipped:
    """A weight that stays dense."""

    name: str  # of the layer or parameter, as in the checkpoint
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True, eq=False)
class Plan:
    """The blocks and layers that will be pruned in a model."""

    blocks: list[Block]  # all repeated blocks, in the order of the module tree
    layers: dict[str, list[Layer]]  # the layers to prune, by the name of their block
    outside: list[Layer]  # layers in no block, calibrated in one pass after the blocks
    skipped: list[Skipped] = field(default_factory=list)  # weights that stay dense, with the reason
    head: Layer | None = None  # the output head, if it is quantised to a grid of its own

    @property
    def num_layers(self) -> int:
        """The number of layers to prune, and the head if it is quantised."""
        inside = sum(map(len, self.layers.values()))
        return inside + len(self.outside) + (self.head is not None)

    @property
    def steps(self) -> int:
        """The number of blocks, plus one for the layers outside of them, and one for the head."""
        return len(self.blocks) + bool(self.outside) + (self.head is not None)

    @property
    def num_steps(self) -> int:
        """The number of entries of a journal: blocks with layers, those outside, and the head."""
        blocks = sum(1 for layers in self.layers.values() if layers)
        return blocks + bool(self.outside) + (self.head is not None)

    def block_of(self, name: str) -> str | None:
        """Return the name of the block that holds a weight, `None` outside the blocks."""
        return next((b.name for b in self.blocks if f"{name}.".startswith(f"{b.name}.")), None)


def make_plan(
    model: nn.Module,
    pattern: Pattern,
    *,
    targets: Sequence[str] | str | None = None,
    ignore: Sequence[str] | str | None = None,
    blocks: Sequence[str] | str | None = None,
    skip_indivisible: bool = False,
    prefix: str = "",
    allow_meta: bool = False,
    grid: Grid | None = None,
) -> Plan:
    """Choose the layers of a model to prune, and check that all of them can be pruned.

    Args:
        model: Any module.
        pattern: The pattern to which the layers will be pruned.
        targets: Name patterns (see `blocks.matches`) of the layers to prune. `None` means all
            layers but routers: in the blocks, or in all of a model without blocks. A pattern that
            matches no layer in the blocks, such as `lm_head`, selects layers outside of them.
        ignore: Name patterns of the layers to leave out.
        blocks: Name patterns of the block lists or blocks; `None` to find them.
        skip_indivisible: Whether to leave out layers whose number of columns is no multiple of the
            pattern's or the grid's group.
        prefix: A prefix that reported names and regular expressions lack; names are reported with
            it if two would be equal otherwise.
        allow_meta: Whether weights may be on the meta device. Such a plan can only be shown.
        grid: The grid that weights are put on.

    Raises:
        TargetError: A pattern matches nothing, no layer is left, or weights are not plain; or a
            parameter of the model holds NaN or Inf, in whatever module it is.
        PatternError: The pattern, or the groups of the grid, do not fit layers.
    """
    # 1. Everything in the model, and 2. what the user wants of it.
    contents = _Contents.of(model, blocks, prefix)
    wish = _Wish.of(contents, as_patterns(targets), as_patterns(ignore))
    # 3. Each wanted weight is refused, left dense for a reason, or pruned. Refusals come in the
    # order in which a user can act on them, each with all layers that it is about.
    left = [*_routers(contents, wish), *_without_weights(contents, wish)]
    candidates = [contents.layers[n] for n in wish.layers if n not in {s.name for s in left}]
    unusual = _unusual(contents, wish, candidates, allow_meta)
    refuse_unusual({contents.shown(name): reason for name, reason in unusual.items()})
    unfit = _indivisible(candidates, pattern, grid)
    if unfit and not skip_indivisible:
        reasons = {contents.shown(each.name): each.reason for each in unfit}
        raise _misfit(reasons, candidates, pattern, grid)
    # Of a weight with several reasons the last one counts, the narrowest.
    left += [*_no_layers(contents, wish), *_tied(model, contents, candidates), *unfit]
    skipped = {each.name: replace(each, name=contents.shown(each.name)) for each in left}
    chosen = {
        layer.name: replace(layer, name=contents.shown(layer.name))
        for layer in candidates
        if layer.name not in skipped
    }
    if not chosen:
        raise _nothing_left(contents, list(skipped.values()))
    # All parameters are checked, not only those to prune: NaN in any of them spoils the result.
    parameters = ((contents.shown(without_compiled(n)), p) for n, p in model.named_parameters())
    refuse_not_finite(list(chosen.values()), parameters)
    # 4. The plan.
    return Plan(
        blocks=[replace(block, name=contents.shown(block.name)) for block in contents.blocks],
        layers={
            contents.shown(block): [chosen[n] for n in names if n in chosen]
            for block, names in contents.inside.items()
        },
        outside=[chosen[n] for n in wish.outside if n in chosen],
        skipped=list(skipped.values()),
    )


@dataclass(frozen=True, eq=False)
class _Contents:
    """The modules, layers and blocks of a model, by their names in it."""

    modules: dict[str, nn.Module]
    layers: dict[str, Layer]
    blocks: list[Block]
    inside: dict[str, list[str]]  # the layers of each block
    outside: list[str]  # the layers in no block
    prefix: str  # of names, which reports and checkpoints lack
    is_cut: bool  # whether names are unique without the prefix

    @classmethod
    def of(cls, model: nn.Module, patterns: Sequence[str] | str | None, prefix: str) -> "_Contents":
        """List what a model holds; `patterns` name its blocks."""
        blocks, modules = find_blocks(model, patterns), dict(named_modules(model))
        layers = {
            layer.name: layer for n, module in modules.items() for layer in layers_of(n, module)
        }
        inside = {b.name: [n for n in layers if f"{n}.".startswith(f"{b.name}.")] for b in blocks}
        in_blocks = {name for names in inside.values() for name in names}
        # Names without the prefix identify the layers in reports and checkpoints: they must be
        # unique.
        every = {*layers, *inside}
        return cls(
            modules=modules,
            layers=layers,
            blocks=blocks,
            inside=inside,
            outside=[name for name in layers if name not in in_blocks],
            prefix=prefix,
            is_cut=len({name.removeprefix(prefix) for name in every}) == len(every),
        )

    @property
    def in_blocks(self) -> list[str]:
        """The layers in blocks, block after block."""
        return [name for names in self.inside.values() for name in names]

    def shown(self, name: str) -> str:
        """Remove the prefix from a name, unless layers or blocks would get equal names by that."""
        return name.removeprefix(self.prefix) if self.is_cut else name

    def is_in_a_block(self, name: str) -> bool:
        """Return whether a module is a block, or in one."""
        return any(f"{name}.".startswith(f"{block.name}.") for block in self.blocks)


@dataclass(frozen=True, eq=False)
class _Wish:
    """The weights that the user wants to prune."""

    targets: tuple[str, ...]  # name patterns; none means all layers in the blocks but routers
    ignored: tuple[str, ...]  # name patterns
    prefix: str
    layers: list[str]  # the wanted layers, those in blocks first
    outside: list[str]  # the layers in no block that `targets` means, `ignored` ones included

    @classmethod
    def of(cls, contents: _Contents, targets: tuple[str, ...], ignored: tuple[str, ...]) -> "_Wish":
        """Return the layers of a model that the patterns of `targets` and `ignore` select."""
        prefix, in_blocks = contents.prefix, contents.in_blocks
        names = [*contents.layers]
        require_matches("targets", targets, names or [*contents.modules], prefix, contents.shown)
        require_matches("ignore", ignored, [*contents.modules, *names], prefix, contents.shown)
        # In a model with blocks, layers outside of them, such as `lm_head`, are pruned only for a
        # pattern that matches no layer in the blocks, and so must mean them.
        outside = contents.outside if not contents.blocks and not targets else []
        for pattern in targets:  # each by itself: `q_proj` and `lm_head` can be given together
            if not any(matches(name, pattern, prefix) for name in in_blocks):
                meant = [n for n in contents.outside if matches(n, pattern, prefix)]
                outside = [*outside, *(n for n in meant if n not in outside)]
        wish = cls(targets, ignored, prefix, [], outside)
        return replace(wish, layers=[n for n in (*in_blocks, *outside) if wish.includes(n)])

    def includes(self, name: str) -> bool:
        """Return whether the patterns want a module or a weight of this name."""
        is_target = (
            not self.targets
            or name in self.outside
            or any(matches(name, pattern, self.prefix) for pattern in self.targets)
        )
        return is_target and not any(matches(name, p, self.prefix) for p in self.ignored)


def _unusual(
    contents: _Contents, wish: _Wish, layers: list[Layer], allow_meta: bool
) -> dict[str, str]:
    """Return why weights cannot be read and written as matrices, by name."""
    reasons = {layer.name: why_not_plain(layer, allow_meta=allow_meta) for layer in layers}
    problems = {n: reason for n, reason in reasons.items() if reason}
    blocks = contents.blocks
    for name, module in contents.modules.items():
        if not wish.includes(name):
            continue
        if blocks and not any(name.startswith(f"{b.name}.") for b in blocks):
            continue
        if is_adapter(module):
            problems = {n: r for n, r in problems.items() if not n.startswith(f"{name}.")}
            problems[name] = "it is wrapped by an adapter; call merge_and_unload() first"
        elif not is_linear(module) and packed_weights(module):
            problems[name] = (
                f"it is a packed {type(module).__name__}; call `model.dequantize()` first, "
                "or load the directory that it was packed from"
            )
    return problems


def refuse_unusual(problems: dict[str, str]) -> None:
    """Raise a TargetError for weights that cannot be read as matrices, with the reason of each."""
    if problems:
        raise TargetError(
            f"{counted(len(problems), 'layer')} to prune cannot be read as plain "
            f"dense tensors. Change that, or leave them out with `ignore`:\n{listed(problems)}"
        )


def _no_layers(contents: _Contents, wish: _Wish) -> Iterator[Skipped]:
    """Yield the weights of two and more dimensions that no `Layer` represents."""
    blocks = contents.blocks
    for name, module in contents.modules.items():
        if blocks and not contents.is_in_a_block(name) and not is_recurrent(module):
            continue
        reason = why_no_layer(module)
        if reason and wish.includes(name):
            yield Skipped(name, tuple(module.weight.shape), reason)  # type: ignore[arg-type]
        for weight, tensor in fused_weights(module):
            if wish.includes(f"{name}.{weight}"):
                reason = f"fused weight of {type(module).__name__}, "
                reason += (
                    "whose products are made inside torch's attention, which shows no input of them"
                    if isinstance(module, nn.MultiheadAttention)
                    else "a stack of matrices in a layout that is not known here"
                )
                yield Skipped(f"{name}.{weight}", tuple(tensor.shape), reason)
        # Bare parameters outside of blocks, or in a model without blocks, are mostly position
        # embeddings.
        for weight, tensor in other_weights(module) if blocks or is_recurrent(module) else ():
            if wish.includes(f"{name}.{weight}"):
                reason = f"{type(module).__name__} is not a linear layer"
                yield Skipped(f"{name}.{weight}", tuple(tensor.shape), reason)


def _routers(contents: _Contents, wish: _Wish) -> Iterator[Skipped]:
    """Yield the routers of experts, whose errors cost most; none if `targets` are given."""
    for name in () if wish.targets else wish.layers:
        layer = contents.layers[name]
        parent = layer.owner.rpartition(".")[0]
        around = [contents.modules.get(each) for each in (parent, parent.rpartition(".")[0])]
        counts = [_counts_of_experts(module) for module in around if module is not None]
        has_experts = isinstance(getattr(around[0], "experts", None), nn.Module)
        # A router has an output for each expert, and the gate of a shared expert has one.
        chosen = set().union(*counts) | ({1} if has_experts else set())
        is_unknown = has_experts and not counts[0]
        if isinstance(layer, Expert) or not (chosen or is_unknown):
            continue
        # A weight that is no plain parameter cannot be read here; `_unusual` reports it.
        is_plain = why_not_plain(layer, allow_meta=True) is None
        if is_plain and (layer.weight.shape[0] in chosen or is_unknown):
            reason = "it routes tokens to experts; `targets` can name it"
            yield Skipped(name, tuple(layer.weight.shape), reason)


def _counts_of_experts(module: nn.Module) -> set[int]:
    """Return the numbers of experts directly in a module: in a list, or stacked in one tensor."""
    experts = getattr(module, "experts", None)
    stacks = [child for child in module.children() if not isinstance(child, nn.Conv1d)]
    weights = [weight for child in stacks for weight in child.parameters(recurse=False)]
    if isinstance(experts, nn.Module):
        weights += experts.parameters()
    counts = {weight.shape[0] for weight in weights if weight.ndim == 3}
    return counts | {len(experts)} if isinstance(experts, nn.ModuleList) else counts


def _without_weights(contents: _Contents, wish: _Wish) -> Iterator[Skipped]:
    """Yield the layers with no rows or no columns."""
    for layer in (contents.layers[name] for name in wish.layers):
        # A weight that is no plain parameter cannot be read here; `_unusual` reports it.
        is_plain = why_not_plain(layer, allow_meta=True) is None
        if is_plain and not layer.weight.numel():
            yield Skipped(layer.name, tuple(layer.weight.shape), "it has no weights")


def _tied(model: nn.Module, contents: _Contents, layers: list[Layer]) -> Iterator[Skipped]:
    """Yield the layers that stay dense because another one has the same weight."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = without_compiled(name.rpartition(".")[0])
        owners.setdefault(id(parameter), []).append(owner)
    targets = {(layer.owner, layer.key) for layer in layers}
    # 1. A weight with one user outside of the plan stays dense: that user's inputs are in no
    #    Hessian.
    # 2. A weight with several users in the plan is pruned once, for the inputs of the first.
    first: dict[Hashable, str] = {}
    for layer in layers:
        first_name = first.setdefault(layer.key, layer.name)
        foreign = [o for o in owners[id(layer.parameter)] if (o, layer.key) not in targets]
        if foreign and all(model.get_submodule(owner) is layer.module for owner in foreign):
            reason = (
                f"the same layer is used at {contents.shown(foreign[0])}, too, on other inputs; "
                "make a copy of it for each place"
            )
        elif foreign:
            reason = f"its weight is tied to {contents.shown(foreign[0])}, which is not pruned"
        elif first_name != layer.name:
            # A layer that its own block never calls stays dense, and so do all that are tied to it.
            shown = contents.shown(first_name)
            reason = f"its weight is tied to {shown}, with which it is pruned or stays dense"
        else:
            continue
        yield Skipped(layer.name, tuple(layer.weight.shape), reason)


def _indivisible(layers: list[Layer], pattern: Pattern, grid: Grid | None) -> list[Skipped]:
    unfit = []
    for layer in layers:
        reason = None
        if not pattern.divides(layer.grouped_columns):
            kind = "features" if layer.grouped_columns == layer.columns else "channels"
            reason = (
                f"{layer.grouped_columns} input {kind} do not divide into the groups of {pattern}"
            )
        elif grid is not None and not grid.divides(layer.columns):
            reason = f"{layer.columns} columns do not divide into groups of {grid.columns_together}"
        if reason is not None:
            unfit.append(Skipped(layer.name, tuple(layer.weight.shape), reason))
    return unfit


def _misfit(
    reasons: dict[str, str], layers: list[Layer], pattern: Pattern, grid: Grid | None
) -> PatternError:
    causes = []
    if not all(pattern.divides(layer.grouped_columns) for layer in layers):
        causes.append(f"`pattern` {pattern}")
    if grid is not None and not all(grid.divides(layer.columns) for layer in layers):
        causes.append(f"`grid` {grid}")
    verb = "do" if len(causes) > 1 else "does"
    return PatternError(
        f"{' and '.join(causes)} {verb} not fit {counted(len(reasons), 'layer')}. Name them in "
        f"`ignore`, or leave them dense by `skip_indivisible`:\n{listed(reasons)}"
    )


def _nothing_left(contents: _Contents, skipped: list[Skipped]) -> TargetError:
    num_layers = len(contents.layers)
    if skipped:
        why = "all were left out:\n" + listed({s.name: s.reason for s in skipped})
    elif not num_layers:
        why = "the model has no nn.Linear, nn.Conv2d or transformers Conv1D."
    elif not contents.in_blocks:
        why = f"its {num_layers} linear layers are outside the blocks; see `blocks`, `targets`."
    else:
        why = "`targets` and `ignore` leave none."
    return TargetError(f"Found no layer to prune: {why}")
