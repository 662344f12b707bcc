"""The parts on what the models can do: perplexity, zero-shot tasks, text, before and after."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pandas as pd

from mrp_lightning.experiments.models import Model, Result, by_setting
from mrp_lightning.experiments.page.excess import draw_excess
from mrp_lightning.experiments.page.parts import Column, Part, Picture, Row, Table, columns
from mrp_lightning.experiments.page.peers import NO_PEERS, Peers
from mrp_lightning.experiments.page.pictures import Scale, draw_lines
from mrp_lightning.experiments.page.tables import results_table, zero_shot_table
from mrp_lightning.experiments.scores import Score, deviation, finite_means, measured, named, values
from mrp_lightning.records.evaluation import UNNAMED


def results_part(model: Model, peers: Peers = NO_PEERS) -> Part | None:
    """Perplexity, loss and time of all results."""
    table = results_table(model)
    if table is None:
        return None
    compared = any(len(results) > 1 for results in by_setting(model.originals).values())
    sentences = ["Lower is better; the lowest of each sparsity is bold."] if compared else []
    sentences += _prefixes(model)
    texts = [score for score in measured(model.runs) if score.of and not score.zero_shot]
    pictures = [
        picture
        for text in texts
        for picture in (
            *_settings(model, text, peers.get((model.name, text.of), {})),
            *_options(model, text),
        )
    ]
    title = "What changed" if len(model.originals) == 1 else "Results"
    return Part(title, " ".join(sentences), [table], pictures)


def zero_shot_part(model: Model) -> Part | None:
    """Tasks before and after; nothing where there are none."""
    table = zero_shot_table(model)
    if table is None:
        return None
    scores = [score for score in measured(model.runs) if score.in_percent]
    pictures = []
    for setting, results in by_setting(model.results).items():
        shown = [*(r for r in model.rows if r.method is None), *results]
        means = {str(s): {r.label: x for r, x in finite_means(shown, s).items()} for s in scores}
        frame = pd.DataFrame(means, [r.label for r in shown], dtype=float).T
        frame = frame.dropna(how="all").dropna(axis=1, how="all")
        if set(frame) - {"dense"}:
            name, caption = f"zeroshot-{setting}", f"Zero-shot results at {setting}, in percent."
            scale = Scale("%", "{:.2f}".format, zero=False)
            if len(frame) > 1:
                how = (frame, _methods(shown), scale)
                pictures.append(draw_lines(name, caption, *how, across=""))
    return Part("Zero-shot", "", [table], pictures)


def continuations_part(model: Model) -> Part | None:
    """Tables of the texts that the first run of each result writes after the same words."""
    tables: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for result in [r for r in model.rows if r.method is None or r in model.originals]:
        for text, found in result.runs[0].evaluation.continuations.items():
            start = {"": [Row("prompt", [found["prompt"]])]}
            groups = tables.setdefault((text, found["prompt"]), start)
            written = Row(result.label, [found["continuation"]])
            groups.setdefault(result.setting, []).append(written)
    if not tables:
        return None
    shown = [*columns("method:"), Column("text", kind="prose")]
    return Part(
        "What the models write",
        "Always the most likely token, after the first words of the text.",
        [Table(f"On {named(text)}", shown, rows) for (text, _), rows in tables.items()],
        folded=True,
    )


def _settings(
    model: Model, score: Score, peers: Mapping[str, Mapping[str, float]]
) -> Iterator[Picture]:
    """How far the results of each setting are above the dense model."""
    plain = [r for r in model.results if not r.trial.changed and len(values(r.runs, score))]
    finite = finite_means(plain, score)
    panels = {}
    for setting, results in by_setting(finite).items():
        spreads = [deviation(values(result.runs, score)) for result in results]
        columns = {"mean": [finite[r] for r in results], "deviation": spreads}
        panels[setting] = pd.DataFrame(columns, [r.label for r in results], dtype=float)
    panels = {setting: panel for setting, panel in panels.items() if len(panel) > 1}
    if not panels:
        return
    before = finite_means(model.rows[:1], score) if model.dense else {}
    lost = [f"{result.label} at {result.setting}" for result in plain if result not in finite]
    caption = f"{_named(score)} above that of the dense model, by sparsity."
    caption += f" Not finite: {', '.join(lost)}." if lost else ""
    name, dense = str(score).partition(" @")[0], next(iter(before.values()), None)
    methods = _methods(model.results)
    yield draw_excess(name, caption, panels, methods, dense=dense, peers=peers)


def _options(model: Model, score: Score) -> Iterator[Picture]:
    """A line for each recipe or method over the values of each option that was varied.

    Values that are no numbers, such as texts, have no order that a line could follow.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in model.results:
        if result.trial.changed and finite_means([result], score):
            groups.setdefault((result.setting, result.trial.changed.option), []).append(result)
    for (setting, option), results in groups.items():
        if any(r.trial.changed is None or r.trial.changed.number is None for r in results):
            continue
        sizes = {result.trial.columns for result in results} - {""}
        methods, rows = {}, []
        for result in results:
            change, found = result.trial.changed, values(result.runs, score)
            assert change is not None
            size = f", S={result.trial.columns}" if len(sizes) > 1 else ""
            label = f"{result.trial.label}{size}"
            methods[label] = result.method
            rows.append((label, change.number, float(found.mean()), deviation(found) or 0.0))
        table = pd.DataFrame(rows, columns=["label", "place", "mean", "spread"])
        places = sorted(set(table["place"]))
        shaped = table.pivot_table(["mean", "spread"], "place", "label", "first", sort=False)
        shaped = shaped.reindex(places)
        means, spread = shaped["mean"], shaped["spread"]
        caption = f"{_named(score)} over {option} at {setting}."
        name = f"{option}-{setting}" + (f"-{score.of}" if score.of != UNNAMED else "")
        how = (methods, Scale(str(score), score.write, zero=False))
        band = (means - spread, means + spread)
        yield draw_lines(name, caption, means, *how, across=option, band=band)


def _methods(results: Iterable[Result]) -> dict[str, str | None]:
    return {result.label: result.method for result in results}


def _named(score: Score) -> str:
    return "Perplexity" if score.of == UNNAMED else f"Perplexity on {score.of}"


def _prefixes(model: Model) -> Sequence[str]:
    """How the windows of texts begin, where that is recorded."""
    found: dict[float, list[str]] = {}
    for run in model.runs:
        for text, scores in run.evaluation.perplexity.items():
            if (tokens := scores.get("prefix")) is not None:
                found.setdefault(tokens, []).append(text)
    return [
        f"Windows of {', '.join(map(named, dict.fromkeys(texts)))} {_begin(tokens)}."
        for tokens, texts in found.items()
    ]


def _begin(tokens: float) -> str:
    own = f"begin with {tokens} of the tokenizer's own, such as BOS"
    return own if tokens else "have no BOS before them"
