"""Find what belongs to the neurons or heads of a model, by what its configuration changes.

The model is built twice without weights: as its configuration says, and with fewer units in it.
Whatever is smaller in the second one belongs to the units: which parameters, along which dimension,
and which attributes of modules. No family is known by its name, and a configuration that can not
say fewer units is found out, since then nothing gets smaller, or too much.
"""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mrp_lightning.errors import FormatError, OptionError, TargetError
from mrp_lightning.models.skeleton import build_without_weights
from mrp_lightning.targets.blocks import without_wrappers
from mrp_lightning.targets.layers import Layer
from mrp_lightning.targets.plan import Plan
from mrp_lightning.targets.structure import BlockParts, Cut, Structure

MULTIPLE = 32
"""The numbers of neurons that kernels like best are multiples of this."""

_NEURONS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "hidden_dim", "d_ff")
_HEADS, _GROUPS = "num_attention_heads", "num_key_value_heads"
_PLAIN = (int, float, bool, str, type(None), tuple, list)

Sizes = dict[str, int]
"""Entries of a configuration: the number of units, and what else says it."""


def narrowing_plan(model: nn.Module, kind: str, sparsity: float, plan: Plan) -> Plan:
    """The plan of removing units whole, made of that of all layers; see `find_structure`."""
    structure = find_structure(model, kind, sparsity, plan)
    consumers = {name: list(parts.consumers) for name, parts in structure.blocks.items()}
    reading = {id(layer) for layers in consumers.values() for layer in layers}
    return replace(
        plan,
        layers=consumers,
        outside=[],
        skipped=[],
        structure=structure,
        beside={
            name: [layer for layer in layers if id(layer) not in reading]
            for name, layers in plan.layers.items()
        },
    )


def find_structure(model: nn.Module, kind: str, sparsity: float, plan: Plan) -> Structure:
    """Find the units of each block, and what goes with them.

    Args:
        model: The model that is to be narrower.
        kind: "neurons" or "heads".
        sparsity: The fraction of the units to remove.
        plan: All layers of the model that could be pruned, in their blocks.

    Raises:
        TargetError: The model cannot be made narrower so that its configuration says it.
        OptionError: The sparsity removes none, or all.
    """
    if not isinstance(model, PreTrainedModel):
        raise TargetError(
            f"`structure: {kind}` needs a transformers model, whose configuration says how narrow "
            f"it is; got a {type(model).__name__}. Use `sparsity` or `pattern` without `structure`."
        )
    if not plan.blocks:
        raise _cannot(model, kind, "no repeated blocks were found in it")
    dense = _built(model, {}, kind)
    shapes = {name: tuple(p.shape) for name, p in dense.named_parameters()}
    parameters = {without_wrappers(name): p for name, p in model.named_parameters()}
    if shapes != {name: tuple(p.shape) for name, p in parameters.items()}:
        raise _cannot(model, kind, "its weights are not of the sizes that its configuration says")
    reasons: list[str] = []
    for units, entries in _candidates(model.config.get_text_config(), kind, plan):
        kept = _kept(kind, units, sparsity)
        try:
            config = {name: kept * each for name, each in entries.items()} | _fixed(model, kind)
            narrower = _built(model, config, kind)
            blocks = dict(_parts(kind, model, dense, narrower, plan, units, kept))
        except _Unfit as reason:
            reasons.append(f"{' and '.join(entries)}: {reason}")
            continue
        return Structure(kind, units, kept, blocks, config)
    names = ", ".join(_NEURONS if kind == "neurons" else (_GROUPS, _HEADS))
    told = "; ".join(reasons) or f"it has none of the entries {names}"
    raise _cannot(model, kind, f"its configuration cannot say fewer of them ({told})")


class _Unfit(Exception):  # noqa: N818 (a message to the search)
    """An entry of the configuration does not change what belongs to units alone."""


def _candidates(
    config: PreTrainedConfig, kind: str, plan: Plan
) -> Iterator[tuple[int, dict[str, int]]]:
    """The number of units, and by entry how many of what it counts a unit has."""
    if kind == "heads":
        heads = getattr(config, _HEADS, None)
        groups = getattr(config, _GROUPS, None) or heads
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups == 0:
            each = {_HEADS: heads // groups}
            yield groups, each | ({_GROUPS: 1} if hasattr(config, _GROUPS) else {})
        return
    widths = {layer.columns for layers in plan.layers.values() for layer in layers}
    for name in _NEURONS:
        if not hasattr(config, name):
            continue
        value = getattr(config, name)
        if value is None:  # GPT-2: four times the hidden size
            value = 4 * config.hidden_size
        if isinstance(value, int) and value in widths:
            yield value, {name: 1}


def _fixed(model: PreTrainedModel, kind: str) -> Sizes:
    """What a configuration must say beside the number of units, so that nothing else follows it."""
    config = model.config.get_text_config()
    if kind != "heads":
        return {}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"head_dim": size}


