"""The plan of a pruning: every layer, in its block, checked before any work starts."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from mrp_ground.grid import Grid
from mrp_lightning.errors import PatternError, TargetError, counted
from mrp_lightning.solver.patterns import Pattern
from mrp_lightning.targets.blocks import (
    Block,
    as_patterns,
    find_blocks,
    listed,
    matches,
    named_modules,
    require_matches,
)
from mrp_lightning.targets.layers import (
    Expert,
    Layer,
    Linear,
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
from mrp_lightning.targets.values import refuse_not_finite
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
        """The number of layers to prune."""
        inside = sum(map(len, self.layers.values()))
        return inside + len(self.outside) + (self.head is not None)

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
            layers in the blocks but routers, or all layers of a model without blocks. A pattern
            that matches no layer in the blocks, such as `lm_head`, selects layers outside of them.
        ignore: Name patterns of the layers to leave out.
        blocks: Names of the block lists or blocks; `None` to find them.
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
    target_patterns, ignore_patterns = as_patterns(targets), as_patterns(ignore)
    block_list = find_blocks(model, blocks)
    modules = dict(named_modules(model))
    layers = {layer.name: layer for n, module in modules.items() for layer in layers_of(n, module)}
    linear = list(layers)
    inside = {b.name: [n for n in linear if f"{n}.".startswith(f"{b.name}.")] for b in block_list}
    in_blocks = [name for names in inside.values() for name in names]

    # Names without the prefix identify the layers in reports and checkpoints: they must be unique.
    every = {*layers, *(b.name for b in block_list)}
    is_cut = len({name.removeprefix(prefix) for name in every}) == len(every)

    def shown(name: str) -> str:
        """Remove the prefix from a name, unless another module has the shorter name."""
        return name.removeprefix(prefix) if is_cut else name

    require_matches("targets", target_patterns, linear or list(modules), prefix, shown)
    require_matches("ignore", ignore_patterns, [*modules, *linear], prefix, shown)
    # In a model with blocks, layers outside of them, such as `lm_head`, are pruned only for a
    # pattern that matches no layer in the blocks, and so must mean them.
    not_in_blocks = [n for n in linear if n not in set(in_blocks)]
    outside = not_in_blocks if not block_list and not target_patterns else []
    for pattern_ in target_patterns:
        if not any(matches(name, pattern_, prefix) for name in in_blocks):
            outside += [
                n for n in not_in_blocks if matches(n, pattern_, prefix) and n not in outside
            ]

    def is_wanted(name: str) -> bool:
        named = (
            not target_patterns
            or name in outside
            or any(matches(name, p, prefix) for p in target_patterns)
        )
        return named and not any(matches(name, p, prefix) for p in ignore_patterns)

    names = [n for n in (*in_blocks, *outside) if is_wanted(n)]
    # `targets` is the user's own choice, which may include routers.
    routers = [] if target_patterns else list(_routers(modules, layers, names))
    # A weight that is no plain parameter cannot be read here; `_unusual` reports it.
    plain = [n for n in names if why_not_plain(layers[n], allow_meta=True) is None]
    empty = [n for n in plain if not layers[n].weight.numel()]
    names = [n for n in names if n not in {*empty, *(router.name for router in routers)}]
    targeted = [layers[n] for n in names]
    unusual = _unusual(
        modules, targeted, [n for n in modules if is_wanted(n)], block_list, allow_meta
    )
    _refuse_unusual({shown(name): reason for name, reason in unusual.items()})
    unfit = _indivisible(targeted, pattern, grid)
    if unfit and not skip_indivisible:
        lines = listed({shown(each.name): each.reason for each in unfit})
        cause = f"`pattern` {pattern}" if pattern.group > 1 else f"`grid` {grid}"
        raise PatternError(
            f"{cause} does not fit {counted(len(unfit), 'layer')}. Name them in "
            f"`ignore`, or leave them dense with `skip_indivisible: true`:\n{lines}"
        )
    tied = _tied(model, targeted, shown)
    no_weights = [Skipped(n, tuple(layers[n].weight.shape), "it has no weights") for n in empty]
    every_skipped = (
        *routers,
        *no_weights,
        *_no_layers(modules, block_list, is_wanted),
        *tied,
        *unfit,
    )
    skipped = {s.name: replace(s, name=shown(s.name)) for s in every_skipped}
    chosen_layers = {n: replace(layers[n], name=shown(n)) for n in names if n not in skipped}
    if not chosen_layers:
        _nothing_left(linear, in_blocks, list(skipped.values()))
    # All parameters are checked, not only those to prune: NaN in any of them spoils the result.
    parameters = ((shown(without_compiled(n)), p) for n, p in model.named_parameters())
    refuse_not_finite(list(chosen_layers.values()), parameters)
    return Plan(
        blocks=[replace(b, name=shown(b.name)) for b in block_list],
        layers={
            shown(b.name): [chosen_layers[n] for n in inside[b.name] if n in chosen_layers]
            for b in block_list
        },
        outside=[chosen_layers[n] for n in outside if n in chosen_layers],
        skipped=list(skipped.values()),
    )


def find_head(root: nn.Module, model: nn.Module, grid: Grid, prefix: str = "") -> Layer:
    """Return the output head of a model, and check that it can be put on a grid.

    Args:
        root: The module that holds the model.
        model: A transformers model, which names its head.
        grid: The grid.
        prefix: A prefix of names in `root` that the name of the layer lacks.

    Raises:
        TargetError: The model has no linear head, or its weight is not a plain tensor.
        PatternError: The groups of the grid do not fit its columns.
    """
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    name = next((n for n, module in named_modules(root) if module is outputs), None)
    if name is None or not isinstance(outputs, nn.Linear):
        kind = "none" if outputs is None else f"a {type(outputs).__name__}"
        raise TargetError(
            "`head_grid` needs a transformers model with a linear output head, as "
            f"`get_output_embeddings` returns it; {type(model).__name__} has {kind}. Leave "
            "`head_grid` out, or name a layer in `targets`."
        )
    head = Linear(name.removeprefix(prefix), outputs)
    if reason := why_not_plain(head):
        _refuse_unusual({head.name: reason})
    if not grid.divides(head.columns):
        raise PatternError(
            f"`head_grid` {grid} does not fit {head.name}: {head.columns} columns do not divide "
            f"into groups of {grid.columns_together}. Take another grid, or leave it out."
        )
    return head


def _unusual(
    modules: dict[str, nn.Module],
    layers: list[Layer],
    wanted: list[str],
    blocks: list[Block],
    allow_meta: bool,
) -> dict[str, str]:
    """Return why weights cannot be read and written as matrices, by name."""
    reasons = {layer.name: why_not_plain(layer, allow_meta=allow_meta) for layer in layers}
    problems = {n: reason for n, reason in reasons.items() if reason}
    for name in wanted:
        if blocks and not any(name.startswith(f"{b.name}.") for b in blocks):
            continue
        if is_adapter(modules[name]):
            problems = {n: r for n, r in problems.items() if not n.startswith(f"{name}.")}
            problems[name] = "it is wrapped by an adapter; call merge_and_unload() first"
        elif not is_linear(modules[name]) and packed_weights(modules[name]):
            problems[name] = (
                f"it is a packed {type(modules[name]).__name__}; call `model.dequantize()` first, "
                "or load the directory that it was packed from"
            )
    return problems


def _refuse_unusual(problems: dict[str, str]) -> None:
    if problems:
        raise TargetError(
            f"{counted(len(problems), 'layer')} to prune cannot be read as plain "
            f"dense tensors. Change that, or leave them out with `ignore`:\n{listed(problems)}"
        )


def _no_layers(
    modules: dict[str, nn.Module], blocks: list[Block], is_wanted: Callable[[str], bool]
) -> Iterator[Skipped]:
    """Yield the weights of two and more dimensions that no `Layer` represents.

    In a model with blocks, only recurrent modules count outside of them.
    """
    for name, module in modules.items():
        inside = not blocks or any(f"{name}.".startswith(f"{b.name}.") for b in blocks)
        if not inside and not is_recurrent(module):
            continue
        reason = why_no_layer(module)
        if reason and is_wanted(name):
            yield Skipped(name, tuple(module.weight.shape), reason)  # type: ignore[arg-type]
        for weight, tensor in fused_weights(module):
            if is_wanted(f"{name}.{weight}"):
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
            if is_wanted(f"{name}.{weight}"):
                reason = f"{type(module).__name__} is not a linear layer"
                yield Skipped(f"{name}.{weight}", tuple(tensor.shape), reason)


def _routers(
    modules: dict[str, nn.Module], layers: dict[str, Layer], names: list[str]
) -> Iterator[Skipped]:
    """Yield the routers of experts, which stay dense: their errors cost most."""
    for name in names:
        parent = modules[layers[name].owner.rpartition(".")[0]]
        has_experts = isinstance(getattr(parent, "experts", None), nn.Module)
        if has_experts and not isinstance(layers[name], Expert):
            reason = "it routes tokens to experts; `targets` can name it"
            yield Skipped(name, tuple(layers[name].weight.shape), reason)


def _tied(model: nn.Module, layers: list[Layer], shown: Callable[[str], str]) -> Iterator[Skipped]:
    """Yield tied layers that stay out: a weight is pruned with its first layer, or never."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = without_compiled(name.rpartition(".")[0])
        owners.setdefault(id(parameter), []).append(owner)
    targets = {(layer.owner, layer.key) for layer in layers}
    first: dict[Hashable, str] = {}
    for layer in layers:
        first_name = first.setdefault(layer.key, layer.name)
        foreign = [o for o in owners[id(layer.parameter)] if (o, layer.key) not in targets]
        if foreign and all(model.get_submodule(owner) is layer.module for owner in foreign):
            reason = (
                f"the same layer is used at {shown(foreign[0])}, too, on other inputs; make a copy "
                "of it for each place"
            )
        elif foreign:
            reason = f"its weight is tied to {shown(foreign[0])}, which is not pruned"
        elif first_name != layer.name:
            reason = f"its weight is tied to {shown(first_name)}, with which it is pruned"
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


def _nothing_left(linear: list[str], in_blocks: list[str], skipped: list[Skipped]) -> None:
    if skipped:
        why = "all were left out:\n" + listed({s.name: s.reason for s in skipped})
    elif not linear:
        why = "the model has no nn.Linear, nn.Conv2d or transformers Conv1D."
    elif not in_blocks:
        why = f"its {len(linear)} linear layers are outside the blocks; see `blocks`, `targets`."
    else:
        why = "`targets` and `ignore` leave none."
    raise TargetError(f"Found no layer to prune: {why}")
