"""Parts of a page of lab/results/: results with the paper's values and other codes, and texts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from pages.excess import draw_excess
from pages.paper import CONTEXT, reported
from pages.peers import NO_PEERS, Peers

from mrp_lightning.commands import numbers
from mrp_lightning.experiments.groups import ModelRuns, RunGroup
from mrp_lightning.experiments.pictures import Part, Picture, Scale, draw_lines
from mrp_lightning.experiments.scores import (
    Score,
    ScoreFrame,
    Table,
    deviation,
    named,
    results_table,
    zero_shot_table,
)
from mrp_lightning.experiments.trials import ChangedOption
from mrp_lightning.records.evaluation import UNNAMED


def results_part(frame: ScoreFrame, peers: Peers = NO_PEERS) -> Part | None:
    """Perplexity, loss and time of all groups, next to the paper's values and other codes."""
    table = with_paper(results_table(frame), frame)
    if table is None:
        return None
    if "CPU seconds" in table.cells:  # wall-clock seconds include other work and pauses
        table = replace(table, cells=table.cells.drop(columns="seconds"))
    model = frame.model
    compared = any(len(groups) > 1 for groups in model.by_setting().values())
    sentences = ["Lower is better; the lowest of each sparsity is bold."] if compared else []
    sentences += _prefixes(model)
    pictures = [
        picture
        for text in frame.scores
        if text.is_perplexity
        for picture in (
            *_above_dense(frame, text, peers.get((model.name, text.of), {})),
            *_over_options(frame, text),
        )
    ]
    return Part("Results", " ".join(sentences), [table], pictures)


def zero_shot_part(frame: ScoreFrame, part: Part | None) -> Part | None:
    """Return the part of a report, next to the paper's values."""
    table = with_paper(zero_shot_table(frame), frame)
    return replace(part, tables=[table]) if part and table else part


def paper_value(group: RunGroup, score: Score) -> float | None:
    """Return the paper's value, if it is of the same trial and the same context."""
    if score.context not in (None, CONTEXT):
        return None
    return reported(group.trial, score.name)


def with_paper(table: Table | None, frame: ScoreFrame) -> Table | None:
    """A table of scores with the paper's value and the difference after each score that has one."""
    if table is None:
        return None
    cells = table.cells.copy()
    groups = {(group.setting, group.label): group for group in frame.model.rows}
    for score in frame.scores:
        if str(score) not in cells:
            continue
        values = {key: paper_value(groups[key], score) for key in cells.index}
        if all(value is None for value in values.values()):
            continue
        ours, position = frame.means[score], int(cells.columns.get_loc(str(score)))
        differences = {
            key: ""
            if x is None or not np.isfinite(ours[key])
            else numbers.signed(ours[key] - x, numbers.number)
            for key, x in values.items()
        }
        written = ["" if x is None else f"{x:g}" for x in values.values()]
        cells.insert(position + 1, "paper", written, allow_duplicates=True)
        cells.insert(position + 2, "difference", list(differences.values()), allow_duplicates=True)
    return replace(table, cells=cells)


def continuations_part(model: ModelRuns) -> Part | None:
    """Tables of the texts that the first run of each group writes after the same words."""
    tables: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for group in [g for g in model.rows if g.method is None or g in model.originals]:
        for text, entry in group.runs[0].evaluation.continuations.items():
            start = [("", "prompt", entry["prompt"])]
            rows = tables.setdefault((text, entry["prompt"]), start)
            rows.append((group.setting, group.label, entry["continuation"]))
    if not tables:
        return None
    return Part(
        "What the models write",
        "Always the most likely token, after the first words of the text.",
        [
            Table.of_rows(f"On {named(text)}", ("method", "text"), rows, kind="prose")
            for (text, _), rows in tables.items()
        ],
        folded=True,
    )


