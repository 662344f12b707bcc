"""`mrp-lightning layers MODEL`: list the layers that would be pruned, and why others would not.

The model is built from its configuration on the meta device, without reading or allocating weights,
so that a model of any size is listed in seconds. Blocks and layers are those of the callback's
plan. Imports are late, since help and wrong options need not wait for torch.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrp_lightning.commands.command import CommandParser, add_model_options, check_model
from mrp_lightning.errors import TargetError, counted

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from mrp_lightning.solver.patterns import Pattern
    from mrp_lightning.targets.plan import Plan

FORMAT_VERSION = 1


def main(args: Sequence[str] | None = None) -> None:
    """Print the listing as tables, or as JSON.

    Raises:
        TargetError: The files hold more blocks than the configuration makes. `make_pattern`,
            `load_config` and `make_plan` raise more.
    """
    parser = _parser()
    options = parser.parse_args(args)
    check_model(options.model, options.gguf_file)
    with parser.options_in_messages():
        listing = listing_of(options)
    if options.json:
        sys.stdout.write(json.dumps(listing, indent=2) + "\n")
    else:
        _write_tables(listing)


def listing_of(options: Namespace) -> dict[str, Any]:
    """Read the configuration of a command line's model, and list the layers of the model.

    Returns:
        The output of `layers --json`: the `model` as the user named it, its `model_class`, the
        `pattern` (`None` if not given) and the method of `quantization` (`None` for a dense
        checkpoint; `predict` needs dense weights). Lists of `blocks` (`name`, `class`), `layers`
        that would be pruned, in the order of the pruning (`name`, `kind`, `shape`, `parameters`,
        `block`), and `skipped` weights of two or more dimensions (`name`, `shape`, `parameters`,
        `reason`). The `totals` are numbers of `layers`, of their `parameters`, of parameters
        `removed` by the pattern (`None` without one), `model_parameters`, `fraction_of_model`
        (parameters / model_parameters), parameters in `skipped` weights, and in `vectors` (norms,
        biases); tied weights count once. The `format_version` is raised when a key changes its
        meaning.
    """
    from mrp_lightning.solver.patterns import Unstructured, make_pattern
    from mrp_lightning.targets.plan import make_plan

    pattern = None
    if options.pattern is not None or options.sparsity is not None:
        pattern = make_pattern(options.sparsity, options.pattern)
    model = _built(options)
    choice_names = ("targets", "ignore", "blocks", "skip_indivisible")
    choices = {name: getattr(options, name) for name in choice_names}
    plan = make_plan(model, pattern or Unstructured(0.5), allow_meta=True, **choices)
    # Layers outside the blocks come last: the callback prunes them after the blocks.
    in_order = [(block.name, layer) for block in plan.blocks for layer in plan.layers[block.name]]
    layers: list[dict[str, Any]] = [
        {
            "name": layer.name,
            "kind": type(layer.module).__name__,
            "shape": list(layer.weight.shape),
            "parameters": layer.weight.numel(),
            "block": block,
        }
        for block, layer in [*in_order, *((None, layer) for layer in plan.outside)]
    ]
    return {
        "model": options.model,
        "model_class": type(model).__name__,
        "pattern": None if pattern is None else str(pattern),
        "quantization": _quantization(getattr(model, "config", None)),
        "blocks": [{"name": b.name, "class": type(b.module).__name__} for b in plan.blocks],
        "layers": layers,
        "skipped": list(_left_out(model, plan)),
        "totals": _totals(model, [layer["parameters"] for layer in layers], pattern),
        "format_version": FORMAT_VERSION,
    }


def _built(options: Namespace) -> "nn.Module":
    """Return the model of a command line, without weights."""
    from mrp_lightning.models.checkpoint import build_without_weights, stored_names
    from mrp_lightning.models.gguf import located
    from mrp_lightning.models.integrity import surplus_blocks
    from mrp_lightning.models.loading import load_config

    trust = options.trust_remote_code
    source = located(options.model, options.gguf_file, options.revision)
    config = load_config(source, revision=options.revision, trust_remote_code=trust)
    model = build_without_weights(config, trust_remote_code=trust)
    # The listing follows the configuration: if the files hold more blocks than it makes, the
    # listing would be short without a sign of it.
    if problem := surplus_blocks(options.model, model, stored_names(Path(source).expanduser())):
        raise TargetError(f"`model`: {problem}")
    return model


def _totals(model: "nn.Module", pruned: Sequence[int], pattern: "Pattern | None") -> dict[str, Any]:
    # `parameters()` yields tied parameters once, which the totals promise.
    total = sum(parameter.numel() for parameter in model.parameters())
    num_vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim < 2)
    num_pruned = sum(pruned)
    return {
        "layers": len(pruned),
        "parameters": num_pruned,
        "removed": None if pattern is None else round(num_pruned * pattern.sparsity),
        "model_parameters": total,
        "fraction_of_model": num_pruned / total,
        "skipped": total - num_pruned - num_vectors,
        "vectors": num_vectors,
    }


def _left_out(model: "nn.Module", plan: "Plan") -> Iterator[dict[str, Any]]:
    """Yield the weights of two or more dimensions that the plan does not prune, with reasons."""
    from mrp_lightning.targets.layers import is_linear

    # Parameters are compared by identity: experts share one, and a tied one has several names.
    pruned = {id(layer.parameter) for layers in plan.layers.values() for layer in layers}
    pruned |= {id(layer.parameter) for layer in plan.outside}
    reasons = {skipped.name: skipped.reason for skipped in plan.skipped}
    inside = {id(module) for block in plan.blocks for module in block.module.modules()}
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
            shape = list(parameter.shape)
            yield {
                "name": weight,
                "shape": shape,
                "parameters": parameter.numel(),
                "reason": reason,
            }


def _quantization(config: Any) -> str | None:
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return None
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return str(settings.get("quant_method", "unknown method"))


def _write_tables(listing: Mapping[str, Any]) -> None:
    from mrp_lightning.terminal import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    classes = sorted({block["class"] for block in listing["blocks"]})
    blocks = counted(len(listing["blocks"]), "block")
    where = f"{blocks} ({', '.join(classes)})" if classes else "no blocks"
    console.print(f"{listing['model']}: {listing['model_class']}, {where}")
    to = f" to {listing['pattern']}" if listing["pattern"] else ""
    console.print(
        _table(f"Would be pruned{to}", ("kind", "rows × columns", "layers"), listing["layers"])
    )
    if listing["skipped"]:
        columns = ("reason", "shape", "weights")
        console.print(_table("Would stay dense", columns, listing["skipped"]))
    totals = listing["totals"]
    console.print(
        f"{counted(totals['layers'], 'layer')} with {totals['parameters']:,} of "
        f"{totals['model_parameters']:,} parameters ({totals['fraction_of_model']:.1%})"
        + ("." if totals["removed"] is None else f"; {totals['removed']:,} would be removed."),
    )
    if method := listing["quantization"]:
        console.print(f"The checkpoint is quantized ({method}): predict needs dense weights.")


def _table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> "Table":
    """Return a table with a row for all items of one name (without numbers), kind and shape."""
    from rich.table import Table

    from mrp_lightning.targets.blocks import without_numbers

    kind, shape, number = columns
    groups: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        size = " × ".join(map(str, row["shape"]))
        groups.setdefault((without_numbers(row["name"]), row[kind], size), []).append(
            row["parameters"]
        )
    table = Table(title=title, title_justify="left")
    for column in ("name", kind, shape):
        table.add_column(column, overflow="fold")
    for column in (number, "parameters"):
        table.add_column(column, justify="right")
    for shared, sizes in groups.items():
        table.add_row(*shared, str(len(sizes)), f"{sum(sizes):,}")
    return table


def _parser() -> Any:
    parser = CommandParser(
        "mrp-lightning layers",
        "List what would be pruned and what would stay dense, and why. No weights are "
        "needed: of the model only the configuration is read.",
    )
    add_model_options(parser)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--pattern", help="N:M: N of every M consecutive weights of a row stay")
    amount.add_argument("--sparsity", type=float, help="the fraction of the weights to remove")
    names = {
        "targets": "the layers to prune (default: all in the blocks except routers)",
        "ignore": "layers to leave dense",
        "blocks": "the lists of blocks, such as model.layers, or single blocks",
    }
    for name, text in names.items():
        parser.add_argument(f"--{name}", nargs="+", metavar="NAME", help=text)
    text = "leave layers dense whose columns are no multiple of M, instead of an error"
    parser.add_argument("--skip-indivisible", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print every layer as JSON")
    return parser
