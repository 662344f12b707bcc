"""The perplexities of a model on several texts, by the text that it was calibrated on."""

import numpy as np
import pandas as pd

from mrp_lightning.commands import numbers
from mrp_lightning.experiments.groups import RunGroup
from mrp_lightning.experiments.pictures import Part
from mrp_lightning.experiments.scores import ScoreFrame, Table, named


def texts_part(frame: ScoreFrame) -> Part | None:
    """A matrix of the texts that groups were calibrated on and the texts they are evaluated on.

    After the perplexities it has their ratios to the dense model's over all texts: the highest and
    the geometric mean. There is none for less than two texts, or without a dense model.
    """
    model = frame.model
    texts = [score for score in frame.scores if score.is_perplexity]
    if len(texts) < 2 or model.dense is None or not model.originals:
        return None
    order = [(group.setting, group.label) for group in model.originals]
    means = frame.means.loc[order, texts]
    dense = frame.means.loc[("", "dense"), texts]
    ratios = (means / dense.astype(float)).dropna()
    over_dense = pd.DataFrame(
        {"worst × dense": ratios.max(axis=1), "mean × dense": np.exp(np.log(ratios).mean(axis=1))}
    )
    cells = means.map(numbers.perplexity).rename(columns=str)
    cells.insert(0, "calibrated on", [calibrated_on(group) for group in model.originals])
    best = set()
    for column, values in over_dense.items():
        cells[column] = values.map("{:.2f}".format).reindex(cells.index, fill_value=numbers.MISSING)
        for setting, of_setting in values.groupby(level="setting"):
            if len(of_setting) > 1:
                lowest = of_setting.index[of_setting == of_setting.min()]
                best |= {(setting, label, column) for _, label in lowest}
    listed = ", ".join(
        f"{named(text.of)} {numbers.perplexity(float(value))}" for text, value in dense.items()
    )
    return Part(
        "On other texts",
        "Perplexities, and how many times that of the dense model they are: on the worst text, and "
        f"in the geometric mean over texts; the lowest of each sparsity are bold. Dense: {listed}.",
        [Table("Calibrated on one text, evaluated on several", cells, best=best)],
    )


def calibrated_on(group: RunGroup) -> str:
    """Return the text and the number of windows, as the reports of a group have them."""
    sources: dict[str, None] = {}
    for run in group.runs:
        data = (run.report.provenance.get("data") if run.report else None) or {}
        length = data.get("sequence_length")
        size = f", {data['samples']} × {length}" if data.get("samples") and length else ""
        sources[f"{data.get('source') or 'unknown'}{size}"] = None
    return " or ".join(sources)
