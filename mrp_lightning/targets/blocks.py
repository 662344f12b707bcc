"""The repeated blocks of a model, the unit in which it is calibrated; modules by name; values."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from mrp_lightning.errors import TargetError, counted
from mrp_lightning.targets.layers import (
    PLAIN_DTYPES,
    Layer,
    fused_weights,
    is_linear,
    layers_of,
    why_not_plain,
)
from mrp_lightning.upstream.torch_names import COMPILED, uncompiled, without_compiled

_REGULAR = "re:"


def matches(name: str, pattern: str, prefix: str = "") -> bool:
    """Return whether a pattern matches this module or one of its parents.

    A pattern is a sequence of whole parts of a dotted name, with shell wildcards: `q_proj`,
    `layers.3`, `mlp` and `layers.*.mlp` all match `model.layers.3.mlp.q_proj`, and `proj` does not.
    After `re:` a pattern is a regular expression, as in llm-compressor: it is matched from the
    start of the name without the prefix (the name in the checkpoint), need not reach the end of
    the name, and is not tried on the names of parents.
    """
    if pattern.startswith(_REGULAR):
        expression = pattern.removeprefix(_REGULAR)
        return re.match(expression, name.removeprefix(prefix)) is not None
    return any(
        fnmatchcase(name, wider)
        for wider in (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    )


def as_patterns(value: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return the patterns of an argument, which may be a single string."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def require_matches(
    argument: str,
    patterns: Iterable[str],
    names: Sequence[str],
    prefix: str = "",
    shown: Callable[[str], str] = str,
) -> None:
    """Raise a TargetError that lists all malformed patterns, or all that match no name.

    Args:
        argument: The argument that holds the patterns, for the message.
        patterns: The patterns.
        names: The names of the modules.
        prefix: The prefix that names lack in the checkpoint.
        shown: Maps a name to its form in the message.
    """
    patterns = list(patterns)
    if malformed := {p: why for p in patterns if (why := _why_malformed(p))}:
        problems = "; ".join(f"{pattern!r} ({why})" for pattern, why in malformed.items())
        raise TargetError(
            f"`{argument}` holds what Python does not read as a regular expression: {problems}. "
            'Write one, such as "re:.*q_proj$", or a name with shell wildcards without `re:`.'
        )
    unknown = [p for p in patterns if not any(matches(name, p, prefix) for name in names)]
    if not unknown:
        return
    names = [shown(name) for name in names]
    every_part = {part for name in names for part in name.split(".")}
    parts = sorted(part for part in every_part if part and not part.isdigit())
    hints = []
    for pattern in unknown:
        nearest = get_close_matches(pattern, names, n=2, cutoff=0.6)
        nearest += get_close_matches(pattern.rsplit(".", 1)[-1], parts, n=3, cutoff=0.4)
        hints.append(f"{pattern!r} (nearest names: {', '.join(nearest) or ', '.join(parts[:12])})")
    raise TargetError(f"`{argument}` matched nothing in the model: {'; '.join(hints)}.")


def without_numbers(text: str) -> str:
    """Replace each number in a text by `*`, so that names that differ by numbers become equal."""
    return re.sub(r"\b\d+\b", "*", text)


def alike(reasons: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return layers with reasons, merging layers that differ only in numbers into one with a count.

    If the numbers in their reasons differ, too, one layer is named as an example.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault((without_numbers(name), without_numbers(reason)), []).append(name)
    rows = []
    for (pattern, _), names in groups.items():
        first = names[0]
        layers = first if len(names) == 1 else f"{pattern} ({len(names)} layers)"
        if len({reasons[name] for name in names}) > 1:
            layers += f", such as {first}"
        rows.append((layers, reasons[first]))
    return rows


def listed(reasons: Mapping[str, str]) -> str:
    """Return the lines of a message on layers and their reasons, one for all that are alike."""
    return "\n".join(f"  {layers}: {reason}" for layers, reason in alike(reasons))


def _why_malformed(pattern: str) -> str | None:
    if pattern.startswith(_REGULAR):
        try:
            re.compile(pattern.removeprefix(_REGULAR))
        except re.error as error:
            return str(error)
    return None


@dataclass(frozen=True, eq=False)
class Block:
    """One repeated block."""

    name: str  # in the model
    module: nn.Module
    chain: str  # the name of its list or parent; blocks of one chain feed one another


def find_blocks(model: nn.Module, patterns: Sequence[str] | str | None = None) -> list[Block]:
    """Find the maximal `ModuleList`s of blocks with linear layers, of encoder and decoder both.

    The blocks are in the order of the module tree; there are none if nothing repeats. `patterns`
    names other lists or single blocks, which are then the blocks.

    Raises:
        TargetError: A pattern matches nothing, or is a malformed regular expression.
    """
    modules, patterns = dict(named_modules(model)), as_patterns(patterns)
    if patterns:
        lists = [name for name, module in modules.items() if name and list(module.children())]
        exact = [n for n in lists if any(n == p or n.endswith(f".{p}") for p in patterns)]
        require_matches("blocks", patterns, lists)
        wild = [n for n in lists if any(matches(n, p) for p in patterns)]
        names_of_blocks = _outermost(exact or wild)
    else:
        names_of_blocks = _outermost(
            [name for name, module in modules.items() if _is_block_list(module)]
        )
    blocks = []
    for name in names_of_blocks:
        module = modules[name]
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            children = module.named_children()
            blocks += [Block(f"{name}.{i}", uncompiled(child), name) for i, child in children]
        else:
            blocks.append(Block(name, module, name.rpartition(".")[0]))
    return blocks


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `model.named_modules()`, without the wrappers of `torch.compile` and their names."""
    for name, module in model.named_modules():
        if not hasattr(module, COMPILED):
            yield without_compiled(name), module


