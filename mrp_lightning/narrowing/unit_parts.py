"""Find the parts of a model that belong to its units, by comparing two configurations.

The model is built twice without weights: by its configuration, and by one with fewer units. The
parameters that are smaller in the second model along some dimension, and the attributes of modules
that differ, belong to the units. So no model family needs code of its own. A configuration that
cannot describe fewer units is detected, since either nothing becomes smaller or parts that belong
to no unit do.
"""

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mrp_lightning.errors import FormatError, OptionError, TargetError, counted, first_line
from mrp_lightning.models.checkpoint import build_without_weights
from mrp_lightning.narrowing.structure import Attribute, BlockParts, Cut, NarrowingPlan, Structure
from mrp_lightning.records.report import pruned_before, was_rounded
from mrp_lightning.targets.blocks import pruned_layers
from mrp_lightning.targets.layers import Expert, ExpertStack, Layer, holds_experts
from mrp_lightning.targets.plan import Plan
from mrp_lightning.upstream.torch_names import without_compiled

log = logging.getLogger(__name__)

_MULTIPLE = 32
"""The number of neurons that remain is a multiple of this, for the speed of matrix kernels."""

_NEURONS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "hidden_dim", "d_ff")
_HEADS, _GROUPS = "num_attention_heads", "num_key_value_heads"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_k")
"""The entries of configurations that give the number of experts of each token."""
_PLAIN = (int, float, bool, str, type(None), tuple, list)
"""The types of attributes of modules that are compared."""

Sizes = dict[str, int]
"""Entries of a configuration that depend on the number of units, by name."""


def narrowing_plan(model: nn.Module, kind: str, sparsity: float, plan: Plan) -> NarrowingPlan:
    """Return the plan of removing a fraction of the units of a kind, neurons, heads or experts.

    `plan` has all layers of the model that could be pruned, in their blocks.

    Raises:
        TargetError: The model is none of transformers or has no repeated blocks, or no
            configuration of its class describes the narrower model.
        OptionError: The sparsity removes no unit, or all, or transformers refuses their number.
    """
    structure = _find_structure(model, kind, sparsity, plan)
    none: dict[str, list[Layer]] = {block.name: [] for block in plan.blocks}
    consumers = none | {name: list(p.consumers) for name, p in structure.blocks.items()}
    reading = {id(layer) for layers in consumers.values() for layer in layers}
    keys = {layer.key for layers in consumers.values() for layer in layers}
    source = getattr(model, "name_or_path", None)
    if source and was_rounded(pruned_before(source)):
        log.warning(
            "The model is on a grid of few bits by an earlier run, and the compensation for the %s "
            "removed leaves it. Remove %s first, and put the narrower model on the grid.",
            *(kind, kind),
        )
    elif sparse := sum(layer.key in keys for layer in pruned_layers(model)):
        log.warning(
            "%s lost single weights before, and the compensation for the %s removed now fills "
            "them again. Remove %s first, and then single weights of the narrower model.",
            *(counted(sparse, "layer"), kind, kind),
        )
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


def _find_structure(model: nn.Module, kind: str, sparsity: float, plan: Plan) -> Structure:
    """Find the units of each block, and the parts of the model that belong to them."""
    if not isinstance(model, PreTrainedModel):
        raise TargetError(
            f"`structure: {kind}` needs a transformers model, whose configuration says how narrow "
            f"it is; got a {type(model).__name__}. Use `sparsity` or `pattern` without `structure`."
        )
    if not plan.blocks:
        raise _cannot(model, kind, "no repeated blocks were found in it")
    text, dense = model.config.get_text_config(), _as_configured(model, kind)
    layers = [layer for of_block in plan.layers.values() for layer in of_block]
    if kind == "experts" and not any(isinstance(layer, Expert) for layer in layers):
        raise _cannot(model, kind, "it has no experts that transformers stacks")
    # Families name their sizes differently; the first entry that changes exactly the parts of
    # units is the right one, and the others' reasons explain a failure.
    reasons: list[str] = []
    for units, entries in _candidates(text, kind, plan):
        multiple = _MULTIPLE if kind == "neurons" else 1
        kept = _kept(kind, units, sparsity, multiple, _least(text, kind))
        entry = _Entry(model, kind, plan, dense, units, entries)
        try:
            return entry.fit(kept)
        except UnfitError as unfit:
            if unfit.by_transformers:
                unfit = _refuse_with_nearest(entry, kept, sparsity, unfit)
            reasons.append(f"{' and '.join(entries)}: {unfit}")
    names = ", ".join({"neurons": _NEURONS, "heads": (_GROUPS, _HEADS), "experts": _EXPERTS}[kind])
    listed = "; ".join(reasons) or f"it has none of the entries {names}"
    raise _cannot(model, kind, f"its configuration cannot say fewer of them ({listed})")


