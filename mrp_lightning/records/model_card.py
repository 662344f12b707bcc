"""The model card of a pruned checkpoint: its text and its metadata for the hub."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from mrp_lightning.errors import counted
from mrp_lightning.records.report import PruningReport, is_of_vocabulary_alone

NAME = "README.md"
_RECIPE = (
    *("method", "sparsity", "pattern", "bits", "grid", "head_grid", "block_size", "damping"),
    *("tolerance", "target", "allocation", "tuning", "balance", "structure"),
    *("targets", "ignore", "blocks", "skip_indivisible"),
)
_DEFAULTS = {"target": "own", "allocation": "uniform"}
_DIRECTORIES = re.compile(r"(?<![\w.:/])(?:/|~/|(?:\.\./)+)[^\s'\"=,]*/(?=[^\s'\"=,/])")
"""Matches the directories of paths in a command that start with `/`, `~` or `..`."""
_ESCAPED = str.maketrans({mark: f"\\{mark}" for mark in "\\`*[]|!"})


def model_card(
    report: PruningReport,
    base_model: str | None,
    *,
    library: str | None = "transformers",
    num_bytes: int | None = None,
) -> str:
    """Return a short README for a pruned checkpoint, which the Hugging Face hub can show.

    It states no license, which is up to the base model's card.

    Args:
        report: The report of a complete run.
        base_model: The directory or hub id of the dense model, or its class; `None` if unknown.
        library: The library that loads the checkpoint, if one does.
        num_bytes: The bytes of the weights, if they are known.
    """
    config, narrowed, provenance = report.config, report.narrowed, report.provenance
    # A local directory means nothing to the hub, and may be private.
    is_on_hub = base_model is not None and library is not None and not Path(base_model).exists()
    name = base_model if is_on_hub else Path(base_model).name if base_model else None
    alone, data = is_of_vocabulary_alone(config), provenance.get("data", {})
    head = config.get("head_grid")
    lines = [
        _how(report),
        "",
        f"- base model: `{name}`" if name else None,
        _vocabulary(report.vocabulary),
        *([] if alone else _done(report)),
        None if num_bytes is None else f"- bytes of the weights: {num_bytes:,}",
        _grid(config),
        f"- the output head on the grid `{head}`" if head else None,
        _zeros_before(report),
        None if alone else _loss(report),
        _calibration(data) if data.get("samples") else None,
        f"- {'all figures' if alone else 'every layer'}: `pruning_report.json`",
    ]
    kind = f"with {kept_units(narrowed)}" if narrowed else _kind(config)
    title = f"{Path(name).name if name else 'Model'}, {kind}"
    hub = {"base_model": base_model if is_on_hub else None, "library_name": library}
    text = new_card(title, [line for line in lines if line is not None], _tags(config), **hub)
    commands = [provenance.get("command"), provenance.get("trained", {}).get("command")]
    if not alone:
        text = with_section(text, "Recipe", ["```yaml", *_recipe(config), "```"])
    if made := made_by(*commands):
        text = with_section(text, "Made by", made)
    dense = [f"- `{row.name}`: {row.skipped}" for row in report.layers if row.skipped is not None]
    return with_section(text, "Left dense", dense) if dense else text


def new_card(
    title: str,
    lines: Sequence[str] = (),
    tags: Sequence[str] = ("pruned", "sparse"),
    **metadata: Any,
) -> str:
    """Return a card of a model, with metadata as `ModelCardData` takes them."""
    data = ModelCardData(tags=list(tags), **metadata)
    return "\n".join(["---", data.to_yaml(), "---", "", f"# {title}", "", *lines]).rstrip() + "\n"


def with_section(card: str, title: str, lines: Sequence[str]) -> str:
    """Return a card with a section at its end."""
    text = "\n".join([card.rstrip(), "", f"## {title}", "", *lines, ""])
    # A file name that is no UTF-8 has surrogates, which no card can hold.
    return text.encode("utf-8", "replace").decode()


def made_by(*commands: str | None) -> list[str]:
    """Return the lines of a section with the commands that made a model; none if unknown."""
    # Without directories: a card is published, and they may hold names of users.
    known = [_DIRECTORIES.sub("", command) for command in commands if command]
    return ["```", *known, "```"] if known else []


def in_markdown(text: str) -> str:
    """Escape a text from elsewhere for a line of Markdown, so that it makes no markup or cell."""
    return escape(" ".join(text.split()), quote=False).translate(_ESCAPED)


def _tags(config: Mapping[str, Any]) -> list[str]:
    """Return the tags of a model by what a run did to it: a smaller dense one has no zeros."""
    if config.get("structure") or is_of_vocabulary_alone(config):
        return ["pruned"]
    return ["pruned", "sparse"] if _removes(config) else ["quantized"]


def _removes(config: Mapping[str, Any]) -> bool:
    """Return whether a run removes weights, and does not only put them on a grid."""
    return any(config.get(key) for key in ("sparsity", "pattern", "structure"))


def _kind(config: Mapping[str, Any]) -> str:
    """Return the sparsity and the bits of a model, for the title."""
    sparsity, pattern, bits = (config.get(key) for key in ("sparsity", "pattern", "bits"))
    amount = pattern or (f"{100 * sparsity:.3g}% unstructured" if sparsity else None)
    pruned = f"pruned to {amount} sparsity" if amount else None
    if structure := config.get("structure"):
        pruned = f"without {100 * (sparsity or 0):.3g}% of the {structure}"
    quantised = f"quantised to {bits} bits" if bits else None
    if grid := config.get("grid"):
        quantised = f"quantised to {grid}"
    size = config.get("vocabulary")
    cut = f"cut to a vocabulary of {size:,}" if size else None
    if not (pruned or quantised) and config.get("head_grid"):
        quantised = f"with its head in {config['head_grid']}"
    return " and ".join(filter(None, [cut, pruned, quantised]))


def _how(report: PruningReport) -> str:
    """Return a sentence on how the model was made."""
    trained = report.provenance.get("trained")
    steps = f"then trained for {trained['steps']:,} steps" if trained else ""
    if is_of_vocabulary_alone(report.config):
        cut = "Cut to a smaller vocabulary with mrp-lightning"
        return f"{cut}, {steps}." if steps else f"{cut}; the weights that stay are as they were."
    done = "Pruned" if _removes(report.config) else "Quantised"
    method = "" if "removed" in report.narrowed else f" (method `{report.config['method']}`)"
    by = f"with mrp-lightning{method}"
    if not steps:
        return f"{done} after training, without retraining, {by}."
    # Of a narrower model nothing is left of the removed weights.
    zeros = "" if report.narrowed else " with the removed weights kept at zero"
    return (
        f"{done} {by}, {steps}{zeros}. What is said of the layers' errors is from before that "
        "training."
    )


def _done(report: PruningReport) -> list[str]:
    """Return the lines on the layers, units or weights that were removed."""
    totals, narrowed, removes = report.totals, report.narrowed, _removes(report.config)
    if narrowed:
        if "removed" in narrowed:
            shape = f"shorter: {kept_units(narrowed)}, without {', '.join(narrowed['removed'])}"
        else:
            config = ", ".join(f"`{key}` {value}" for key, value in narrowed["config"].items())
            shape = f"narrower: {kept_units(narrowed)}, as its configuration says ({config})"
        weights = f"{narrowed['model_weights']:,} of {totals['model_weights']:,}"
        return [f"- dense, and {shape}", f"- weights of the model: {weights}"]
    share = f", {totals['share']:.0%} of the model's weights" if "share" in totals else ""
    done = "pruned" if removes else "quantised"
    lines = [f"- layers {done}: {totals['layers']}{share}; left dense: {totals['skipped']}"]
    if removes:
        removed = f"{totals['removed']:,} of {totals['weights']:,} ({totals['sparsity']:.2%})"
        lines.append(f"- weights removed in them: {removed}")
    return lines


def _grid(config: Mapping[str, Any]) -> str | None:
    """Return the line on the grid of the weights that are kept, if they are on one."""
    whose = "the others" if _removes(config) else "their weights"
    if grid := config.get("grid"):
        return f"- {whose} on the grid `{grid}`"
    if bits := config.get("bits"):
        return f"- {whose} in {bits} bits and a scale for {config['group_size']}"
    return None


def _vocabulary(vocabulary: Mapping[str, Any]) -> str | None:
    """Return the line on a cut vocabulary, if it was cut."""
    if not vocabulary:
        return None
    before, after = vocabulary["model_weights"]
    return (
        f"- vocabulary: {vocabulary['kept']:,} of {vocabulary['size']:,} tokens; other text takes "
        f"more of them ({after:,} of {before:,} weights)"
    )


def kept_units(narrowed: Mapping[str, Any]) -> str:
    """Return the units that are left, such as `576 of 704 neurons a block`, of a `narrowed`."""
    each = "" if "removed" in narrowed else " a block"
    return f"{narrowed['kept']} of {narrowed['units']} {narrowed['structure']}{each}"


def _loss(report: PruningReport) -> str:
    """Return the line on what the pruning lost."""
    narrowed = report.narrowed
    if "removed" not in narrowed:
        loss = report.totals["relative_loss"]
        return f"- mean output error of a layer, relative to its output: {loss:.4f}"
    repair = narrowed["repair"]
    fitted = f", {repair['change']:.4f} after a fit of {', '.join(repair['layers'])}"
    return (
        "- mean change of the output, KL(dense ‖ this) for a language model: "
        f"{narrowed['change']:.4f}{fitted * bool(repair['layers'])}"
    )


def _zeros_before(report: PruningReport) -> str | None:
    """Return the line on a model that was pruned or cut before, and on its zeros, if it was."""
    zeros, prunings = report.totals.get("zeros_before"), report.provenance.get("pruned_before", [])
    if not zeros and not prunings:
        return None
    kinds = [
        _kind(x)
        # A method chooses weights and other units, no blocks.
        + (f" by {x['method']}" if "method" in x and x.get("structure") != "blocks" else "")
        + (f" and trained for {x['trained']:,} steps" if "trained" in x else "")
        for x in prunings
    ]
    made = in_markdown(", then ".join(kinds))
    if not zeros:
        return f"- before this run: {made}"
    methods = f", {made}" if made else ""
    return f"- zero before: {zeros:.2%} of them{methods}; the error is against those weights"


def _calibration(data: Mapping[str, Any]) -> str:
    """Return the line on the calibration data, as far as they are known."""
    source = f" of {data['source']}" if data.get("source") else ""
    seed = f", seed {data['seed']}" if data.get("seed") is not None else ""
    length, windows = data["sequence_length"], counted(data["samples"], "window")
    return f"- calibrated on: {windows} of {length} tokens{source}{seed}"


def _recipe(config: dict[str, Any]) -> list[str]:
    """Return the callback of the run as YAML; values are JSON, in which 2:4 is no number."""
    arguments = {key: config.get(key) for key in _RECIPE}
    if arguments["bits"] is not None:
        # Without bits there are no groups, and a size of them would mean nothing.
        arguments["group_size"] = config["group_size"]
    return [
        "class_path: callbacks.PruningCallback",
        "init_args:",
        *(
            f"  {key}: {json.dumps(value)}"
            for key, value in arguments.items()
            if (value is not None and value is not False and value != _DEFAULTS.get(key))
            or (key == "block_size" and not config.get("structure"))
        ),
    ]