def _is_block_list(module: nn.Module) -> bool:
    """Return whether a module is a `ModuleList` of modules of several parts with linear layers."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(next(uncompiled(block).children(), None) is not None for block in module)
        and any(is_linear(part) or any(fused_weights(part)) for part in module.modules())
    )


def _outermost(names: list[str]) -> list[str]:
    # Names are in the order of the module tree, in which a parent comes before its children: what
    # is not inside one of the lists so far is inside none.
    outermost: list[str] = []
    for name in names:
        if not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost.append(name)
    return outermost


_VALUES_AT_ONCE = 2**22


def refuse_not_finite(
    layers: Sequence[Layer], parameters: Iterable[tuple[str, nn.Parameter]]
) -> None:
    """Raise a TargetError that names all weights with NaN or Inf, which make every result NaN.

    `layers` are to be pruned, `parameters` are all of the model or block, by name; those that are
    no plain tensors, or on the meta device, are not checked.
    """
    tensors = {layer.name: layer.weight for layer in layers}
    of_layers = {id(layer.parameter) for layer in layers}
    for name, parameter in parameters:
        plain = type(parameter) is nn.Parameter and parameter.dtype in PLAIN_DTYPES
        if plain and id(parameter) not in of_layers:
            tensors[name] = parameter
    counts = {
        name: _count(tensor) for name, tensor in tensors.items() if tensor.device.type != "meta"
    }
    if bad_counts := {name: count for name, count in counts.items() if count}:
        inside = sum(layer.name in bad_counts for layer in layers)
        num_others = len(bad_counts) - inside
        parts = [f"{counted(inside, 'layer')} to prune"] * bool(inside)
        where = " outside the layers to prune" if layers else ""
        parts += [f"{counted(num_others, 'parameter')}{where}"] * bool(num_others)
        raise TargetError(not_finite(" and ".join(parts), bad_counts))


def _count(tensor: Tensor) -> int:
    """Count the values that are not finite, in chunks that bound the memory of `isfinite`."""
    rows = torch.atleast_1d(tensor)
    chunk_size = max(1, _VALUES_AT_ONCE * len(rows) // max(1, rows.numel()))
    return sum(int((~torch.isfinite(part)).sum()) for part in rows.split(chunk_size))


def not_finite(subject: str, counts: Mapping[str, int]) -> str:
    """Return the message on `counts` of values that are not finite, by name, with the next step."""
    lines = listed({name: f"{count:,}" for name, count in counts.items()})
    return (
        f"NaN or Inf in {subject}. The checkpoint is damaged, or its values were too large for "
        f"its dtype: get it again, or in bfloat16. NaN and Inf in each:\n{lines}"
    )


LEAST_SPARSITY = 0.05
"""The least fraction of zeros in a pruned layer: trained weights are zero by chance only."""


def pruned_layers(model: nn.Module) -> list[Layer]:
    """Return the layers with at least 5% zeros, in the order of the module tree, each weight once.

    Layers of zeros alone, which were initialised so, are left out, as are those that are not plain.
    """
    first_layers: dict[object, Layer] = {}
    for name, module in named_modules(model):
        for layer in layers_of(name, module):
            if layer.key in first_layers or why_not_plain(layer) is not None:
                continue
            zeros = int((layer.weight == 0).sum())
            if LEAST_SPARSITY * layer.weight.numel() <= zeros < layer.weight.numel():
                first_layers[layer.key] = layer
    return list(first_layers.values())
