"""The layers of a model that would be pruned, and why others would not.

The model is built from its configuration on the meta device, without reading or allocating weights,
so that a model of any size is listed in seconds. Blocks and layers are those of the callback's
plan.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from mrp_lightning.errors import TargetError, counted
from mrp_lightning.solver.patterns import Pattern, Unstructured, make_pattern
from mrp_lightning.targets.blocks import without_numbers
from mrp_lightning.targets.layers import is_linear
from mrp_lightning.targets.plan import Plan, make_plan
from mrp_lightning.terminal import Console

FORMAT_VERSION = 1


@dataclass(frozen=True)
class _PlannedLayer:
    """A layer that would be pruned; `kind` is the class of its module."""

    name: str
    kind: str
    shape: list[int]
    parameters: int
    block: str | None


@dataclass(frozen=True)
class _LeftOut:
    """A weight of two or more dimensions that would stay dense, and why."""

    name: str
    shape: list[int]
    parameters: int
    reason: str


@dataclass(frozen=True)
class Listing:
    """The output of `layers --json`.

    Attributes:
        model: The model as the user named it.
        model_class: The class of the model.
        pattern: The pattern of the pruning; `None` if not given.
        quantization: The method that quantized the checkpoint, `None` for a dense one. `predict`
            needs dense weights.
        blocks: The `name` and `class` of each repeated block.
        layers: The layers that would be pruned, in the order of the blocks; then those outside.
        skipped: The weights of two or more dimensions that would stay dense.
        totals: Numbers of `layers`, of their `parameters`, of parameters `removed` by the pattern
            (`None` without one), `model_parameters`, `fraction_of_model` (parameters /
            model_parameters), parameters in `skipped` weights, and in `vectors` (norms, biases).
            Tied weights count once.
        format_version: Raised when a key changes its meaning.
    """

    model: str
    model_class: str
    pattern: str | None
    quantization: str | None
    blocks: list[dict[str, str]]
    layers: list[_PlannedLayer]
    skipped: list[_LeftOut]
    totals: dict[str, Any]
    format_version: int = FORMAT_VERSION


def listing_of(options: Namespace) -> Listing:
    """Read the configuration of a command line's model, and list the layers of the model."""
    pattern = None
    if options.pattern is not None or options.sparsity is not None:
        pattern = make_pattern(options.sparsity, options.pattern)
    # Imported late, since a wrong pattern need not wait for transformers.
    from mrp_lightning.models.checkpoint import build_without_weights, stored_names
    from mrp_lightning.models.gguf import located
    from mrp_lightning.models.integrity import larger
    from mrp_lightning.models.loading import load_config

    trust = options.trust_remote_code
    source = located(options.model, options.gguf_file, options.revision)
    config = load_config(source, revision=options.revision, trust_remote_code=trust)
    model = build_without_weights(config, trust_remote_code=trust)
    # The listing follows the configuration: if the files hold more blocks than it makes, the
    # listing would be short without a sign of it.
    if problem := larger(options.model, model, stored_names(Path(source).expanduser())):
        raise TargetError(f"`model`: {problem}")
    choice_names = ("targets", "ignore", "blocks", "skip_indivisible")
    choices = {name: getattr(options, name) for name in choice_names}
    return _list_layers(model, options.model, pattern, **choices)


def _list_layers(model: nn.Module, source: str, pattern: Pattern | None, **choices: Any) -> Listing:
    """List the layers of a model that `make_plan` would prune, and all its other weights.

    Args:
        model: The model, on any device.
        source: The name of the model, for the listing.
        pattern: The pattern of the pruning; `None` for any.
        **choices: Arguments of `make_plan`, which documents the errors, too.
    """
    plan = make_plan(model, pattern or Unstructured(0.5), allow_meta=True, **choices)
    # Layers outside the blocks come last, as in the plan: the callback prunes them after the
    # blocks.
    places = [(block.name, layer) for block in plan.blocks for layer in plan.layers[block.name]]
    layers = [
        _PlannedLayer(
            layer.name,
            type(layer.module).__name__,
            list(layer.weight.shape),
            layer.weight.numel(),
            block,
        )
        for block, layer in [*places, *((None, layer) for layer in plan.outside)]
    ]
    num_pruned = sum(layer.parameters for layer in layers)
    num_vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    # `parameters()` yields tied parameters once, which the totals promise.
    total = sum(parameter.numel() for parameter in model.parameters())
    return Listing(
        model=source,
        model_class=type(model).__name__,
        pattern=None if pattern is None else str(pattern),
        quantization=_quantization(getattr(model, "config", None)),
        blocks=[{"name": b.name, "class": type(b.module).__name__} for b in plan.blocks],
        layers=layers,
        skipped=_left_out(model, plan),
        totals={
            "layers": len(layers),
            "parameters": num_pruned,
            "removed": None if pattern is None else round(num_pruned * pattern.sparsity),
            "model_parameters": total,
            "fraction_of_model": num_pruned / total,
            "skipped": total - num_pruned - num_vectors,
            "vectors": num_vectors,
        },
    )


