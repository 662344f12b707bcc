"""The part of a page on the magnitudes of the kept weights, for models on disk."""

import logging
from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open

from mrp_lightning.experiments.groups import ModelRuns, RunGroup
from mrp_lightning.experiments.pictures import Part, Scale, draw_lines

log = logging.getLogger(__name__)

DECADES, BINS_A_DECADE = (-7, 2), 10
MAGNITUDES = np.logspace(*DECADES, (DECADES[1] - DECADES[0]) * BINS_A_DECADE + 1)
"""The edges of the bins of `count_magnitudes`."""
_EXACT = 2**24
"""So many numbers can be counted in float32, which torch.histc does."""


def weights_part(model: ModelRuns) -> Part | None:
    """Return histograms of the kept weights of models on disk, and of the dense model's weights."""
    pictures = []
    methods = {"dense": None} | {group.label: group.method for group in model.groups}
    for setting, groups in model.by_setting().items():
        counts = dict(pair for group in groups for pair in _counted(model, group))
        if not counts:
            continue
        table = pd.DataFrame(counts, np.sqrt(MAGNITUDES[1:] * MAGNITUDES[:-1]))
        total = table.sum(axis=1).cumsum() / table.sum(axis=None)
        medians = (table.cumsum() >= table.sum() / 2).idxmax()
        listed = ", ".join(f"{label} {median:.2g}" for label, median in medians.items())
        caption = f"Sizes of the kept weights at {setting}. Medians of |w|: {listed}."
        weights = next(run.report.totals["weights"] for run in groups[0].runs if run.report)
        shown = 100 / weights * table[(total > 0.002) & (total.shift(fill_value=0) < 0.9999)]
        scale = Scale("% of all weights", "{:.2g}".format)
        name = f"weights-{setting}"
        pictures.append(draw_lines(name, caption, shown, methods, scale, across="|weight|"))
    text = "Of all pruned layers, in the first run of each result, without the removed weights."
    return Part("Kept weights", text, pictures=pictures, folded=True) if pictures else None


def count_magnitudes(directory: Path, layers: Set[str]) -> np.ndarray | None:
    """Return how many weights of some layers are in each bin of `MAGNITUDES`; zeros are in none.

    The checkpoint is read tensor by tensor. `None` where it does not hold all of the layers.
    """
    counts = torch.zeros(len(MAGNITUDES) - 1, dtype=torch.float64)
    names = {f"{layer}.weight" for layer in layers}
    try:
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in names & set(tensors.keys()):
                    weight = tensors.get_tensor(name).float().abs()
                    sizes = weight[weight > 0].log10().clamp(*DECADES)
                    for part in sizes.split(_EXACT):
                        counts += torch.histc(part, len(counts), *DECADES)
                    names.remove(name)
    except SafetensorError as error:
        log.warning("The weights in %s cannot be read, so they are not shown: %s", directory, error)
        return None
    return None if names else counts.numpy()


def _counted(model: ModelRuns, group: RunGroup) -> Iterator[tuple[str, np.ndarray]]:
    """The counts of the dense weights and of those that the first run of a result has kept."""
    run, layers = group.runs[0], {layer.name for layer in group.runs[0].pruned_layers}
    kept = None if run.exported else count_magnitudes(run.directory, layers)
    if not layers or kept is None:
        return
    sources = [run.config.get("base_model"), model.dense and model.dense.evaluation.model]
    places = [Path(source) for source in sources if source and Path(source).is_dir()]
    if places and (dense := count_magnitudes(places[0], layers)) is not None:
        yield "dense", dense
    yield group.label, kept
