"""Models with made up perplexities, for the tests of tables."""

from dataclasses import replace
from pathlib import Path

from mrp_lightning.experiments.groups import ModelRuns, RunGroup
from mrp_lightning.experiments.runs import FinishedTrial, RunDirectory
from mrp_lightning.experiments.trials import Trial
from mrp_lightning.records.evaluation import Evaluation


def models(
    perplexities: dict[Trial, list[float]], of: str = "wikitext2", context: int = 2048
) -> list[ModelRuns]:
    """The first perplexity is that of seed 0, and so on."""
    groups = []
    for trial, values in perplexities.items():
        runs = []
        for seed, value in enumerate(values):
            finished = FinishedTrial(replace(trial, seed=seed), "", {}, {})
            evaluation = Evaluation(perplexity={of: {"perplexity": value, "context": context}})
            runs.append(RunDirectory(Path(), "", None, evaluation, finished=finished))
        groups.append(RunGroup(runs, trial.label))
    return [ModelRuns(next(iter(perplexities)).model, None, groups)]