def _above_dense(
    frame: ScoreFrame, score: Score, peers: Mapping[str, Mapping[str, float]]
) -> Iterator[Picture]:
    """The distances of the groups of each setting to the dense model."""
    plain = [
        group
        for group in frame.model.groups
        if not group.trial.changed and not np.isnan(frame.means.at[_key(group), score])
    ]
    finite = [group for group in plain if np.isfinite(frame.means.at[_key(group), score])]
    panels = {}
    for setting, groups in frame.model.by_setting(finite).items():
        spreads = [deviation(frame.values(_key(group), score)) for group in groups]
        means = [frame.means.at[_key(group), score] for group in groups]
        columns = {"mean": means, "deviation": spreads}
        panels[setting] = pd.DataFrame(columns, [group.label for group in groups], dtype=float)
    panels = {setting: panel for setting, panel in panels.items() if len(panel) > 1}
    if not panels:
        return
    dense = frame.means[score].get(("", "dense"), np.nan)
    lost = [f"{group.label} at {group.setting}" for group in plain if group not in finite]
    caption = f"{_named(score)} above that of the dense model, by sparsity."
    caption += f" Not finite: {', '.join(lost)}." if lost else ""
    methods = {group.label: group.method for group in frame.model.groups}
    base = float(dense) if np.isfinite(dense) else None
    name = str(score).partition(" @")[0]
    yield draw_excess(name, caption, panels, methods, dense=base, peers=peers)


def number_of(changed: ChangedOption | None) -> float | None:
    """Return the value of a changed option if it is a number, else `None`."""
    value = changed and changed.value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None


def _over_options(frame: ScoreFrame, score: Score) -> Iterator[Picture]:
    """A line for each recipe or method over the values of each option that was varied.

    Values that are no numbers, such as texts, have no order that a line could follow.
    """
    varied: dict[tuple[str, str], list[RunGroup]] = {}
    for group in frame.model.groups:
        if group.trial.changed and np.isfinite(frame.means.at[_key(group), score]):
            varied.setdefault((group.setting, group.trial.changed.option), []).append(group)
    for (setting, option), groups in varied.items():
        if any(number_of(group.trial.changed) is None for group in groups):
            continue
        sizes = {group.trial.columns for group in groups} - {""}
        methods, rows = {}, []
        for group in groups:
            values = frame.values(_key(group), score)
            size = f", S={group.trial.columns}" if len(sizes) > 1 else ""
            label = f"{group.trial.label}{size}"
            methods[label] = group.method
            number = number_of(group.trial.changed)
            rows.append((label, number, float(values.mean()), deviation(values) or 0.0))
        table = pd.DataFrame(rows, columns=["label", "x", "mean", "spread"])
        shaped = table.pivot_table(["mean", "spread"], "x", "label", "first", sort=False)
        shaped = shaped.reindex(sorted(set(table["x"])))
        means, spread = shaped["mean"], shaped["spread"]
        caption = f"{_named(score)} over {option} at {setting}."
        name = f"{option}-{setting}" + (f"-{score.of}" if score.of != UNNAMED else "")
        how = (methods, Scale(str(score), score.write, zero=False))
        band = (means - spread, means + spread)
        yield draw_lines(name, caption, means, *how, across=option, band=band)


def _key(group: RunGroup) -> tuple[str, str]:
    return group.setting, group.label


def _named(score: Score) -> str:
    return "Perplexity" if score.of == UNNAMED else f"Perplexity on {score.of}"


def _prefixes(model: ModelRuns) -> list[str]:
    """Describe the beginnings of the windows of texts, if they are recorded."""
    texts: dict[float, list[str]] = {}
    for run in model.runs:
        for text, scores in run.evaluation.perplexity.items():
            if (tokens := scores.get("prefix")) is not None:
                texts.setdefault(tokens, []).append(text)
    return [
        f"Windows of {', '.join(map(named, dict.fromkeys(names)))} {_begin(tokens)}."
        for tokens, names in texts.items()
    ]


def _begin(tokens: float) -> str:
    own = f"begin with {tokens} of the tokenizer's own, such as BOS"
    return own if tokens else "have no BOS before them"