def write_listing(listing: Listing, *, as_json: bool) -> None:
    """Write the listing to standard output, as JSON or as tables."""
    if as_json:
        sys.stdout.write(json.dumps(asdict(listing), indent=2) + "\n")
    else:
        _print_tables(listing)


def _print_tables(listing: Listing) -> None:
    """Print the listing as tables; layers that differ only in their numbers share a row."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    classes = sorted({block["class"] for block in listing.blocks})
    blocks = counted(len(listing.blocks), "block")
    where = f"{blocks} ({', '.join(classes)})" if classes else "no blocks"
    amount = "pruned" if listing.pattern is None else f"pruned to {listing.pattern}"
    console.print(f"{listing.model}: {listing.model_class}, {where}")
    columns = ("name", "kind", "rows × columns", "layers")
    console.print(_table(f"Would be {amount}", columns, listing.layers))
    if listing.skipped:
        columns = ("name", "reason", "shape", "weights")
        console.print(_table("Would stay dense", columns, listing.skipped))
    totals = listing.totals
    console.print(
        f"{counted(totals['layers'], 'layer')} with {totals['parameters']:,} of "
        f"{totals['model_parameters']:,} parameters ({totals['fraction_of_model']:.1%})"
        + ("." if totals["removed"] is None else f"; {totals['removed']:,} would be removed."),
    )
    if listing.quantization:
        console.print(
            f"The checkpoint is quantized ({listing.quantization}): predict needs dense weights."
        )


def _left_out(model: nn.Module, plan: Plan) -> list[_LeftOut]:
    """Return the weights of two or more dimensions that the plan does not prune, with reasons."""
    # Parameters are compared by identity: experts share one, and a tied one has several names.
    pruned = {id(layer.parameter) for layers in plan.layers.values() for layer in layers}
    pruned |= {id(layer.parameter) for layer in plan.outside}
    reasons = {skipped.name: skipped.reason for skipped in plan.skipped}
    inside = {id(module) for block in plan.blocks for module in block.module.modules()}
    rows = []
    first: dict[int, str] = {}
    for name, module in model.named_modules():
        for weight, parameter in module.named_parameters(prefix=name, recurse=False):
            reason = reasons.get(name) or reasons.get(weight)
            if parameter.ndim < 2 or (id(parameter) in pruned and reason is None):
                continue
            # The first name of a tied weight is in the order of modules, so that the row of the
            # second one can refer to it.
            if first.setdefault(id(parameter), weight) != weight:
                reason = reason or f"tied to {first[id(parameter)]}"
            elif reason is None and weight.endswith("bias"):
                reason = "a bias of each expert"
            elif reason is None and not is_linear(module):
                reason = f"{type(module).__name__} is not a linear layer"
            elif reason is None:
                chosen = "left out by `targets` or `ignore`"
                outside = "outside the blocks; `targets` can name it"
                reason = chosen if id(module) in inside else outside
            rows.append(_LeftOut(weight, list(parameter.shape), parameter.numel(), reason))
    return rows


def _quantization(config: Any) -> str | None:
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return None
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return str(settings.get("quant_method", "unknown method"))


def _table(title: str, columns: Sequence[str], listed: Iterable[Any]) -> Table:
    """Return a table with a row for all items of one name (without numbers), kind and shape."""
    name, attribute, shape, number = columns
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for one in listed:
        size = " × ".join(map(str, one.shape))
        shared = (without_numbers(one.name), getattr(one, attribute), size)
        groups.setdefault(shared, []).append(one)
    table = Table(title=title, title_justify="left")
    for column in (name, attribute, shape):
        table.add_column(column, overflow="fold")
    for column in (number, "parameters"):
        table.add_column(column, justify="right")
    for shared, rows in groups.items():
        table.add_row(*shared, f"{len(rows)}", f"{sum(row.parameters for row in rows):,}")
    return table
