"""What a model that was calibrated on one text can do on others."""

import math
from collections.abc import Mapping

import numpy as np

from mrp_lightning.experiments import numbers
from mrp_lightning.experiments.models import Model, Result, by_setting
from mrp_lightning.experiments.page.parts import Column, Part, Row, Table
from mrp_lightning.experiments.scores import Score, mean, measured, named


def texts_part(model: Model) -> Part | None:
    """A matrix of the texts that results were calibrated on and those they are evaluated on.

    Beside the perplexities it has their ratios to the dense model's over all texts: the highest
    and the geometric mean. There is none where there are less than two texts to evaluate on, or no
    dense model.
    """
    texts = [score for score in measured(model.runs) if score.of and score.metric == "perplexity"]
    if len(texts) < 2 or model.dense is None or not model.originals:
        return None
    dense = {text: mean([model.dense], text) for text in texts}
    groups = {}
    for setting, results in by_setting(model.originals).items():
        matrix = {result: _ratios(result, dense) for result in results}
        worst = {result: max(ratios.values()) for result, ratios in matrix.items() if ratios}
        middle = {
            result: float(np.exp(np.mean(np.log(list(ratios.values())))))
            for result, ratios in matrix.items()
            if ratios
        }
        groups[setting] = [
            Row(
                result.label,
                [
                    calibrated_on(result),
                    *(numbers.perplexity(_infinite(mean(result.runs, text))) for text in texts),
                    *(_times(found.get(result)) for found in (worst, middle)),
                ],
                result.method,
                [
                    len(texts) + 1 + place
                    for place, found in enumerate((worst, middle))
                    if len(found) > 1 and found.get(result) == min(found.values())
                ],
            )
            for result in results
        ]
    columns = [
        Column("method", kind="text"),
        Column("calibrated on", kind="text"),
        *(Column(str(text)) for text in texts),
        Column("worst", "× dense"),
        Column("mean", "× dense, geometric"),
    ]
    before = ", ".join(
        f"{named(text.of)} {numbers.perplexity(_infinite(found))}" for text, found in dense.items()
    )
    return Part(
        "On other texts",
        "Perplexities, and how many times that of the dense model they are: on the worst text, and "
        f"in the geometric mean over texts; the lowest of each sparsity are bold. Dense: {before}.",
        [Table("Calibrated on one text, evaluated on several", columns, groups)],
    )


def calibrated_on(result: Result) -> str:
    """The text and the number of windows, as the reports of a result have them."""
    found: dict[str, None] = {}
    for run in result.runs:
        data = (run.report.provenance.get("data") if run.report else None) or {}
        length = data.get("sequence_length")
        size = f", {data['samples']} × {length}" if data.get("samples") and length else ""
        found[f"{data.get('source') or 'unknown'}{size}"] = None
    return " or ".join(found)


def _ratios(result: Result, dense: Mapping[Score, float | None]) -> dict[Score, float]:
    """The ratio to the dense perplexity on each text; empty where one is missing."""
    found = {
        text: pruned / before
        for text, before in dense.items()
        if before and (pruned := mean(result.runs, text)) is not None
    }
    return found if len(found) == len(dense) else {}


def _infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _times(ratio: float | None) -> str:
    return numbers.MISSING if ratio is None else f"{ratio:.2f}"