def _as_configured(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """Return the model without weights by its own configuration, which must give its shapes."""
    try:
        dense = built(model, {})
    except UnfitError as unfit:
        raise _cannot(model, kind, str(unfit)) from unfit
    shapes = {name: tuple(p.shape) for name, p in dense.named_parameters()}
    parameters = {without_compiled(name): p for name, p in model.named_parameters()}
    if shapes != {name: tuple(p.shape) for name, p in parameters.items()}:
        raise _cannot(model, kind, "its weights are not of the sizes that its configuration says")
    return dense


class UnfitError(Exception):
    """A changed configuration does not describe the model with fewer parts; the message says why.

    `by_transformers` is true if transformers refuses this number of parts, and may take another.
    """

    def __init__(self, reason: str, *, by_transformers: bool = False) -> None:
        super().__init__(reason)
        self.by_transformers = by_transformers


@dataclass(frozen=True, eq=False)
class _Entry:
    """Entries of a model's configuration that may give the number of units."""

    model: PreTrainedModel
    kind: str
    plan: Plan  # all layers that could be pruned
    dense: PreTrainedModel  # the model without weights
    units: int  # the present number
    per_unit: Sizes  # the entries, for one unit

    def fit(self, kept: int) -> Structure:
        """Return the structure in which `kept` units remain; `UnfitError` if there is none."""
        config = {name: kept * each for name, each in self.per_unit.items()}
        if self.kind == "heads":  # pinned, so that fewer heads do not become larger ones
            text = self.model.config.get_text_config()
            size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            config["head_dim"] = size
        comparison = _Comparison(self, built(self.model, config), kept)
        if (reason := comparison.why_unfit()) is not None:
            raise UnfitError(reason)
        return comparison.structure(config)


def _refuse_with_nearest(
    entry: _Entry, kept: int, sparsity: float, refusal: UnfitError
) -> UnfitError:
    """Raise an OptionError with the nearest number of units that transformers accepts.

    Returns the reason why there is no such number.
    """
    units = entry.units
    # Nearest first, of two equally near the one that keeps more. Only a refusal by transformers
    # depends on the number, so that the first other reason holds for all of them.
    for count in sorted(range(1, units), key=lambda count: (abs(count - kept), -count)):
        try:
            entry.fit(count)
        except UnfitError as unfit:
            if unfit.by_transformers:
                continue
            return unfit
        raise OptionError(
            f"`structure: {entry.kind}`: `sparsity` {sparsity:g} would leave {kept} of {units} "
            f"{entry.kind} a block, which transformers refuses for this model ({refusal}). "
            f"The nearest number that it takes is {count}: give `sparsity` "
            f"{(units - count) / units:.3g}."
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
    widths = {layer.columns for layer in layers}
    if kind == "experts":
        widths = {len(layer.parameter) for layer in layers if isinstance(layer, Expert)}
    for name in _EXPERTS if kind == "experts" else _NEURONS:
        if not hasattr(config, name):
            continue
        value = getattr(config, name)
        if value is None and kind == "neurons":  # GPT-2: four times the hidden size
            value = 4 * config.hidden_size
        if isinstance(value, int) and value in widths:
            yield value, {name: 1}


def _least(config: PreTrainedConfig, kind: str) -> int:
    """Return the smallest possible number of units: one, or as many experts as each token uses."""
    counts = (getattr(config, name, None) for name in _CHOSEN if kind == "experts")
    return max([1, *(count for count in counts if isinstance(count, int))])


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


def built(model: PreTrainedModel, entries: Mapping[str, Any]) -> PreTrainedModel:
    """Build the model without weights from a changed configuration; `UnfitError` if it fails."""
    config = copy.deepcopy(model.config)
    try:
        for name, value in entries.items():
            setattr(config.get_text_config(), name, value)
    except AttributeError as error:  # read-only, as Falcon's computed `head_dim`
        raise UnfitError(f"{name} follows from other entries") from error
    try:
        config = type(config).from_dict(config.to_dict())
    except StrictDataclassError as error:  # a validator of transformers
        reason = str(error).splitlines()[-1].strip(" .").removeprefix("ValueError: ")
        raise UnfitError(reason, by_transformers=True) from error
    except ValueError as error:  # a check in a class's own code
        raise UnfitError(first_line(error)) from error
    try:
        return build_without_weights(config, kind=type(model))
    except FormatError as error:
        raise UnfitError(str(error)) from error


@dataclass(frozen=True, eq=False)
class _Comparison:
    """A model built twice without weights: with all units, and with `kept` of them."""

    entry: _Entry
    narrower: PreTrainedModel
    kept: int

    @cached_property
    def shapes(self) -> dict[str, tuple[torch.Size, torch.Size]]:
        """The two shapes of each parameter and buffer that gets smaller, by name."""
        dense, narrower = shapes_of(self.entry.dense), shapes_of(self.narrower)
        return {n: (x, narrower[n]) for n, x in dense.items() if narrower.get(n, x) != x}

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The modules of the model itself, by name."""
        return _modules(self.entry.model)

    @cached_property
    def layers(self) -> dict[int, Layer]:
        """The layers that could be pruned, by the identity of their parameters."""
        of_blocks = self.entry.plan.layers.values()
        return {id(layer.parameter): layer for of_block in of_blocks for layer in of_block}

    @cached_property
    def paths(self) -> dict[str, str]:
        """The names of the blocks' modules in the model, by the names of the blocks."""
        names = {id(module): name for name, module in self.modules.items()}
        return {block.name: names[id(block.module)] for block in self.entry.plan.blocks}

    @cached_property
    def cuts(self) -> dict[str, list[tuple[Cut, Layer | None]]]:
        """The cuts of each block, with the layers whose weights they are; see `why_unfit`."""
        cuts: dict[str, list[tuple[Cut, Layer | None]]] = {name: [] for name in self.paths}
        for name in self.shapes:
            cut, block = self._cut(name), self._block_of(name)
            assert block is not None
            cuts[block].append((cut, self._layer_of(name, cut)))
        return cuts

    def why_unfit(self) -> str | None:
        """Return why the differences are not those of whole units, `None` if they are."""
        models = self.entry.dense, self.narrower
        names, fewer = ([n for n, _ in x.named_parameters()] for x in models)
        if names != fewer:
            return "it changes which weights there are"
        # Buffers may change for experts alone (the bias of DeepSeek's router is one), and only if
        # they are saved: a checkpoint would not restore others.
        stored = self.entry.dense.state_dict() if self.entry.kind == "experts" else {}
        buffers = [name for name, _ in self.entry.dense.named_buffers()]
        if any(name in self.shapes and name not in stored for name in buffers):
            return "it changes buffers"
        # Lazily: blocks can be asked for their parts once every tensor is known to be cut.
        reasons = chain(map(self._why_no_cut, self.shapes), map(self._why_no_parts, self.paths))
        return next((reason for reason in reasons if reason is not None), None)

    def structure(self, config: Sizes) -> Structure:
        """Return the structure of a fitting comparison, with the entries of its configuration."""
        entry, blocks = self.entry, {}
        attributes = list(different_attributes(entry.model, entry.dense, self.narrower))
        for name, cuts in self.cuts.items():
            modules = {id(module) for module in self.modules[self.paths[name]].modules()}
            own_attributes = [each for each in attributes if id(each[0]) in modules]
            if cuts:  # blocks of another kind have none, such as the first ones of DeepSeek
                consumers = self._consumers(name)
                group = consumers[0].columns // entry.units
                cuts_alone = [cut for cut, _ in cuts]
                blocks[name] = BlockParts(consumers, cuts_alone, own_attributes, group)
        inside = {id(each) for parts in blocks.values() for each in parts.attributes}
        outside = [each for each in attributes if id(each) not in inside]
        return Structure(entry.kind, entry.units, self.kept, blocks, config, outside)

    def _block_of(self, name: str) -> str | None:
        return next((b for b, path in self.paths.items() if name.startswith(f"{path}.")), None)

    def _cut(self, name: str) -> Cut:
        owner, _, tensor = name.rpartition(".")
        shape, narrower = self.shapes[name]
        dim = next(d for d, size in enumerate(shape) if size != narrower[d])
        return Cut(self.modules[owner], tensor, dim, shape[dim] // self.entry.units)

    def _layer_of(self, name: str, cut: Cut) -> Layer | None:
        if self.entry.kind == "experts":
            # Of the two stacks of an expert's matrices, the last one reads the inner features.
            is_last = holds_experts(cut.module) and cut.name == "down_proj"
            return ExpertStack(name, cut.module) if is_last else None
        return self.layers.get(id(cut.tensor))

    def _why_no_cut(self, name: str) -> str | None:
        """Return why a tensor that gets smaller is not cut unit by unit, `None` if it is."""
        units, kind = self.entry.units, self.entry.kind
        if self._block_of(name) is None:
            return f"it changes {name} too, which is in no block"
        # Each unit must own the same number of adjacent entries along a single dimension.
        shape, narrower = self.shapes[name]
        dims = [d for d, size in enumerate(shape) if size != narrower[d]]
        size = shape[dims[0]]
        if len(dims) > 1 or size % units or narrower[dims[0]] * units != size * self.kept:
            return f"it changes {name} otherwise than unit by unit"
        if kind != "heads" and size != units:
            return f"{name} holds several projections in one"
        is_matrix = kind != "experts" and len(shape) > 1
        if is_matrix and self._layer_of(name, self._cut(name)) is None:
            return f"{name} cannot be pruned: it is tied, or no linear layer"
        return None

    def _why_no_parts(self, block: str) -> str | None:
        """Return why the cuts of a block do not make up units, `None` if they do."""
        cuts, kind = self.cuts[block], self.entry.kind
        if kind == "experts" and not cuts:
            return None
        # All consumers of a block must have as many columns for each unit: they lose the same ones.
        groups = {layer.columns // self.entry.units for layer in self._consumers(block)}
        if kind == "heads" and groups and any(cut.width > max(groups) for cut, _ in cuts):
            return "one weight holds queries, keys and values"
        if len(groups) != 1:
            return f"{block} has no layer that reads them" if cuts else f"{block} has none"
        return None

    def _consumers(self, block: str) -> list[Layer]:
        """Return the layers of a block that lose columns."""
        cuts = self.cuts[block]
        return [layer for cut, layer in cuts if layer is not None and _reads(cut, layer)]


def _reads(cut: Cut, layer: Layer) -> bool:
    """Return whether a cut removes columns, and not rows, of a layer."""
    if isinstance(layer, ExpertStack):
        return True
    stored = layer.parameter.detach()
    is_transposed = layer.arranged(stored).stride() != stored.stride()
    return cut.dim == (0 if is_transposed else 1)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {without_compiled(name): module for name, module in model.named_modules()}


def shapes_of(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, torch.Size]:
    """Return shapes of parameters, as `named_parameters` lists them, and buffers, by name."""
    parameters = model.named_parameters(remove_duplicate=remove_duplicate)
    return {name: tensor.shape for name, tensor in chain(parameters, model.named_buffers())}


def differing_values(module: nn.Module, other: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the names of plain attributes in which two modules differ, with both values."""
    for name, value in vars(module).items():
        new = vars(other).get(name)
        if isinstance(value, _PLAIN) and value != new:
            yield name, value, new


def different_attributes(
    model: nn.Module, dense: nn.Module, narrower: nn.Module
) -> Iterator[Attribute]:
    """Yield the attributes of modules whose values differ in the narrower model."""
    others, modules = dict(narrower.named_modules()), _modules(model)
    for name, module in dense.named_modules():
        if name in others and name in modules:
            for key, _, new in differing_values(module, others[name]):
                yield modules[name], key, new


def _cannot(model: nn.Module, kind: str, why: str) -> TargetError:
    return TargetError(
        f"`structure: {kind}`: a {type(model).__name__} cannot be made narrower: {why}. Use "
        "`sparsity` or `pattern` without `structure`."
    )