def _kept(kind: str, units: int, sparsity: float) -> int:
    """How many units stay: of neurons the nearest multiple of 32, of two the smaller."""
    multiple = MULTIPLE if kind == "neurons" else 1
    kept = multiple * math.ceil((1 - sparsity) * units / multiple - 0.5)
    if 0 < kept < units:
        return kept
    if units == 1:
        raise OptionError(f"`structure: {kind}`: a block has one of them, which has to stay.")
    step = f", in multiples of {multiple}," if multiple > 1 else ""
    if units <= multiple:
        raise OptionError(
            f"`structure: {kind}`: a block has {units} {kind}, and some multiple of {multiple} "
            "below that, so that kernels like it, is to stay. This model cannot lose any."
        )
    most, least = (units - multiple) / units, multiple / units
    bound = f"at least {math.ceil(500 * least) / 1000:g}" if kept else f"at most {most:.3g}"
    raise OptionError(
        f"`sparsity` {sparsity:g} of {units} {kind} a block{step} would "
        f"{'remove none' if kept else 'leave none'}. Give {bound}."
    )


def _built(model: PreTrainedModel, entries: Mapping[str, int], kind: str) -> PreTrainedModel:
    """The model without weights, as `from_pretrained` would build it from its changed `config`."""
    config = copy.deepcopy(model.config)
    try:
        for name, value in entries.items():
            setattr(config.get_text_config(), name, value)
    except AttributeError as error:  # FALCON computes its `head_dim`
        raise _Unfit(f"{name} follows from other entries") from error
    config = type(config).from_dict(config.to_dict())
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
) -> Iterator[tuple[str, BlockParts]]:
    """By block, what is smaller in the narrower model."""
    modules = {without_wrappers(name): module for name, module in model.named_modules()}
    layers = {id(layer.parameter): layer for mine in plan.layers.values() for layer in mine}
    before, after = dict(dense.named_parameters()), dict(narrower.named_parameters())
    if list(before) != list(after):
        raise _Unfit("it changes which weights there are")
    changed = {n: p for n, p in before.items() if p.shape != after[n].shape}
    buffers = dict(narrower.named_buffers())
    if any(b.shape != buffers[n].shape for n, b in dense.named_buffers() if n in buffers):
        raise _Unfit("it changes buffers")
    found: dict[str, list[tuple[Cut, Layer | None]]] = {block.name: [] for block in plan.blocks}
    paths = {block.name: _path(model, block.module) for block in plan.blocks}
    for name, parameter in changed.items():
        block = next((b for b, path in paths.items() if name.startswith(f"{path}.")), None)
        owner, _, own = name.rpartition(".")
        if block is None:
            raise _Unfit(f"it changes {name} too, which is in no block")
        dims = [d for d, size in enumerate(parameter.shape) if size != after[name].shape[d]]
        size = parameter.shape[dims[0]]
        if len(dims) > 1 or size % units or after[name].shape[dims[0]] * units != size * kept:
            raise _Unfit(f"it changes {name} otherwise than unit by unit")
        if kind == "neurons" and size != units:
            raise _Unfit(f"{name} holds several projections in one")
        cut = Cut(modules[owner], own, dims[0], size // units)
        layer = layers.get(id(cut.parameter))
        if layer is None and parameter.ndim > 1:
            raise _Unfit(f"{name} cannot be pruned: it is tied, or no linear layer")
        found[block].append((cut, layer))
    attributes = list(_attributes(modules, dense, narrower))
    for block, cuts in found.items():
        inside = {id(module) for module in modules[paths[block]].modules()}
        mine = [entry for entry in attributes if id(entry[0]) in inside]
        consumers = [layer for cut, layer in cuts if layer is not None and _reads(cut, layer)]
        groups = {cut.width for cut, layer in cuts if layer in consumers}
        if kind == "heads" and groups and any(cut.width > max(groups) for cut, _ in cuts):
            raise _Unfit("one weight holds queries, keys and values")
        if len(groups) != 1:
            raise _Unfit(f"{block} has no layer that reads them" if cuts else f"{block} has none")
        yield block, BlockParts(consumers, [cut for cut, _ in cuts], mine, groups.pop())


def _path(model: nn.Module, block: nn.Module) -> str:
    return next(without_wrappers(name) for name, m in model.named_modules() if m is block)


def _reads(cut: Cut, layer: Layer) -> bool:
    """Whether a cut takes columns of a layer, not rows."""
    stored = layer.parameter.detach()
    is_transposed = layer.arranged(stored).stride() != stored.stride()
    return cut.dim == (0 if is_transposed else 1)


def _attributes(
    modules: Mapping[str, nn.Module], dense: nn.Module, narrower: nn.Module
) -> Iterator[tuple[nn.Module, str, Any]]:
    """The attributes of modules that are others in the narrower model."""
    others = dict(narrower.named_modules())
    for name, module in dense.named_modules():
        other = vars(others[name])
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN) and other.get(key) != value and name in modules:
                yield modules[name], key, other[key]


def _cannot(model: nn.Module, kind: str, why: str) -> TargetError:
    return TargetError(
        f"`structure: {kind}`: a {type(model).__name__} cannot be made narrower: {why}. Use "
        "`sparsity` or `pattern` without `structure`."
    )
