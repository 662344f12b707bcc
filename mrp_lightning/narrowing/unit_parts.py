"""Find the parts of a model that belong to its units, by comparing two configurations.

The model is built twice without weights: by its configuration, and by one with fewer units. The
parameters that are smaller in the second model along some dimension, and the attributes of modules
that differ, belong to the units. So no model family needs code of its own. A configuration that
cannot describe fewer units is detected, since either nothing becomes smaller or parts that belong
to no unit do.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mrp_ground.grid import Grid
from mrp_lightning.errors import FormatError, OptionError, TargetError
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.narrowing.structure import (
    Attribute,
    BlockParts,
    Cut,
    NarrowingPlan,
    Structure,
)
from mrp_lightning.targets.layers import Expert, ExpertStack, Layer, holds_experts
from mrp_lightning.targets.plan import Plan
from mrp_lightning.upstream.torch_names import without_compiled

_MULTIPLE = 32
"""The number of neurons that remain is a multiple of this, for the speed of matrix kernels."""

_NEURONS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "hidden_dim", "d_ff")
_HEADS, _GROUPS = "num_attention_heads", "num_key_value_heads"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_k")
"""The entries of configurations that give the number of experts of each token."""
_PLAIN = (int, float, bool, str, type(None), tuple, list)

Sizes = dict[str, int]
"""Entries of a configuration that depend on the number of units, by name."""


def narrowing_plan(
    model: nn.Module, kind: str, sparsity: float, plan: Plan, grid: Grid | None = None
) -> NarrowingPlan:
    """Return the plan of removing whole units, made from the plan of all layers.

    With a grid, all layers of the plan are put on it.
    """
    structure = _find_structure(model, kind, sparsity, plan, grid)
    if grid is not None:
        return NarrowingPlan(
            blocks=plan.blocks,
            layers=plan.layers,
            outside=[],
            skipped=plan.skipped,
            structure=structure,
        )
    none: dict[str, list[Layer]] = {block.name: [] for block in plan.blocks}
    consumers = none | {name: list(p.consumers) for name, p in structure.blocks.items()}
    reading = {id(layer) for layers in consumers.values() for layer in layers}
    return NarrowingPlan(
        blocks=plan.blocks,
        layers=consumers,
        outside=[],
        structure=structure,
        others={
            name: [layer for layer in layers if id(layer) not in reading]
            for name, layers in plan.layers.items()
        },
    )


def _find_structure(
    model: nn.Module, kind: str, sparsity: float, plan: Plan, grid: Grid | None = None
) -> Structure:
    """Find the units of each block, and the parts of the model that belong to them.

    Args:
        model: The model.
        kind: "neurons", "heads" or "experts".
        sparsity: The fraction of the units to remove.
        plan: All layers of the model that could be pruned, in their blocks.
        grid: The grid that the layers are put on; the columns that remain are whole groups of it.

    Raises:
        TargetError: No configuration of the model's class describes the narrower model.
        OptionError: The sparsity removes no unit, or all, or transformers refuses their number.
    """
    if not isinstance(model, PreTrainedModel):
        raise TargetError(
            f"`structure: {kind}` needs a transformers model, whose configuration says how narrow "
            f"it is; got a {type(model).__name__}. Use `sparsity` or `pattern` without `structure`."
        )
    if not plan.blocks:
        raise _cannot(model, kind, "no repeated blocks were found in it")
    # Built from the configuration, the model must have the present shapes: otherwise shapes of a
    # narrower configuration say nothing about this model.
    text, dense = model.config.get_text_config(), _built(model, {}, kind)
    shapes = {name: tuple(p.shape) for name, p in dense.named_parameters()}
    parameters = {without_compiled(name): p for name, p in model.named_parameters()}
    if shapes != {name: tuple(p.shape) for name, p in parameters.items()}:
        raise _cannot(model, kind, "its weights are not of the sizes that its configuration says")
    layers = [layer for of_block in plan.layers.values() for layer in of_block]
    if kind == "experts" and not any(isinstance(layer, Expert) for layer in layers):
        raise _cannot(model, kind, "it has no experts that transformers stacks")
    # Families name their sizes differently; the first entry that changes exactly the parts of
    # units is the right one, and the others' reasons explain a failure.
    reasons: list[str] = []
    for units, entries in _candidates(text, kind, plan):
        columns = entries[_HEADS] * _head_size(text) if kind == "heads" else 1
        kept = _kept(kind, units, sparsity, _multiple(kind, columns, grid), _least(text, kind))

        def fitted(kept: int, units: int = units, entries: Sizes = entries) -> Structure:
            """Return the structure in which `kept` units remain, or raise `_Unfit`."""
            config = {name: kept * each for name, each in entries.items()} | _fixed(model, kind)
            narrower = _built(model, config, kind)
            attributes = list(_attributes(model, dense, narrower))
            blocks = dict(_parts(kind, model, dense, narrower, plan, units, kept, attributes))
            inside = {id(entry) for parts in blocks.values() for entry in parts.attributes}
            outside = [entry for entry in attributes if id(entry) not in inside]
            return Structure(kind, units, kept, blocks, config, outside)

        try:
            return fitted(kept)
        except _Refused as refusal:
            reason: _Unfit | None = _offer_nearest(fitted, kept, units, sparsity, refusal)
        except _Unfit as unfit:
            reason = unfit
        reasons.append(f"{' and '.join(entries)}: {reason}")
    names = ", ".join({"neurons": _NEURONS, "heads": (_GROUPS, _HEADS), "experts": _EXPERTS}[kind])
    listed = "; ".join(reasons) or f"it has none of the entries {names}"
    raise _cannot(model, kind, f"its configuration cannot say fewer of them ({listed})")


class _Unfit(Exception):  # noqa: N818 (a message to the search)
    """An entry of the configuration changes nothing, or parts that belong to no unit."""


class _Refused(_Unfit):
    """transformers refuses the configuration with this number of units."""


def _offer_nearest(
    fitted: Callable[[int], Structure], kept: int, units: int, sparsity: float, refusal: _Refused
) -> _Unfit:
    """Raise an OptionError with the nearest number of units that transformers accepts.

    Returns:
        The reason why there is no such number.
    """
    for count in sorted(range(1, units), key=lambda count: (abs(count - kept), -count)):
        try:
            kind = fitted(count).kind
        except _Refused:
            continue
        except _Unfit as unfit:
            return unfit
        raise OptionError(
            f"`structure: {kind}`: `sparsity` {sparsity:g} would leave {kept} of {units} {kind} a "
            f"block, which transformers refuses for this model ({refusal}). The nearest number "
            f"that it takes is {count}: give `sparsity` {(units - count) / units:.3g}."
        )
    return refusal


def _candidates(
    config: PreTrainedConfig, kind: str, plan: Plan
) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield numbers of units, each with the entries that give it and their values for one unit."""
    if kind == "heads":
        heads = getattr(config, _HEADS, None)
        groups = getattr(config, _GROUPS, None) or heads
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups == 0:
            each = {_HEADS: heads // groups}
            yield groups, each | ({_GROUPS: 1} if hasattr(config, _GROUPS) else {})
        return
    layers = [layer for layers in plan.layers.values() for layer in layers]
    if kind == "experts":
        widths = {len(layer.parameter) for layer in layers if isinstance(layer, Expert)}
    else:
        widths = {layer.columns for layer in layers}
    for name in _EXPERTS if kind == "experts" else _NEURONS:
        if not hasattr(config, name):
            continue
        value = getattr(config, name)
        if value is None and kind == "neurons":  # GPT-2: four times the hidden size
            value = 4 * config.hidden_size
        if isinstance(value, int) and value in widths:
            yield value, {name: 1}


def _fixed(model: PreTrainedModel, kind: str) -> Sizes:
    """Return entries to pin, such as `head_dim`, so that fewer units do not change other sizes."""
    config = model.config.get_text_config()
    if kind != "heads":
        return {}
    return {"head_dim": _head_size(config)}


def _head_size(config: PreTrainedConfig) -> int:
    size: int = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    return size


def _least(config: PreTrainedConfig, kind: str) -> int:
    """Return the smallest possible number of units: one, or as many experts as each token uses."""
    counts = (getattr(config, name, None) for name in _CHOSEN if kind == "experts")
    return max([1, *(count for count in counts if isinstance(count, int))])


def _multiple(kind: str, columns: int, grid: Grid | None) -> int:
    """Return the number of which the number of remaining units must be a multiple.

    It is 32 for neurons, else 1; with a grid, it is raised so that the units' columns, `columns`
    each, are whole groups of the grid.
    """
    least = _MULTIPLE if kind == "neurons" else 1
    if grid is None or not grid.whole_groups:
        return least
    return math.lcm(least, grid.columns_together // math.gcd(grid.columns_together, columns))


def _kept(kind: str, units: int, sparsity: float, multiple: int, least: int = 1) -> int:
    """Return the number of units that remain, the multiple of `multiple` nearest to the request."""
    least = max(least, multiple)
    # Ties: half a multiple of neurons is removed, half a head is not, being a large part of a
    # block.
    kept = multiple * math.ceil((1 - sparsity) * units / multiple - 0.5)
    if kind != "neurons":
        kept = units - multiple * math.ceil(sparsity * units / multiple - 0.5)
    if least <= kept < units:
        return kept
    if units == 1:
        raise OptionError(f"`structure: {kind}`: a block has one of them, which has to stay.")
    if units <= least:
        why = (
            f"each token is sent to {least} of them"
            if kind == "experts"
            else f"some multiple of {multiple} below that, as kernels and grids want, is to stay"
        )
        raise OptionError(
            f"`structure: {kind}`: a block has {units} {kind}, and {why}. This model cannot lose "
            "any."
        )
    step = f", in multiples of {multiple}," if multiple > 1 else ""
    if kept >= units:
        smallest = math.ceil(500 * multiple / units) / 1000
        if kind != "neurons":
            smallest = multiple / units
        effect, bound = "remove none", f"at least {smallest:.3g}"
    else:
        effect, bound = "leave none", f"at most {(units - least) / units:.3g}"
        if kept:
            effect = f"leave {kept}, fewer than the {least} that each token is sent to"
    raise OptionError(
        f"`sparsity` {sparsity:g} of {units} {kind} a block{step} would {effect}. Give {bound}."
    )


def _built(model: PreTrainedModel, entries: Mapping[str, int], kind: str) -> PreTrainedModel:
    """Build the model without weights from its configuration with changed entries."""
    config = copy.deepcopy(model.config)
    try:
        for name, value in entries.items():
            setattr(config.get_text_config(), name, value)
    except AttributeError as error:  # read-only, as Falcon's computed `head_dim`
        raise _Unfit(f"{name} follows from other entries") from error
    try:
        config = type(config).from_dict(config.to_dict())
    except StrictDataclassError as error:  # a validator of transformers
        reason = str(error).splitlines()[-1].strip(" .").removeprefix("ValueError: ")
        raise _Refused(reason) from error
    try:
        return build_without_weights(config, kind=type(model))
    except FormatError as error:
        if entries:
            raise _Unfit(str(error)) from error
        raise _cannot(model, kind, str(error)) from error


def _parts(
    kind: str,
    model: PreTrainedModel,
    dense: PreTrainedModel,
    narrower: PreTrainedModel,
    plan: Plan,
    units: int,
    kept: int,
    attributes: Sequence[Attribute],
) -> Iterator[tuple[str, BlockParts]]:
    """Yield the name and the parts of each block that are smaller in the narrower model."""
    modules = _modules(model)
    layers = {id(layer.parameter): layer for of_block in plan.layers.values() for layer in of_block}
    shapes = {name: parameter.shape for name, parameter in narrower.named_parameters()}
    if [name for name, _ in dense.named_parameters()] != list(shapes):
        raise _Unfit("it changes which weights there are")
    changed: dict[str, Tensor] = {
        name: x for name, x in dense.named_parameters() if x.shape != shapes[name]
    }
    # Buffers may change for experts alone (the bias of DeepSeek's router is one), and only if they
    # are saved: a checkpoint would not restore others.
    buffers, stored = dict(narrower.named_buffers()), dense.state_dict()
    for name, buffer in dense.named_buffers():
        if name in buffers and buffer.shape != buffers[name].shape:
            if kind != "experts" or name not in stored:
                raise _Unfit("it changes buffers")
            changed[name], shapes[name] = buffer, buffers[name].shape
    cuts_of: dict[str, list[tuple[Cut, Layer | None]]] = {block.name: [] for block in plan.blocks}
    paths = {block.name: _path(model, block.module) for block in plan.blocks}
    for name, parameter in changed.items():
        block = next((b for b, path in paths.items() if name.startswith(f"{path}.")), None)
        owner, _, parameter_name = name.rpartition(".")
        if block is None:
            raise _Unfit(f"it changes {name} too, which is in no block")
        # Each unit must own the same number of adjacent entries along a single dimension.
        dims = [d for d, size in enumerate(parameter.shape) if size != shapes[name][d]]
        size = parameter.shape[dims[0]]
        if len(dims) > 1 or size % units or shapes[name][dims[0]] * units != size * kept:
            raise _Unfit(f"it changes {name} otherwise than unit by unit")
        if kind != "heads" and size != units:
            raise _Unfit(f"{name} holds several projections in one")
        cut = Cut(modules[owner], parameter_name, dims[0], size // units)
        layer = layers.get(id(cut.tensor))
        if kind == "experts":
            layer = _stack_of(name, cut)
        elif layer is None and parameter.ndim > 1:
            raise _Unfit(f"{name} cannot be pruned: it is tied, or no linear layer")
        cuts_of[block].append((cut, layer))
    for block, cuts in cuts_of.items():
        inside = {id(module) for module in modules[paths[block]].modules()}
        own_attributes = [entry for entry in attributes if id(entry[0]) in inside]
        consumers = [layer for cut, layer in cuts if layer is not None and _reads(cut, layer)]
        if kind == "experts" and not cuts:
            continue  # a block of another kind, such as the first ones of DeepSeek
        # All consumers of a block must have as many columns for each unit: they lose the same ones.
        groups = {layer.columns // units for layer in consumers}
        if kind == "heads" and groups and any(cut.width > max(groups) for cut, _ in cuts):
            raise _Unfit("one weight holds queries, keys and values")
        if len(groups) != 1:
            raise _Unfit(f"{block} has no layer that reads them" if cuts else f"{block} has none")
        yield block, BlockParts(consumers, [cut for cut, _ in cuts], own_attributes, groups.pop())


def _path(model: nn.Module, block: nn.Module) -> str:
    return next(without_compiled(name) for name, m in model.named_modules() if m is block)


def _reads(cut: Cut, layer: Layer) -> bool:
    """Return whether a cut removes columns, and not rows, of a layer."""
    if isinstance(layer, ExpertStack):
        return True
    stored = layer.parameter.detach()
    is_transposed = layer.arranged(stored).stride() != stored.stride()
    return cut.dim == (0 if is_transposed else 1)


def _stack_of(name: str, cut: Cut) -> ExpertStack | None:
    """Return the cut stack of the matrices that read the experts' inner features, if any."""
    is_last = holds_experts(cut.module) and cut.name == "down_proj"
    return ExpertStack(name, cut.module) if is_last else None


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {without_compiled(name): module for name, module in model.named_modules()}


def _attributes(model: nn.Module, dense: nn.Module, narrower: nn.Module) -> Iterator[Attribute]:
    """Yield the attributes of modules whose values differ in the narrower model."""
    narrower_modules, modules = dict(narrower.named_modules()), _modules(model)
    for name, module in dense.named_modules():
        other = vars(narrower_modules[name]) if name in narrower_modules else {}
        for key, value in vars(module).items():
            if not isinstance(value, _PLAIN) or key not in other or name not in modules:
                continue
            if other[key] != value:
                yield modules[name], key, other[key]


def _cannot(model: nn.Module, kind: str, why: str) -> TargetError:
    return TargetError(
        f"`structure: {kind}`: a {type(model).__name__} cannot be made narrower: {why}. Use "
        "`sparsity` or `pattern` without `structure`."
    )
